"""Tuning at the linear model's own mode: closed-form empirical Bayes, MacKay's conditions, and the scale of groups."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lapwing import Gaussian, InputError, Laplace, TuningWarning
from lapwing.tuning import Tuning
from tests import networks, oracles
from tests.test_scale_free import Block

SCALES = [0.01, 0.1, 10.0, 100.0]


def tuning(la: Laplace) -> Tuning:
    assert la.tuning_ is not None
    return la.tuning_


def regression(count: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -0.5, 0.3, 0.1], dtype=torch.float64)[:, None]
    return x, y + 0.4 * torch.randn(count, 1, generator=generator, dtype=torch.float64)


def marginal(x: Tensor, y: Tensor, precision: Tensor, noise: Tensor) -> Tensor:
    covariance = x @ (x / precision).T + noise * torch.eye(len(x), dtype=x.dtype)
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=x.dtype), covariance)
    return normal.log_prob(y[:, 0])


def empirical_bayes(x: Tensor, y: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, float]:
    """The precisions and the noise that maximize the closed-form marginal likelihood."""
    logs = [torch.zeros(shape, dtype=torch.float64, requires_grad=True), torch.zeros((), dtype=torch.float64)]
    logs[1].requires_grad_()
    optimizer = torch.optim.LBFGS(
        logs, max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -marginal(x, y, logs[0].exp(), logs[1].exp())
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    precision, noise = (value.detach().exp() for value in logs)
    return precision, noise, float(marginal(x, y, precision, noise))


@pytest.mark.parametrize("structure", ["kron", "block", "full"])
@pytest.mark.parametrize("groups", ["scalar", "input"])
def test_of_a_linear_network_is_empirical_bayes(structure: str, groups: str) -> None:
    x, y = regression()
    torch.manual_seed(3)
    model = nn.Linear(4, 1, bias=False).double()
    la = Laplace(model, Gaussian(noise=2.0), structure, prior=5.0).fit([(x, y)])
    la.tune_prior(method="linear-evidence", groups=groups, loader=[(x, y)], tolerance=1e-8, mode_tolerance=1e-10)
    precision, noise, value = empirical_bayes(x, y, (4,) if groups == "input" else ())
    found = tuning(la).precisions
    (chosen,) = found.values()
    torch.testing.assert_close(torch.as_tensor(chosen, dtype=torch.float64), precision, rtol=1e-5, atol=0)
    assert la.noise == pytest.approx(float(noise), rel=1e-6)
    assert tuning(la).value == pytest.approx(value, rel=1e-9)
    assert tuning(la).converged
    assert float(la.log_evidence(center="linear")) == pytest.approx(value, rel=1e-9)


# With other seeds one of the layers explains all, and the precision of the other runs off.
@pytest.mark.parametrize(("likelihood", "seed"), [("classification", 3), ("binary", 1), ("regression", 1)])
def test_mackays_conditions_hold_at_the_mode(likelihood: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    drawn = networks.make("mlp", 5)(x).detach() * 3
    noise = torch.randn(drawn.shape, generator=generator, dtype=torch.float64)
    y: Tensor = {"classification": drawn.argmax(1), "binary": (drawn > 0).double(), "regression": drawn + 0.3 * noise}[
        likelihood
    ]
    la = Laplace(networks.make("mlp", seed), likelihood, "full").fit([(x, y)])
    la.tune_prior(method="linear-evidence", groups="layer", loader=[(x, y)], tolerance=1e-6, mode_tolerance=1e-8)
    assert tuning(la).converged
    posterior = la.at(center="linear").posterior
    hessian = oracles.curvature(la, [(x, y)]) * float(posterior.likelihood_scale)
    elements = torch.cat(
        [
            block.pack({n: posterior.precisions[n].expand(s) for n, s in posterior.sizes.items()})
            for block in la.curvature.blocks
        ]
    )
    shares = (torch.linalg.inv(hessian + torch.diag(elements)) @ hessian).diagonal()
    mode = torch.cat([block.pack({n: v.double() for n, v in posterior.mean.items()}) for block in la.curvature.blocks])
    for part in oracles.layer_slices(la):
        assert float(shares[part].sum()) == pytest.approx(float((elements * mode.square())[part].sum()), rel=2e-6)
    values = [step.value for step in tuning(la).rounds]
    assert all(after >= before - 1e-3 for before, after in itertools.pairwise(values))
    assert values[-1] > values[0]
    assert tuning(la).rounds[-1].mode_residual <= 1e-8
    elementwise = posterior.effective_dimensions()
    packed = torch.cat([block.pack(elementwise) for block in la.curvature.blocks])
    torch.testing.assert_close(packed, shares, rtol=1e-7, atol=1e-9)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.second, self.second_norm = nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first_norm(self.first(x)))
        return self.head(torch.relu(self.second_norm(self.second(x))).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 4), nn.Parameter(0.5 * torch.randn(1, 5, 4))
        self.block, self.norm, self.head = Block(4, nn.LayerNorm, True), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.tokens(tokens) + self.places)).mean(1))


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor, list[str]]:
    """A network, inputs, its outputs at other weights and noise, and the names of one of its scale-free groups.

    So every group is needed: the data determine directions of each.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module
        if name == "mlp":
            x = torch.randn(80, 4, dtype=torch.float64)
            model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
            group = ["0.weight", "0.bias"]
        elif name == "cnn":
            x = torch.randn(60, 1, 7, 7, dtype=torch.float64)
            model, group = Cnn(), ["first.weight", "first.bias"]
        else:
            x = torch.randint(7, (60, 5))
            model = Transformer()
            group = ["tokens.weight", "places"] + [
                f"block.{layer}.{part}" for layer in ("attention.out_proj", "down") for part in ("weight", "bias")
            ]
        model = model.double().train()
        model(x)  # running statistics
        model.eval()
        moved = {name: value + 0.3 * torch.randn_like(value) for name, value in model.named_parameters()}
        y = torch.func.functional_call(model, moved, (x,)).detach()
        return model, x, y + 0.3 * torch.randn_like(y), group


def scaled(model: nn.Module, group: list[str], k: float) -> nn.Module:
    """The same function: epsilons and running statistics of the norms that read the group are scaled alike."""
    model = copy.deepcopy(model)
    for name in group:
        model.get_parameter(name).data.mul_(k)
    for name, norm in model.named_modules():
        if isinstance(norm, nn.BatchNorm1d):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.mul_(k)
            norm.running_var.mul_(k**2)
            norm.eps *= k**2
        elif isinstance(norm, nn.LayerNorm) or name == "first_norm":
            norm.eps *= k**2  # type: ignore[operator]
    return model


@pytest.mark.filterwarnings("ignore:1 of . precisions ran off:lapwing.TuningWarning")  # another group's, under kron
@pytest.mark.parametrize(("name", "structure", "dtype"), [
    ("mlp", "full", torch.float32), ("mlp", "full", torch.float64), ("mlp", "kron", torch.float64),
    ("cnn", "full", torch.float64), ("cnn", "full", torch.float32), ("transformer", "full", torch.float64),
])  # fmt: skip
def test_the_scale_of_a_scale_free_group_means_nothing(name: str, structure: str, dtype: torch.dtype) -> None:
    model, x, y, group = problem(name)
    model, y, x = model.to(dtype), y.to(dtype), x.to(dtype) if x.is_floating_point() else x
    found = {}
    scales = SCALES if structure == "full" else [0.01, 100.0]
    for k in [1.0, *scales]:
        same = scaled(model, group, k)
        torch.testing.assert_close(same(x), model(x), rtol=1e-3, atol=1e-4)
        la = Laplace(same, Gaussian(noise=0.09), structure).fit([(x, y)])
        la.tune_prior(method="linear-evidence", groups="auto", loader=[(x, y)], noise=False)
        assert tuning(la).converged
        posterior = la.posterior
        assert sum(float(posterior.effective_dimensions()[name].sum()) for name in group) > 1  # it counts
        assert all(torch.equal(posterior.precisions[name], posterior.precisions[group[0]]) for name in group)
        latent = la.latent(x[:20])
        found[k] = float(posterior.precisions[group[0]]), latent.covariance.diagonal(dim1=1, dim2=2)
    allowed = 1e-6 if structure == "full" and dtype == torch.float64 else 1e-3
    for k in scales:
        assert found[k][0] * k**2 == pytest.approx(found[1.0][0], rel=allowed)
        torch.testing.assert_close(found[k][1], found[1.0][1], rtol=allowed, atol=0)


def test_under_a_shared_precision_it_changes_the_predictions() -> None:
    model, x, y, group = problem("mlp")
    variances = []
    for k in (1.0, 0.01, 100.0):
        la = Laplace(scaled(model, group, k), Gaussian(noise=0.09), "full").fit([(x, y)])
        la.tune_prior(method="linear-evidence", groups="scalar", loader=[(x, y)], noise=False)
        assert tuning(la).converged
        variances.append(float(la.latent(x[:20]).covariance.diagonal(dim1=1, dim2=2).mean()))
    assert all(abs(variance / variances[0] - 1) > 0.05 for variance in variances[1:])


def test_tuned_at_the_network_separate_precisions_take_the_scale_out_as_well() -> None:
    model, x, y, group = problem("mlp")
    found = []
    for k in (1.0, 10.0):
        la = Laplace(scaled(model, group, k), "regression").fit([(x, y)]).tune_prior(groups="auto")
        found.append((float(la.posterior.precisions[group[0]]) * k**2, la.latent(x[:20]).covariance))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_converges_at_its_defaults_on_a_trained_classifier(structure: str) -> None:
    digits = load_digits()
    x, y = torch.tensor(digits.data[:200] / 16), torch.tensor(digits.target[:200])
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    la = Laplace(model, "classification", structure).fit([(x, y)])
    la.tune_prior(method="linear-evidence", loader=[(x, y)])
    assert tuning(la).converged
    # The optimum of the evidence, its modes found anew.
    best, precision = float(la.log_evidence(center="linear")), tuning(la).precisions["all"]
    for factor in (0.8, 1.25):
        there = la.at(prior=precision * factor).find_mode([(x, y)], tolerance=1e-3)
        assert float(there.log_evidence(center="linear")) < best


def test_weights_that_are_far_too_small_to_begin_with() -> None:
    x, y = regression()
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = 1e-4 * torch.ones(1, 4, dtype=torch.float64)
    la = Laplace(model, Gaussian(noise=0.16), "full").fit([(x, y)])
    la.tune_prior(method="linear-evidence", loader=[(x, y)], tolerance=1e-8, mode_tolerance=1e-10)
    precision, _, value = empirical_bayes(x, y, ())
    assert tuning(la).precisions["all"] == pytest.approx(float(precision), rel=1e-5)
    assert tuning(la).value == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_a_tempered_prior(temperature: float) -> None:
    """Likelihood and prior tempered alike: the optimum of the tempered evidence, against a scan of it."""
    x, y = regression()
    torch.manual_seed(2)
    model = nn.Linear(4, 1, bias=False).double()
    la = Laplace(model, Gaussian(noise=0.2), "full", temperature=temperature, tempered="both").fit([(x, y)])
    la.tune_prior(method="linear-evidence", loader=[(x, y)], noise=False, tolerance=1e-6)
    best = float(tuning(la).precisions["all"])

    def value(precision: float) -> float:
        return float(la.at(prior=precision, center="newton").log_evidence())  # exact for a linear model

    scan = [value(best * factor) for factor in (0.5, 0.9, 0.99, 1.0, 1.01, 1.1, 2.0)]
    assert max(scan) == scan[3]


class Padded(nn.Module):
    """A layer that no example reaches, and one whose best weights are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.noise, self.unused = nn.Linear(4, 1), nn.Linear(3, 1, bias=False), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x[:, :4]) + self.noise(x[:, 4:]) + 0 * self.unused(x[:, :2])


def test_what_has_no_optimum_is_said() -> None:
    x, y = regression()
    # Orthogonal to the targets and to all else: the data say that these weights are 0.
    extra = torch.randn(40, 3, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    design = torch.cat([x, torch.ones_like(y), y], 1)
    extra = extra - design @ torch.linalg.lstsq(design, extra).solution
    torch.manual_seed(0)
    la = Laplace(Padded().double(), Gaussian(noise=0.2), "block").fit([(torch.cat([x, extra], 1), y)])
    data = [(torch.cat([x, extra], 1), y)]
    with pytest.warns(TuningWarning) as told:
        la.tune_prior(method="linear-evidence", groups="layer", loader=data)
    assert float(la.posterior.precisions["unused.weight"]) == 1.0  # held
    said = " ".join(str(warning.message) for warning in told)
    assert "'unused' is without curvature" in said
    assert "ran off to infinity ('noise')" in said
    assert "'used'" not in said.split("ran off")[1]


def test_bad_input() -> None:
    x, y = regression()
    la = Laplace(nn.Linear(4, 1).double(), "regression").fit([(x, y)])
    with pytest.raises(InputError, match="needs loader=..., the data of the fit"):
        la.tune_prior(method="linear-evidence")
    with pytest.raises(InputError, match="saw 10 examples"):
        la.tune_prior(method="linear-evidence", loader=[(x[:10], y[:10])])
    with pytest.raises(InputError, match="tolerance"):
        la.tune_prior(method="linear-evidence", loader=[(x, y)], tolerance=2.0)
    dead = Laplace(Padded().double(), "regression", "block", weights="unused.*").fit([(torch.cat([x, x], 1)[:, :7], y)])
    with pytest.raises(InputError, match="Nothing to tune.*without curvature"):
        dead.tune_prior(method="linear-evidence", loader=[(torch.cat([x, x], 1)[:, :7], y)], noise=False)
    with pytest.raises(InputError, match="max_rounds"):
        la.tune_prior(method="linear-evidence", loader=[(x, y)], max_rounds=0)
    with pytest.warns(TuningWarning, match="did not converge in 1 rounds.*Raise max_rounds"):
        la.tune_prior(method="linear-evidence", loader=[(x, y)], max_rounds=1, tolerance=1e-12)


@pytest.mark.parametrize("network", ["tied-embedding", "scaled", "grouped-cnn"])
def test_input_groups_need_one_first_layer(network: str) -> None:
    x, y = networks.inputs(network, 8), networks.targets("classification", 8)
    la = Laplace(networks.make(network), "classification", "diag").fit([(x, y)])
    with pytest.raises(InputError, match="groups='input' .*one linear or ungrouped convolution layer"):
        la.tune_prior(groups="input")


@pytest.mark.parametrize("structure", ["diag", "kron", "block", "full"])
def test_input_groups_of_a_convolution_are_its_channels(structure: str) -> None:
    x, y = networks.inputs("cnn", 8), networks.targets("classification", 8)
    la = Laplace(networks.make("cnn"), "classification", structure).fit([(x, y)])
    la.tune_prior(groups="input")
    precision: Any = la.posterior.precisions["first.weight"]
    assert precision.shape == la.model.get_parameter("first.weight").shape
    assert torch.equal(precision, precision[:1, :, :1, :1].expand_as(precision))
    assert len({float(value) for value in precision[0, :, 0, 0]}) == 2
    assert tuning(la).converged
