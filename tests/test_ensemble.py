"""Ensembles: the numbers of an explicit loop, parallel or not, exported or not; and what a module must be able to do."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lapwing import CustomLikelihood, Ensemble, ExportWarning, Gaussian, Heteroscedastic, InputError, Laplace, Poisson
from tests import networks

SAMPLES = 4
LOOPED = {"lstm", "gru", "odd", "branching", "bags"}  # recurrence, branches, operations without a batching rule
NOT_EXPORTED = {"branching", "scaled", "cross-attention"}  # torch.export does not take the network itself either
EXPORTED_ALWAYS = {"mlp", "cnn", "tied-embedding", "batchnorm", "lstm", "odd"}
ROUNDING = 1e-10


def posterior(network: str = "mlp", kind: Any = "classification", weights: Any = "all") -> Laplace:
    name = kind if isinstance(kind, str) else "regression"
    data = [(networks.inputs(network, 6), networks.targets(name, 6))]
    return Laplace(networks.make(network), kind, "diag", weights=weights).fit(data)


def drawn(la: Laplace) -> dict[str, Tensor]:
    return la.sample(SAMPLES, torch.Generator().manual_seed(0))


def by_hand(la: Laplace, weights: dict[str, Tensor], x: Any) -> Tensor:
    """Outputs `[S, N, *output]` of copies of the model, each with the weights of a sample copied in."""
    found = []
    for s in range(SAMPLES):
        model = copy.deepcopy(la.model).eval()
        with torch.no_grad():
            for name, value in weights.items():
                model.get_parameter(name).copy_(value[s])
            found.append(model(*x) if isinstance(x, tuple) else model(x))
    return torch.stack(found)


@pytest.mark.parametrize("network", networks.NETWORKS)
def test_probabilities_are_those_of_a_loop_over_copies(network: str) -> None:
    la = posterior(network)
    weights, x = drawn(la), networks.inputs(network, 5, seed=3)
    ensemble = Ensemble.of(la, weights)
    expected = by_hand(la, weights, x).softmax(-1).mean(0)
    assert ensemble.parallel == (network not in LOOPED), ensemble
    assert (ensemble.refusal is None) == ensemble.parallel
    assert float((ensemble(x) - expected).abs().max()) < ROUNDING
    assert float((ensemble(x) - la.predict(x, method="sampled", samples=weights).probs).abs().max()) < ROUNDING


@pytest.mark.filterwarnings("ignore::lapwing.ExportWarning")
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # torch's own, of recurrent layers
@pytest.mark.parametrize(
    "network",
    [
        pytest.param(name, marks=[] if name in EXPORTED_ALWAYS else pytest.mark.slow)
        for name in networks.NETWORKS
        if name not in NOT_EXPORTED
    ],
)
def test_exported_it_gives_the_same_for_any_number_of_examples(network: str) -> None:
    ensemble = Ensemble.of(posterior(network), SAMPLES, torch.Generator().manual_seed(0))
    program: Any = ensemble.export(networks.inputs(network, 6)).module()
    for examples in (3, 9):
        x = networks.inputs(network, examples, seed=4)
        assert float((program(x) - ensemble(x)).abs().max()) < ROUNDING
    assert ensemble.parallel == (network not in LOOPED)


@pytest.mark.parametrize("kind", ["binary", "regression", "ratios", "heteroscedastic", "poisson"])
def test_moments_are_those_of_the_mixture(kind: str) -> None:
    """Against `E[y]` and `E[y²] − E[y]²` over samples of weights, with the noise of each; and in float32 still close."""
    ratios = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    likelihood: Any = {"regression": Gaussian(0.3), "ratios": Gaussian(ratios), "poisson": Poisson()}.get(kind, kind)
    x = networks.inputs("mlp", 6)
    model = networks.make("mlp")
    if kind == "heteroscedastic":
        likelihood = Heteroscedastic()
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6)).double()
    y = networks.targets("binary" if kind in ("binary", "poisson") else "regression", 6)
    la = Laplace(model, likelihood, "kron").fit([(x, y)])
    if kind in ("regression", "ratios"):
        la = la.at(noise=0.7)
    weights = drawn(la)
    ensemble, f = Ensemble.of(la, weights), by_hand(la, weights, x)
    if kind == "binary":
        assert float((ensemble(x) - torch.sigmoid(f).mean(0)).abs().max()) < ROUNDING
        return
    if kind == "heteroscedastic":
        precision = nn.functional.softplus(f[..., 3:])
        means, variances = f[..., :3] / precision, 1 / precision
    elif kind == "poisson":
        means, variances = f.exp(), f.exp()
    else:
        means, variances = f, torch.full_like(f, 0.7) * (ratios if kind == "ratios" else 1)
    mean = means.mean(0)
    total = (variances + means.square()).mean(0) - mean.square()
    found, spread = ensemble(x)
    assert torch.allclose(found, mean, rtol=ROUNDING)
    assert torch.allclose(spread, total, rtol=1e-9)
    assert torch.allclose(ensemble.predict(x).epistemic, means.var(0, correction=0), rtol=1e-9)
    program: Any = ensemble.export(x).module()
    for one, other in zip(program(x[:3]), (mean, total), strict=True):
        assert torch.allclose(one, other[:3], rtol=1e-9)
    single = ensemble.to(torch.float32)(x.float())
    assert single[0].dtype == torch.float32
    assert torch.allclose(single[1].double(), total, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::lapwing.ExportWarning")
def test_a_file_of_the_exported_program_needs_no_lapwing(tmp_path: Path) -> None:
    ensemble = Ensemble.of(posterior("batchnorm"), SAMPLES)
    x = networks.inputs("batchnorm", 7, seed=5)
    torch.export.save(ensemble.export(x), tmp_path / "ensemble.pt2")
    torch.save({"x": x, "expected": ensemble(x)}, tmp_path / "numbers.pt")
    (tmp_path / "serve.py").write_text(
        "import sys, torch\n"
        "program = torch.export.load('ensemble.pt2').module()\n"
        "numbers = torch.load('numbers.pt')\n"
        "assert torch.equal(program(numbers['x'][:2]), program(numbers['x'])[:2])\n"
        "assert float((program(numbers['x']) - numbers['expected']).abs().max()) < 1e-12\n"
        "assert not [name for name in sys.modules if name.startswith('lapwing')]\n"
        "print('the same')\n"
    )
    served = subprocess.run([sys.executable, "serve.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert served.stdout == "the same\n", served.stderr


def test_torch_export_takes_it_as_it_is() -> None:
    ensemble = Ensemble.of(posterior(), SAMPLES)
    x = networks.inputs("mlp", 6)
    program: Any = torch.export.export(ensemble, (x,), dynamic_shapes={"args": ({0: torch.export.Dim("n")},)}).module()
    assert float((program(x[:4]) - ensemble(x[:4])).abs().max()) < ROUNDING


def test_what_is_not_bayesian_is_held_and_computed_once() -> None:
    """Multiplications of a last-layer ensemble: one backbone, S heads."""
    la = posterior("mlp", weights="last_layer")
    ensemble, x = Ensemble.of(la, SAMPLES), networks.inputs("mlp", 5)
    assert set(ensemble.names) == {"2.weight", "2.bias"}
    with FlopCounterMode(display=False) as counter:
        ensemble(x)
    assert counter.get_total_flops() == 2 * 5 * (3 * 4 + SAMPLES * 4 * 3)


def test_of_a_last_layer_it_is_the_linearized_predictive() -> None:
    la = posterior("batchnorm", weights="last_layer")
    weights, x = drawn(la), networks.inputs("batchnorm", 5)
    expected = la.predict(x, method="pushed", samples=weights).probs
    assert float((Ensemble.of(la, weights)(x) - expected).abs().max()) < ROUNDING


@pytest.mark.filterwarnings("ignore::lapwing.ExportWarning")
@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_chunks_change_nothing(chunk: int) -> None:
    la = posterior("cnn")
    weights, x = drawn(la), networks.inputs("cnn", 5)
    ensemble = Ensemble.of(la, weights, chunk=chunk)
    assert float((ensemble(x) - Ensemble.of(la, weights)(x)).abs().max()) < ROUNDING
    assert f"{chunk} at a time" in repr(ensemble)
    assert float((ensemble.export(x).module()(x) - ensemble(x)).abs().max()) < ROUNDING


class Two(nn.Module):
    """Two inputs, the second optional in position or by name, and a tied weight; returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor, other: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.tanh(self.left(x) - self.right(other)))}


def test_several_inputs_by_position_and_by_name_with_tied_weights() -> None:
    model = Two().double()
    x, other = networks.inputs("mlp", 6), networks.inputs("mlp", 6, seed=8)
    la = Laplace(model, "classification", "diag").fit([(x, other, networks.targets("classification", 6))])
    weights = drawn(la)
    ensemble = Ensemble.of(la, weights)
    expected = la.predict((x, other), method="sampled", samples=weights).probs
    for found in (ensemble(x, other), ensemble(x, other=other), ensemble.predict({"x": x, "other": other}).probs):
        assert float((found - expected).abs().max()) < ROUNDING
    for program in (
        ensemble.export(x, other).module()(x[:4], other[:4]),
        ensemble.export(x=x, other=other).module()(x=x[:4], other=other[:4]),
    ):
        assert float((program - expected[:4]).abs().max()) < ROUNDING
    moved = copy.deepcopy(ensemble).to(torch.float32).to(torch.float64)  # ties are not lost on the way
    assert float((moved(x, other) - expected).abs().max()) < 1e-6


def test_state_dict_round_trip_and_device() -> None:
    la = posterior("batchnorm")
    model: Any = la.model
    one, two = (Ensemble.of(la, SAMPLES, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    x = networks.inputs("batchnorm", 5)
    assert not torch.allclose(one(x), two(x))
    state = one.state_dict()
    assert state["samples.linear.weight"].shape == (SAMPLES, 4, 3)
    assert torch.equal(state["model.norm.running_mean"], model.norm.running_mean)
    two.load_state_dict(state)
    assert torch.equal(one(x), two(x))
    assert {value.device.type for value in two.to("meta").state_dict().values()} == {"meta"}
    assert list(one.parameters()) == [p for p in one.parameters() if not p.requires_grad]


def test_the_model_is_a_copy_and_stays_in_eval_mode() -> None:
    la = posterior("batchnorm")
    model: Any = la.model.train()
    ensemble, x = Ensemble.of(la, SAMPLES), networks.inputs("batchnorm", 5)
    before, running = ensemble(x), model.norm.running_mean.clone()
    with torch.no_grad():
        model.linear.weight.add_(1)
    assert torch.equal(ensemble.train()(x), before)
    assert not any(module.training for module in ensemble.model.modules())
    assert la.model.training
    assert torch.equal(model.norm.running_mean, running)


def test_it_is_differentiable_in_the_input() -> None:
    la = posterior()
    weights, x = drawn(la), networks.inputs("mlp", 5).requires_grad_()
    (found,) = torch.autograd.grad(Ensemble.of(la, weights)(x)[:, 0].sum(), x)
    (expected,) = torch.autograd.grad(la.predict(x, method="sampled", samples=weights).probs[:, 0].sum(), x)
    assert float((found - expected).abs().max()) < ROUNDING


def test_a_wrapper_exports_the_parts_of_the_uncertainty() -> None:
    class Alarm(nn.Module):
        def __init__(self, ensemble: Ensemble) -> None:
            super().__init__()
            self.ensemble = ensemble

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found = self.ensemble.predict_outputs(self.ensemble.outputs(x))
            return found.probs, found.epistemic

    la = posterior()
    weights, x = drawn(la), networks.inputs("mlp", 6)
    alarm = Alarm(Ensemble.of(la, weights))
    program: Any = torch.export.export(alarm, (x,), dynamic_shapes=({0: torch.export.Dim("n")},)).module()
    expected = la.predict(x[:4], method="sampled", samples=weights)
    probs, epistemic = program(x[:4])
    assert float((probs - expected.probs).abs().max()) < ROUNDING
    assert float((epistemic - expected.epistemic).abs().max()) < ROUNDING


def test_a_compiled_model_is_taken_without_its_wrapper() -> None:
    model = networks.make("mlp")
    data = [(networks.inputs("mlp", 6), networks.targets("classification", 6))]
    la = Laplace(torch.compile(model), "classification", "diag").fit(data)  # type: ignore[arg-type]
    weights = drawn(la)
    ensemble = Ensemble.of(la, weights)
    assert set(ensemble.names) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    expected = by_hand(
        posterior(), {name.removeprefix("_orig_mod."): value for name, value in weights.items()}, data[0][0]
    )
    assert float((ensemble(data[0][0]) - expected.softmax(-1).mean(0)).abs().max()) < ROUNDING


def test_center_and_draws() -> None:
    la = posterior(kind=Gaussian(0.5))
    x = networks.inputs("mlp", 5)
    means = []
    for center in ("network", "newton"):
        weights = la.at(center=center).sample(SAMPLES, torch.Generator().manual_seed(1))
        found, _ = Ensemble.of(la, SAMPLES, torch.Generator().manual_seed(1), center)(x)
        assert torch.allclose(found, by_hand(la, weights, x).mean(0), rtol=ROUNDING)
        means.append(found)
        # predict draws one set of weights at a time, the ensemble all at once
        generator = torch.Generator().manual_seed(1)
        each = [la.at(center=center).sample(1, generator) for _ in range(3)]
        one_by_one = {name: torch.cat([drawn[name] for drawn in each]) for name in weights}
        expected = la.predict(x, method="sampled", samples=3, generator=generator.manual_seed(1), center=center)
        mean, variance = Ensemble.of(la, one_by_one)(x)
        assert torch.allclose(mean, expected.mean, rtol=ROUNDING)
        assert torch.allclose(variance, expected.variance, rtol=1e-9)
    assert not torch.allclose(means[0], means[1], rtol=0.01)
    for drawn in ({"generator": torch.Generator()}, {"center": "newton"}):
        with pytest.raises(InputError, match="draws nothing where it is given weights"):
            Ensemble.of(la, weights, **drawn)  # type: ignore[arg-type]


def test_the_noise_is_what_the_likelihood_takes_it_for() -> None:
    model, x = nn.Linear(3, 2).double(), networks.inputs("mlp", 5)
    weights = {name: value.detach().unsqueeze(0).clone() for name, value in model.named_parameters()}

    def variance(likelihood: Any, noise: Any = None) -> list[float]:
        _, found = Ensemble(model, likelihood, weights, noise, parallel=False)(x)
        return found[0].tolist()  # type: ignore[no-any-return]

    assert variance(Gaussian(0.3)) == pytest.approx([0.3, 0.3], rel=1e-12)
    assert variance(Gaussian(0.3), 2.0) == pytest.approx([2, 2], rel=1e-12)
    assert variance(Gaussian([1.0, 4.0])) == pytest.approx([1, 4], rel=1e-12)
    assert variance(Gaussian([1.0, 4.0]), 2.0) == pytest.approx([2, 8], rel=1e-12)
    assert variance(Gaussian([1.0, 4.0]), torch.tensor([2.0, 8.0])) == pytest.approx([2, 8], rel=1e-12)
    for likelihood in (Gaussian(1.0), Gaussian([1.0, 3.0])):
        with pytest.raises(InputError, match="ratios of the noise variances"):
            variance(likelihood, torch.tensor([2.0, 8.0]))
    for kind in ("classification", "binary", "heteroscedastic", "poisson"):
        with pytest.raises(InputError, match="no noise to set"):
            variance(kind, 2.0)


class Unlike(nn.Module):
    """Other results under vmap than in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + float(torch._C._functorch.is_batchedtensor(self.linear.weight))


def test_masked_classes_are_no_difference_and_a_difference_is_one() -> None:
    x = networks.inputs("mlp", 5)
    for model, parallel in ((networks.Masked().double(), True), (Unlike().double(), False)):
        weights = {name: torch.stack([value.detach(), 2 * value.detach()]) for name, value in model.named_parameters()}
        ensemble = Ensemble(model, "classification", weights, example=x)
        assert ensemble.parallel == parallel, ensemble
        assert ("differ from those of a loop" in repr(ensemble)) == (not parallel)
        outputs = [torch.func.functional_call(model, {k: v[s] for k, v in weights.items()}, x) for s in range(2)]
        expected = torch.stack(outputs).softmax(-1).mean(0)
        assert float((ensemble(x) - expected).detach().abs().max()) < ROUNDING


def test_wrong_dtypes_are_named_with_the_fix() -> None:
    la = posterior()
    weights, x = drawn(la), networks.inputs("mlp", 5)
    for ensemble in (Ensemble.of(la, weights), Ensemble.of(la, weights, parallel=False)):
        for call in (ensemble, ensemble.predict, ensemble.outputs):
            with pytest.raises(InputError, match=r"input of dtype torch.float32, its weights are torch.float64"):
                call(x.float())
        with pytest.raises(RuntimeError, match="[Ss]ize|shape"):
            ensemble(x[:, :2])
    with pytest.raises(InputError, match="input of dtype torch.float32"):
        Ensemble.of(la, weights, example=x.float())
    with pytest.raises(InputError, match=r"'0.weight' are torch.float32, in the model it is torch.float64"):
        Ensemble.of(la, {name: value.float() for name, value in weights.items()})


def test_a_data_parallel_model_is_taken_without_its_wrapper() -> None:
    model, x = networks.make("mlp"), networks.inputs("mlp", 6)
    wrapped = nn.DataParallel(model)
    la = Laplace(wrapped, "classification", "diag").fit([(x, networks.targets("classification", 6))])
    weights = drawn(la)
    expected = by_hand(la, weights, x).softmax(-1).mean(0)
    for ensemble in (Ensemble.of(la, weights), Ensemble(wrapped, "classification", weights, example=x)):
        assert float((ensemble(x) - expected).abs().max()) < ROUNDING


def test_an_export_that_is_no_longer_parallel_says_so() -> None:
    la, x = posterior("batchnorm"), networks.inputs("batchnorm", 6)
    with pytest.warns(ExportWarning, match=f"its {SAMPLES} samples one after another.*parallel=False") as caught:
        Ensemble.of(la, SAMPLES).export(x)
    assert caught[0].filename == __file__
    Ensemble.of(la, SAMPLES, parallel=False).export(x)


class Laplacian(CustomLikelihood):
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).abs().sum(1)


def test_bad_input() -> None:
    la = posterior()
    weights = drawn(la)
    with pytest.raises(InputError, match="needs n of at least 1, got 0"):
        Ensemble.of(la, 0)
    with pytest.raises(InputError, match="chunk"):
        Ensemble.of(la, weights, chunk=0)
    with pytest.raises(InputError, match="'3.weight' have shape"):
        Ensemble.of(la, {"3.weight": torch.zeros(2, 3)})
    with pytest.raises(InputError, match=r"\[3, 4\], in the model it is \[4, 3\]"):
        Ensemble.of(la, {"0.weight": torch.zeros(2, 3, 4)})
    with pytest.raises(InputError, match="same number of samples"):
        Ensemble.of(la, {"0.weight": torch.zeros(2, 4, 3), "0.bias": torch.zeros(3, 4)})
    with pytest.raises(InputError, match="give example=x"):
        Ensemble(la.model, "classification", weights)
    with pytest.raises(InputError, match="at least 2 examples"):
        Ensemble.of(la, weights).export(networks.inputs("mlp", 1))
    with pytest.raises(InputError, match="no method mean"):
        Ensemble(la.model, Laplacian(), weights, parallel=True)(networks.inputs("mlp", 3))
    assert "one after another" in repr(Ensemble(la.model, "classification", weights, parallel=False))


def test_a_model_that_cannot_be_copied_is_refused_with_the_fix() -> None:
    la = posterior()
    model: Any = la.model
    model.cache = model[0].weight * 2
    with pytest.raises(InputError, match="__deepcopy__"):
        Ensemble.of(la, SAMPLES)


def test_a_posterior_from_a_file_needs_an_example(tmp_path: Path) -> None:
    la = posterior()
    la.save(tmp_path / "la.safetensors")
    loaded = Laplace.load(tmp_path / "la.safetensors", la.model)
    with pytest.raises(InputError, match="give example=x"):
        Ensemble.of(loaded, SAMPLES)
    assert Ensemble.of(loaded, SAMPLES, example=networks.inputs("mlp", 2)).parallel
