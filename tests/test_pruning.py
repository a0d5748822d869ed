"""Pruning against dense algebra, the evidence of the smaller model, and by taking weights out in fact."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import FactoredDamping, Gaussian, GaussianPrior, InputError, Laplace, Pruning, PruningWarning, prune
from lapwing.pruning import scores
from tests import networks

STRUCTURES = ["diag", "kron", "ekfac", "block", "full", "lowrank"]


def fitted(
    structure: str = "kron", network: str = "mlp", likelihood: Any = "classification", **options: Any
) -> Laplace:
    kind = likelihood if isinstance(likelihood, str) else "regression"
    x, y = networks.inputs(network, 8), networks.targets(kind, 8)
    return Laplace(networks.make(network), likelihood, structure, **options).fit([(x, y)])


def packed(la: Laplace, values: dict[str, Tensor]) -> Tensor:
    return torch.cat([block.pack(values) for block in la.curvature.blocks])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("network", ["mlp", "cnn", "attention"])
def test_scores_are_posterior_precision_times_squared_weight(structure: str, network: str) -> None:
    la = fitted(structure, network, Gaussian(0.3), prior={"*head*": 2.0, "2.*": 2.0, "*": 0.7}, temperature=1.3)
    precision = dense(la)
    squares = packed(la, la.posterior.weights).square()
    rounding = 1e-12 * float(precision.diagonal().max())
    diagonal = packed(la, la.posterior.precision_diagonal())
    torch.testing.assert_close(diagonal, precision.diagonal(), rtol=1e-9, atol=rounding)
    torch.testing.assert_close(packed(la, scores(la)), precision.diagonal() * squares, rtol=1e-9, atol=rounding)
    marginal = squares / torch.linalg.inv(precision).diagonal()
    torch.testing.assert_close(packed(la, scores(la, "marginal")), marginal, rtol=1e-8, atol=rounding)


@pytest.mark.parametrize("structure", STRUCTURES[:-1])  # eigenpairs of products in float32 do not resolve it
def test_small_curvature_counts_in_low_precision(structure: str) -> None:
    """Features of very different sizes: `P_jj = Σ_n x_nj²/σ² + λ`, none of it rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 2, generator=generator) * torch.tensor([1000.0, 0.1])
    model = nn.Linear(2, 1, bias=False)
    la = Laplace(model, Gaussian(0.01), structure, prior=1e-4).fit([(x, torch.randn(100, 1, generator=generator))])
    expected = x.double().square().sum(0) / 0.01 + 1e-4
    torch.testing.assert_close(la.posterior.precision_diagonal()["weight"][0], expected, rtol=1e-5, atol=0)


def test_small_curvature_counts_in_half_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(50, 3, generator=generator) * torch.tensor([1.0, 0.1, 0.05])).bfloat16()
    y = torch.randn(50, 1, generator=generator).bfloat16()
    la = Laplace(nn.Linear(3, 1, bias=False).bfloat16(), "regression", "diag").fit([(x, y)])
    expected = x.double().square().sum(0) + 1
    torch.testing.assert_close(la.posterior.precision_diagonal()["weight"][0], expected, rtol=1e-4, atol=0)


def test_marginal_precisions_are_not_rounded_to_the_weights_dtype() -> None:
    """Variances below the smallest float16: `(P⁻¹)_ii = 1/λ` to a few digits, not 0."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 8).half(), torch.randint(3, (30,))
    la = Laplace(nn.Linear(8, 3).half(), "classification", prior=1e9).fit([(x, y)])
    squares = la.posterior.weights["weight"].double().square()
    torch.testing.assert_close(scores(la, "marginal")["weight"], 1e9 * squares, rtol=1e-5, atol=0)
    found = prune(la, 0.5, precision="marginal")
    assert found.sparsity == 0.5
    # The prior alone counts, and these weights are no mode of it: it gains what it is rid of.
    assert found.evidence_loss == pytest.approx(-0.5e9 * float(squares[~found.masks["weight"]].sum()), rel=1e-4)


def test_an_exact_hessian_keeps_its_negative_diagonal() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x, y = torch.randn(10, 2, dtype=torch.float64), 3 * torch.randn(10, 1, dtype=torch.float64)
    la = Laplace(model, "regression", "full", "hessian", prior=200.0).fit([(x, y)])
    hessian = la.curvature.blocks[0].accumulator.matrix().diagonal()
    assert float(hessian.min()) < -0.1
    torch.testing.assert_close(packed(la, la.posterior.precision_diagonal()), hessian + 200)


def test_sparsity_takes_the_smallest_scores() -> None:
    la = fitted()
    found, kept = prune(la, sparsity=0.5), scores(la)
    values = torch.cat([kept[name].flatten() for name in ("0.weight", "2.weight")])
    assert set(found.masks) == {"0.weight", "2.weight"}  # biases stay
    masks = torch.cat([found.masks[name].flatten() for name in ("0.weight", "2.weight")])
    torch.testing.assert_close(masks, values > values.sort().values[11])
    assert found.sparsity == 0.5
    assert found.threshold == pytest.approx(float(values.sort().values[11]))
    assert found.joint_loss == pytest.approx(quadratic_loss(la, found), rel=1e-9)


def dense(la: Laplace) -> Tensor:
    """P, from the accumulated blocks."""
    posterior = la.posterior
    matrix = torch.block_diag(*[block.accumulator.matrix() for block in la.curvature.blocks])
    prior = packed(la, {n: p.expand(posterior.sizes[n]) for n, p in posterior.precisions.items()})
    return posterior.likelihood_scale * matrix + torch.diag(prior)


def gone(la: Laplace, found: Pruning) -> Tensor:
    sizes = la.posterior.sizes
    return ~packed(la, {n: found.masks.get(n, torch.ones(sizes[n], dtype=torch.bool)) for n in sizes})


def quadratic_loss(la: Laplace, found: Pruning) -> float:
    """Of `log p(D, θ)` around weights that are no mode, by Taylor's rule."""
    posterior = la.posterior
    prior = {n: p * (posterior.weights[n] - posterior.means[n]) for n, p in posterior.precisions.items()}
    slope = packed(la, prior) - posterior.likelihood_scale * packed(la, la.curvature.gradient)
    step = -packed(la, posterior.weights) * gone(la, found)
    return float(slope @ step + 0.5 * step @ dense(la) @ step)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_losses_are_those_of_the_gaussian_posterior(structure: str) -> None:
    prior = {"0.*": 3.0, "*": 0.7} if structure in ("ekfac", "kron") else {"*.bias": 3.0, "0.*": 2.0, "*": 0.7}
    la = fitted(structure, likelihood=Gaussian(0.3), prior=prior)
    precision = dense(la)
    variances = torch.linalg.inv(precision).diagonal()
    priors = packed(la, {n: p.expand(la.posterior.sizes[n]) for n, p in la.posterior.precisions.items()})
    for sparsity in (0.2, 0.7):
        found = prune(la, sparsity)
        assert found.joint_loss == pytest.approx(quadratic_loss(la, found), rel=1e-8)
        out = gone(la, found)
        spared = float(-0.5 * (variances * priors)[out].log().sum())
        assert found.evidence_loss == pytest.approx(found.joint_loss - spared, rel=1e-8)
        # A bound: what the smaller model is spared in truth, of the determinants, is more.
        covariance = torch.linalg.inv(precision)[out][:, out]
        assert spared <= float(-0.5 * (torch.logdet(covariance) + priors[out].log().sum())) + 1e-10


def test_ranking_by_layer_takes_the_same_fraction_of_each() -> None:
    la = fitted(prior={"0.*": 1000.0, "*": 1e-3})
    by_layer = prune(la, 0.5, ranking="layer")
    assert [int(mask.sum()) for mask in by_layer.masks.values()] == [6, 6]
    everywhere = prune(la, 0.5)
    assert [int(mask.sum()) for mask in everywhere.masks.values()] != [6, 6]
    for name, mask in by_layer.masks.items():
        assert float(scores(la)[name][mask].min()) > float(scores(la)[name][~mask].max())


@pytest.mark.parametrize("network", ["cnn", "grouped-cnn", "upsampling", "conv1d", "mlp"])
def test_output_units_go_as_a_whole_and_make_outputs_zero(network: str) -> None:
    la = fitted(network=network)
    found = prune(la, 0.4, units="output")
    assert 0 < found.sparsity <= 0.4 + 0.5 / sum(mask.numel() for mask in found.masks.values())
    model, outputs = found.model(), dict[str, Tensor]()
    for name, module in model.named_modules():
        if f"{name}.weight" in found.masks:
            module.register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out))
    model(networks.inputs(network, 4))
    assert outputs
    silent = 0
    for name, out in outputs.items():
        channels = (out == 0).flatten(2).all(2).all(0) if out.dim() > 2 else (out == 0).all(0)
        silent += int(channels.sum())
        if f"{name}.bias" in found.masks:
            torch.testing.assert_close(~found.masks[f"{name}.bias"], channels)
    assert silent > 0
    assert found.joint_loss == pytest.approx(quadratic_loss(la, found), rel=1e-8)


class HeadFirst(nn.Module):
    """Registered in another order than used; the norm after the head has weights, but makes no outputs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm, self.body = nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head(torch.tanh(self.body(x))))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return torch.cat([self.one(hidden), self.two(hidden)], 1)


class NormalizedHead(nn.Module):
    """The head's weight is computed, so that no rule sees its use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("make", "weights", "expected"),
    [
        (HeadFirst, "all", {"body"}),
        (TwoHeads, "all", {"body"}),
        (NormalizedHead, "all", {"body"}),
        (chain, "all", {"0", "2"}),
        (chain, ["0.*", "2.*"], {"0", "2"}),
        (chain, "0.*", {"0"}),
        (lambda: networks.make("tied-embedding"), "all", {"mix"}),
    ],
)
def test_the_models_own_outputs_stay(make: Any, weights: Any, expected: set[str]) -> None:
    """Whatever order layers are registered in, and whichever are Bayesian: only rows inside the network go."""
    torch.manual_seed(0)
    model = make().double()
    if isinstance(model, HeadFirst | TwoHeads | NormalizedHead | nn.Sequential):
        x = networks.inputs("mlp", 8)
    else:
        x = networks.inputs("tied-embedding", 8)
    la = Laplace(model, "classification", weights=weights).fit([(x, networks.targets("classification", 8))])
    found = prune(la, 0.5, units="output")
    assert {name.rpartition(".")[0] for name in found.masks} == expected
    assert found.sparsity > 0


def test_output_units_of_a_file_are_named(tmp_path: Path) -> None:
    la = fitted()
    la.save(tmp_path / "la.safetensors")
    loaded = Laplace.load(tmp_path / "la.safetensors", la.model)
    with pytest.raises(InputError, match=r"a file keeps none: name the layers"):
        prune(loaded, 0.5, units="output")
    named = prune(loaded, 0.5, units="output", only="0.weight").masks
    for name, mask in prune(la, 0.5, units="output").masks.items():
        assert torch.equal(mask, named[name])
    moved = prune(fitted().to("cpu"), 0.5, units="output").masks
    assert all(torch.equal(mask, named[name]) for name, mask in moved.items())


@pytest.mark.parametrize("network", ["cnn", "grouped-cnn", "upsampling", "mlp"])
def test_input_units_make_layers_blind_to_a_feature(network: str) -> None:
    """Changing what a pruned input reads changes nothing; changing any other does."""
    la = fitted(network=network)
    names = [layer.name for block in la.curvature.blocks for layer in block.layers]
    for name in names:
        if name == "solid":  # one input alone is all of the layer
            continue
        found = prune(la, 0.5, units="input", only=f"{name}.weight")
        layer = found.model().get_submodule(name)
        assert isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
        width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        space = [] if isinstance(layer, nn.Linear) else [4] * (layer.weight.dim() - 2)
        x = torch.randn(2, width, *space, dtype=torch.float64)
        blind = 0
        for channel in range(width):
            other = x.clone()
            other[:, channel] += 1
            changed = not torch.equal(layer(other), layer(x))
            blind += not changed
        assert blind == width // 2
        assert set(found.masks) == {f"{name}.weight"}  # biases belong to no input, and do not count
        assert found.sparsity == pytest.approx((width // 2) / width)


def orthogonal(seed: int = 0, examples: int = 40) -> tuple[Tensor, Tensor]:
    """Inputs with `XᵀX` diagonal, some of which say nothing about the target."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linalg.qr(torch.randn(examples, 6, generator=generator, dtype=torch.float64))[0]
    x = x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
    truth = torch.tensor([[2.0], [0.0], [-1.0], [0.05], [0.0], [1.0]], dtype=torch.float64)
    return x, x @ truth + 0.3 * torch.randn(examples, 1, generator=generator, dtype=torch.float64)


def mode(x: Tensor, y: Tensor, precision: float, noise: float) -> nn.Linear:
    width = x.shape[1]
    model = nn.Linear(width, 1, bias=False).double()
    with torch.no_grad():
        matrix = x.T @ x / noise + precision * torch.eye(width, dtype=torch.float64)
        model.weight.copy_(torch.linalg.solve(matrix, x.T @ y / noise).T)
    return model


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("precision", ["diagonal", "marginal"])
def test_expected_losses_are_exact_for_a_linear_model_with_orthogonal_inputs(structure: str, precision: str) -> None:
    x, y = orthogonal()
    la = Laplace(mode(x, y, 0.5, 0.09), Gaussian(0.09), structure, prior=0.5).fit([(x, y)])
    for sparsity in (1 / 6, 0.5, 5 / 6):
        found = prune(la, sparsity, precision=precision)
        kept = found.masks["weight"][0]
        assert int(kept.sum()) == 6 - round(6 * sparsity)
        assert found.joint_loss == pytest.approx(found.measured_loss([(x, y)]), rel=1e-9)
        smaller = Laplace(mode(x[:, kept], y, 0.5, 0.09), Gaussian(0.09), structure, prior=0.5).fit([(x[:, kept], y)])
        expected = float(la.log_evidence() - smaller.log_evidence())
        assert found.evidence_loss == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("tempered", "temperature"), [("likelihood", 1.0), ("likelihood", 2.0), ("both", 2.0)])
@pytest.mark.parametrize("center", ["network", "newton", "linear"])
def test_expected_losses_are_exact_away_from_a_mode(tempered: str, temperature: float, center: str) -> None:
    """A linear model at weights that were never trained: the slope counts at them, and vanishes where they moved."""
    x, y = orthogonal()
    options: dict[str, Any] = {"prior": GaussianPrior(0.5, mean=0.3), "temperature": temperature, "tempered": tempered}

    def around(inputs: Tensor, weights: Tensor) -> Laplace:
        model = nn.Linear(inputs.shape[1], 1, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(weights)
        la = Laplace(model, Gaussian(0.09), "full", **options).fit([(inputs, y)])
        if center == "linear":
            la.find_mode([(inputs, y)], tolerance=1e-10)
        return la.at(center=center)

    weights = torch.tensor([[1.5, 0.3, -0.5, 0.2, -0.1, 0.4]], dtype=torch.float64)
    la = around(x, weights)
    for sparsity in (1 / 6, 0.5, 5 / 6):
        found = prune(la, sparsity)
        assert found.joint_loss == pytest.approx(found.measured_loss([(x, y)]), rel=1e-8)
        kept = found.masks["weight"][0]
        smaller = around(x[:, kept], weights[:, kept])
        assert found.evidence_loss == pytest.approx(float(la.log_evidence() - smaller.log_evidence()), rel=1e-8)
        pruned = found.model()
        torch.testing.assert_close(pruned.get_parameter("weight"), la.posterior.mean["weight"] * kept)


@pytest.mark.filterwarnings("ignore:The linear model's mode was found:lapwing.ConvergenceWarning")
def test_losses_around_a_mode_that_the_prior_left() -> None:
    """The linear model's mode under another prior than the current one: no mode any more, and the slope knows."""
    x, y = orthogonal()
    la = Laplace(nn.Linear(6, 1, bias=False).double(), Gaussian(0.09), "full").fit([(x, y)])
    la = la.find_mode([(x, y)], tolerance=1e-10).at(prior=50.0, center="linear")
    found = prune(la, 0.5)
    assert found.joint_loss == pytest.approx(found.measured_loss([(x, y)]), rel=1e-8)


@pytest.mark.parametrize("sparsity", [1 / 6, 0.5, 5 / 6])
def test_the_evidence_of_the_smaller_model_is_never_below_what_was_expected(sparsity: float) -> None:
    """Correlated inputs: the others are not moved, so the expected loss is a bound, and here a close one."""
    for seed in range(5):
        x, y = orthogonal(seed)
        x = x @ torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)).double())[0]
        la = Laplace(mode(x, y, 0.5, 0.09), Gaussian(0.09), "full", prior=0.5).fit([(x, y)])
        found = prune(la, sparsity)
        kept = found.masks["weight"][0]
        smaller = Laplace(mode(x[:, kept], y, 0.5, 0.09), Gaussian(0.09), "full", prior=0.5).fit([(x[:, kept], y)])
        loss = float(la.log_evidence() - smaller.log_evidence())
        assert loss <= found.evidence_loss + 1e-9
        assert found.joint_loss == pytest.approx(found.measured_loss([(x, y)]), rel=1e-9)
        if sparsity < 0.2:  # of a single weight, the bound lacks exactly what moving the others brings
            weight, variance = (
                la.posterior.weights["weight"][~found.masks["weight"]],
                la.posterior.variances()["weight"],
            )
            moved = found.joint_loss - float(0.5 * weight.square() / variance[~found.masks["weight"]])
            assert found.evidence_loss - loss == pytest.approx(moved, rel=1e-6, abs=1e-9)


def test_a_prior_mean_counts_in_the_evidence() -> None:
    x, y = orthogonal()
    prior = GaussianPrior(0.5, mean=0.7)
    model = nn.Linear(6, 1, bias=False).double()
    la = Laplace(model, Gaussian(0.09), "full", prior=prior).fit([(x, y)]).at(center="newton")
    found = prune(la, 0.5)
    kept = found.masks["weight"][0]
    rest = nn.Linear(3, 1, bias=False).double()
    smaller = Laplace(rest, Gaussian(0.09), "full", prior=prior).fit([(x[:, kept], y)]).at(center="newton")
    assert found.evidence_loss == pytest.approx(float(la.log_evidence() - smaller.log_evidence()), rel=1e-8)


def test_a_budget_of_evidence() -> None:
    x, y = orthogonal()
    la = Laplace(mode(x, y, 0.5, 0.09), Gaussian(0.09), "full", prior=0.5).fit([(x, y)])
    free = prune(la, evidence_loss=0.0)
    assert free.masks["weight"][0].tolist() == [True, False, True, False, False, True]  # the zeros, and one near it
    assert free.evidence_loss < 0
    for loader in (None, [(x, y)]):  # the quadratic model is exact here: measuring changes nothing
        losses = [prune(la, k / 6).evidence_loss for k in range(6)]
        assert losses[4] > max(0, *losses[:4])
        for budget in (losses[4] * 0.999, losses[4] * 1.001):
            found = prune(la, evidence_loss=budget, loader=loader)
            assert int(found.masks["weight"].sum()) == (3 if budget < losses[4] else 2)
            assert found.evidence_loss <= budget
    with pytest.warns(PruningWarning, match="Nothing is left of 'weight'"):
        assert prune(la, evidence_loss=1e9).sparsity == 1


@pytest.mark.parametrize("measured", [False, True])
def test_a_budget_is_met_by_the_most_units_where_losses_fall_again(measured: bool) -> None:
    """Small weights halfway to their best values cost; larger ones of features that are always 0 spare; then the rest."""
    torch.manual_seed(0)
    x = torch.zeros(40, 15, dtype=torch.float64)
    x[:, :7] = 10 * torch.linalg.qr(torch.randn(40, 7, dtype=torch.float64))[0]
    weights = torch.tensor([5 * [0.22] + 2 * [5.0] + 8 * [3.2]], dtype=torch.float64)
    best = weights * torch.tensor(5 * [2.0] + 10 * [1.0], dtype=torch.float64)
    y = x @ best.T
    model = nn.Linear(15, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(weights)
    la = Laplace(model, Gaussian(1.0), "diag", prior=1.0).fit([(x, y)])
    losses = [prune(la, count / 15).evidence_loss for count in range(15)]
    assert max(losses[1:6]) > 20  # at 5 units
    assert losses[13] < 0 < losses[14]
    for budget, expected in ((0.0, 13), (10.0, 13), (1.01 * losses[14], 14)):
        found = prune(la, evidence_loss=budget, loader=[(x, y)] if measured else None)
        assert int((~found.masks["weight"]).sum()) == expected


def test_a_measured_budget_looks_at_the_data() -> None:
    """A network in which everything interacts: what the quadratic model allows is not what the data allow."""
    x, y = networks.inputs("mlp", 8), networks.targets("regression", 8)
    model = networks.make("mlp")
    y = model(x).detach() + 0.1 * y
    la = Laplace(model, Gaussian(0.005), "full", prior=0.1).fit([(x, y)])

    def loss(found: Pruning) -> float:
        return found.evidence_loss - found.joint_loss + found.measured_loss([(x, y)])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PruningWarning)
        losses = [loss(prune(la, count / 24)) for count in range(24)]
    for budget in (7.5, 15.0, 30.0):
        found = prune(la, evidence_loss=budget, loader=[(x, y)])
        assert loss(found) <= budget
        number = round(24 * found.sparsity)
        assert losses[number] == pytest.approx(loss(found))
        assert losses[number + 1] > budget
        assert prune(la, evidence_loss=budget).sparsity != found.sparsity


@pytest.mark.parametrize("center", ["newton", "linear"])
def test_centers_other_than_the_network_are_measured_and_copied(center: str) -> None:
    """`log p(D, θ)` of the network at θ* against that with some of θ* at 0, by hand."""
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = fitted("full", prior=2.0)
    if center == "linear":
        la.find_mode([(x, y)], tolerance=1e-8)
    la = la.at(center=center)
    found = prune(la, 0.5)
    joints = []
    for kept in (False, True):
        model = copy.deepcopy(la.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mask = found.masks.get(name, torch.ones_like(parameter)) if kept else torch.ones_like(parameter)
                parameter.copy_(la.posterior.mean[name] * mask)
            squares = sum(float(p.square().sum()) for p in model.parameters())
            joints.append(float(-nn.functional.cross_entropy(model(x), y, reduction="sum")) - squares)
    assert found.measured_loss([(x, y)]) == pytest.approx(joints[0] - joints[1], rel=1e-9)
    for (name, left), right in zip(found.model().named_parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right), name


def test_tuning_afterwards_changes_nothing_and_a_changed_model_is_refused() -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = fitted()
    found = prune(la, 0.5)
    before = found.measured_loss([(x, y)])
    la.tune_prior()
    assert found.measured_loss([(x, y)]) == before
    with torch.no_grad():
        la.model.get_parameter("0.weight").add_(1)
    for call in (found.model, lambda: found.fine_tune([(x, y)]), lambda: prune(la, 0.5)):
        with pytest.raises(InputError, match="changed since the fit"):
            call()


def test_the_quadratic_model_holds_for_a_trained_network() -> None:
    """Few weights go: what `log p(D, θ)` loses is what was expected, and less than a random choice costs."""
    torch.manual_seed(0)
    x = torch.randn(300, 3, dtype=torch.float64)
    y = (
        torch.tanh(x @ torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]).double())
        @ torch.tensor([[1.0], [-1.0]]).double()
    )
    y = y + 0.1 * torch.randn(300, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=3000, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = 0.5 * (model(x) - y).square().sum() / 0.01 + 0.5 * sum(p.square().sum() for p in parameters)
        value.backward()
        return value

    optimizer.step(loss)
    la = Laplace(model, Gaussian(0.01), "full", prior=1.0).fit([(x, y)])
    one = prune(la, 1.01 / 24)
    assert one.measured_loss([(x, y)]) == pytest.approx(one.joint_loss, rel=0.2)
    few = prune(la, 0.25)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        order = torch.rand(24, generator=generator).argsort() >= 6
        random = copy.copy(few)
        object.__setattr__(random, "masks", {"0.weight": order[:18].view(6, 3), "2.weight": order[18:].view(1, 6)})
        assert random.measured_loss([(x, y)]) > few.measured_loss([(x, y)])


def test_the_model_is_left_alone_unless_asked() -> None:
    la = fitted(network="batchnorm")
    before = copy.deepcopy(la.model.state_dict())
    found = prune(la, 0.6)
    pruned = found.model()
    x, y = networks.inputs("batchnorm", 8), networks.targets("classification", 8)
    found.measured_loss([(x, y)])
    found.fine_tune([(x, y)], epochs=2)
    for name, value in la.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert pruned is not la.model
    for name, parameter in pruned.named_parameters():
        expected = before[name] * found.masks[name] if name in found.masks else before[name]
        assert torch.equal(parameter, expected)
    assert found.apply_(la.model) is la.model
    for name, mask in found.masks.items():
        assert torch.equal(la.model.state_dict()[name] == 0, ~mask)
    with pytest.raises(InputError, match="changed since the fit"):
        found.measured_loss([(x, y)])


def test_fine_tuning_descends_with_the_masks_held() -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = fitted(prior=0.1, temperature=1.5)
    found = prune(la, 0.5)

    def joint(model: nn.Module) -> float:
        fit = la.likelihood.log_prob(model(x), y).sum()
        return (1.5 * fit - 0.05 * sum(p.square().sum() for p in model.parameters())).item()

    tuned = found.fine_tune([(x, y)], epochs=600, lr=0.05)
    assert not any(module is original for module, original in zip(tuned.modules(), la.model.modules(), strict=True))
    assert [module.training for module in tuned.modules()] == [module.training for module in la.model.modules()]
    for name, parameter in tuned.named_parameters():
        assert parameter.grad is None
        if name in found.masks:
            assert torch.equal(parameter == 0, ~found.masks[name])
    assert joint(tuned) > joint(found.model())
    # A mode of log p(D, θ) over the weights that are left: the gradient of the very sum, not of a mean, vanishes there.
    value = 1.5 * la.likelihood.log_prob(tuned(x), y).sum() - 0.05 * sum(p.square().sum() for p in tuned.parameters())
    gradients = torch.autograd.grad(value, list(tuned.parameters()))
    for (name, _), gradient in zip(tuned.named_parameters(), gradients, strict=True):
        free = gradient[found.masks[name]] if name in found.masks else gradient
        assert float(free.abs().max()) < 1e-3


def test_fine_tuning_leaves_modes_as_they_are() -> None:
    """Batch norms that are in eval mode keep their statistics; gradients are on whatever surrounds the call."""
    x, y = networks.inputs("batchnorm", 8), networks.targets("classification", 8)
    model = networks.make("batchnorm").eval()
    found = prune(Laplace(model, "classification").fit([(x, y)]), 0.3)
    with torch.no_grad():
        tuned = found.fine_tune([(x, y)], epochs=3)
    assert not any(module.training for module in tuned.modules())
    assert torch.equal(tuned.get_buffer("norm.running_mean"), model.get_buffer("norm.running_mean"))
    assert not torch.equal(tuned.get_parameter("head.bias"), model.get_parameter("head.bias"))
    with pytest.raises(InputError, match="loader of fine_tune is empty"):
        found.fine_tune([])


def test_noise_enters_fine_tuning() -> None:
    x, y = orthogonal()
    la = Laplace(mode(x, y, 0.5, 0.09), Gaussian(0.09), "full", prior=0.5).fit([(x, y)])
    found = prune(la, 0.5)
    kept = found.masks["weight"][0]
    tuned = found.fine_tune([(x, y)], epochs=600, lr=0.03)
    assert isinstance(tuned, nn.Linear)
    torch.testing.assert_close(tuned.weight[0, kept], mode(x[:, kept], y, 0.5, 0.09).weight[0], rtol=1e-5, atol=1e-6)


def test_empty_layers_are_said() -> None:
    la = fitted(prior={"0.*": 1e-6, "*": 1.0})
    with torch.no_grad():
        model = copy.deepcopy(la.model)
        model.get_parameter("2.weight").mul_(1e-6)
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    small = Laplace(model, "classification").fit([(x, y)])
    with pytest.warns(PruningWarning, match=r"Nothing is left of '0.weight'.*ranking='layer'"):
        prune(small.at(prior={"0.*": 1e-9, "*": 1e9}), 0.6)
    assert all(
        bool(mask.any()) for mask in prune(small.at(prior={"0.*": 1e-9, "*": 1e9}), 0.6, ranking="layer").masks.values()
    )


def test_table_counts_what_is_kept() -> None:
    found = prune(fitted(), 0.5)
    assert isinstance(found, Pruning)
    lines = str(found).splitlines()
    kept = int(found.masks["0.weight"].sum())
    assert lines[2].split() == ["0.weight", str(kept), "12"]
    assert lines[4].split() == ["together", "12", "24"]
    assert "sparsity 50.0%" in lines[5]


def test_biases_and_norms_are_pruned_only_by_name() -> None:
    la = fitted(network="batchnorm")
    assert set(prune(la, 0.3).masks) == {"linear.weight", "head.weight"}
    assert set(prune(la, 0.3, only=["norm.weight", "head.*"]).masks) == {"norm.weight", "head.weight", "head.bias"}
    assert set(prune(la, 0.3, units="output").masks) == {"linear.weight", "linear.bias"}
    assert set(prune(la, 0.4, units="output", only="head.weight").masks) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("make", "network", "expected"),
    [
        (lambda: networks.make("lstm"), "lstm", {"cell.weight_ih_l0", "cell.weight_hh_l0", "head.weight"}),
        (NormalizedHead, "mlp", {"body.weight", "head.parametrizations.weight.original1"}),
    ],
)
def test_matrices_without_kronecker_form_are_pruned_too(make: Any, network: str, expected: set[str]) -> None:
    x, y = networks.inputs(network, 8), networks.targets("classification", 8)
    la = Laplace(make().double(), "classification").fit([(x, y)])
    found = prune(la, 0.5)
    assert set(found.masks) == expected
    assert found.sparsity == 0.5
    values = torch.cat([scores(la)[name].flatten() for name in found.masks])
    kept = torch.cat([mask.flatten() for mask in found.masks.values()])
    assert float(values[kept].min()) > float(values[~kept].max())


def test_a_loss_is_measured_without_a_copy() -> None:
    """A weight norm by hooks, which no copy can be made of after a forward pass."""
    torch.manual_seed(0)
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        body = nn.utils.weight_norm(nn.Linear(3, 4))
    model = nn.Sequential(body, nn.Tanh(), nn.Linear(4, 3)).double()
    found = prune(Laplace(model, "classification", prior=0.5).fit([(x, y)]), 0.3)
    measured = found.measured_loss([(x, y)])
    joints = []
    for masks in ({}, found.masks):
        weights = {n: p.detach() * masks.get(n, torch.ones_like(p)) for n, p in model.named_parameters()}
        with torch.no_grad():
            fit = nn.functional.cross_entropy(torch.func.functional_call(model, weights, x), y, reduction="sum")
        joints.append(-float(fit) - 0.25 * sum(float(value.square().sum()) for value in weights.values()))
    assert measured == pytest.approx(joints[0] - joints[1], rel=1e-9)


def test_only_names_weights_of_units_and_tied_weights_by_any_name() -> None:
    la = fitted()
    with pytest.raises(InputError, match=r"only='0.bias' matches none of the weights with units of kind 'output'"):
        prune(la, 0.5, units="output", only="0.bias")
    tied = fitted(network="tied-embedding")
    first, second = (prune(tied, 0.5, only=name).masks for name in ("embedding.weight", "head.weight"))
    assert set(first) == set(second) == {"embedding.weight"}
    assert torch.equal(first["embedding.weight"], second["embedding.weight"])
    both = prune(tied, 0.5, only=["head.*", "mix.weight"]).masks
    assert set(both) == {"embedding.weight", "mix.weight"}


def test_sparsity_is_never_exceeded() -> None:
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    la = Laplace(nn.Linear(5, 1, bias=False).double(), "regression").fit([(x, y)])
    assert prune(la, 0.7).sparsity == pytest.approx(0.6)
    assert prune(la, 3 / 5).sparsity == pytest.approx(0.6)
    with pytest.warns(
        PruningWarning, match="Nothing is removed: the first unit to go is more than 0.1 of the 5 elements"
    ):
        assert prune(la, 0.1).sparsity == 0
    with pytest.raises(InputError, match="needs a fitted Laplace, got Linear"):
        prune(la.model, 0.5)  # type: ignore[arg-type]


def test_what_the_data_never_saw_is_free_to_go() -> None:
    """A parameter without curvature, at 0, has the prior's precision: removing it costs exactly nothing."""
    la = fitted(network="odd")
    with pytest.warns(PruningWarning, match="'unused'"):
        found = prune(la, evidence_loss=0.0, only="unused")
    assert found.sparsity == 1
    assert found.evidence_loss == found.joint_loss == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either sparsity"),
        ({"sparsity": 0.5, "evidence_loss": 1.0}, "one of the two"),
        ({"sparsity": 1.0}, "below 1"),
        ({"sparsity": -0.1}, "at least 0"),
        ({"sparsity": 0.5, "units": "outputs"}, "Did you mean 'output'"),
        ({"sparsity": 0.5, "precision": "full"}, "Unknown precision"),
        ({"evidence_loss": 0.5, "ranking": "layer"}, "belongs to sparsity"),
        ({"evidence_loss": -0.5}, "at least 0"),
        ({"sparsity": 0.5, "loader": []}, "belongs to evidence_loss"),
        ({"sparsity": 0.5, "only": "1.*"}, "matches none"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prune(fitted(), **options)


def test_other_data_other_models_and_damping_are_refused() -> None:
    la = fitted()
    found = prune(la, 0.5)
    x, y = networks.inputs("mlp", 5), networks.targets("classification", 5)
    with pytest.raises(InputError, match="saw 8 examples, the loader shows 5"):
        found.measured_loss([(x, y)])
    with pytest.raises(InputError, match="no parameter '0.weight' of shape"):
        found.apply_(nn.Linear(2, 2))
    with pytest.raises(InputError, match="FactoredDamping"):
        prune(la.at(prior=FactoredDamping(8, 1.0)), 0.5)
    with pytest.raises(InputError, match="at least 1 epoch"):
        found.fine_tune([(x, y)], epochs=0)
    for again in (lambda: found.fine_tune(iter([(x, y)])), lambda: prune(la, evidence_loss=1.0, loader=iter([(x, y)]))):
        with pytest.raises(InputError, match="used up by the first pass"):
            again()
    with pytest.raises(InputError, match="nothing to prune"):
        prune(fitted(weights="last_layer"), 0.5, units="output")
