"""Gradients of the log-evidence in the data, against differences of evidences that are fitted anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Bernoulli, Categorical, FactoredDamping, Gaussian, InputError, Laplace
from tests import networks, oracles

LIKELIHOODS: dict[str, Any] = {
    "classification": "classification", "binary": "binary", "regression": Gaussian(0.3),
    "ratios": Gaussian(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)),
}  # fmt: skip
POINT = torch.tensor([0.4, 0.8], dtype=torch.float64)


def warped(eta: Tensor, x: Tensor) -> Tensor:
    """Rotate the first two features by an angle, and scale the last."""
    cos, sin = eta[0].cos(), eta[0].sin()
    return torch.stack([cos * x[:, 0] - sin * x[:, 1], sin * x[:, 0] + cos * x[:, 1], eta[1] * x[:, 2]], dim=1)


def problem(likelihood: str) -> tuple[nn.Module, Tensor, Tensor]:
    name = "regression" if likelihood == "ratios" else likelihood
    return networks.make("mlp"), networks.inputs("mlp", 8), networks.targets(name, 8)


def fitted(model: nn.Module, x: Tensor, y: Tensor, likelihood: str, structure: str, **options: Any) -> Laplace:
    options = {"prior": 0.7, "temperature": 1.3} | options
    return Laplace(model, LIKELIHOODS[likelihood], structure, **options).fit([(x[:5], y[:5]), (x[5:], y[5:])])


def refitted(likelihood: str, structure: str, eta: Tensor, center: str = "network", **options: Any) -> Tensor:
    model, x, y = problem(likelihood)
    la = centered(fitted(model, warped(eta, x), y, likelihood, structure, **options), center, warped(eta, x), y)
    return la.log_evidence()


def centered(la: Laplace, center: str, x: Tensor, y: Tensor) -> Laplace:
    if center == "linear":
        la.find_mode([(x, y)], tolerance=1e-10)
    return la.at(center=center)


def differences(likelihood: str, structure: str, center: str = "network", **options: Any) -> Tensor:
    """The gradient of the evidence of new fits, by central differences of fourth order."""
    h, found = 1e-3, []
    for i in range(len(POINT)):
        unit = torch.zeros_like(POINT)
        unit[i] = h
        near, far = (
            refitted(likelihood, structure, POINT + k * unit, center, **options)
            - refitted(likelihood, structure, POINT - k * unit, center, **options)
            for k in (1, 2)
        )
        found.append((8 * near - far) / (12 * h))
    return torch.stack(found)


def gradient(likelihood: str, structure: str, center: str = "network", **options: Any) -> Tensor:
    model, x, y = problem(likelihood)
    la = centered(fitted(model, warped(POINT, x), y, likelihood, structure, **options), center, warped(POINT, x), y)
    eta = POINT.clone().requires_grad_()
    (found,) = torch.autograd.grad(la.data_evidence(warped(eta, x), y), eta)
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["diag", "block", "full"])
def test_the_gradient_is_that_of_evidences_fitted_anew(likelihood: str, structure: str) -> None:
    torch.testing.assert_close(
        gradient(likelihood, structure), differences(likelihood, structure), rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["diag", "block"])
def test_the_linear_models_own_mode(likelihood: str, structure: str) -> None:
    found, expected = gradient(likelihood, structure, "linear"), differences(likelihood, structure, "linear")
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)  # the modes are known to 1e-10
    assert not torch.allclose(found, gradient(likelihood, structure), rtol=1e-2)  # it is another gradient


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_newton_center_of_the_full_structure(likelihood: str) -> None:
    found, expected = gradient(likelihood, "full", "newton"), differences(likelihood, "full", "newton")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(found, gradient(likelihood, "full"), rtol=1e-2)  # it is another gradient


def test_the_basis_of_ekfac_is_held() -> None:
    """`s_i(η) = u_iᵀ H(η) u_i` in the basis of the fit, H by dense algebra."""
    model, x, y = problem("classification")
    la = fitted(model, warped(POINT, x), y, "classification", "ekfac")
    bases = [block.basis for block in la.posterior.blocks]

    def value(eta: Tensor) -> Tensor:
        moved = warped(eta, x)
        matrix = oracles.curvature(la, [(moved, y)])
        total = 1.3 * la.likelihood.log_prob(oracles.evaluate(model, moved), y).sum()
        for part, basis, block in zip(oracles.layer_slices(la), bases, la.posterior.blocks, strict=True):
            size = part.stop - part.start
            unit = torch.eye(size, dtype=torch.float64).unflatten(1, basis.shape)
            vectors = basis.expand(unit)  # rows u_i
            spectrum = torch.einsum("ip,pq,iq->i", vectors, matrix[part, part], vectors)
            assert block.precisions.numel() == size
            total = total - 0.5 * (1.3 * spectrum + 0.7).log().sum()
        return total

    units = torch.eye(2, dtype=torch.float64) * 1e-3
    expected = torch.stack([
        (8 * (value(POINT + h) - value(POINT - h)) - (value(POINT + 2 * h) - value(POINT - 2 * h))) / 12e-3 for h in units
    ])  # fmt: skip
    torch.testing.assert_close(gradient("classification", "ekfac"), expected, rtol=1e-9, atol=1e-10)


def test_kron_is_exact_where_its_curvature_is() -> None:
    """Of one example the block of a layer is a Kronecker product, under every η."""
    model, x, y = problem("classification")
    x, y = x[:1], y[:1]
    found: list[Tensor] = []
    for structure in ("kron", "block"):
        la = Laplace(model, "classification", structure).fit([(warped(POINT, x), y)])
        eta = POINT.clone().requires_grad_()
        found += torch.autograd.grad(la.data_evidence(warped(eta, x), y), eta)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_a_low_rank_with_all_of_the_rank_is_full() -> None:
    low, full = (gradient("classification", structure) for structure in ("lowrank", "full"))
    torch.testing.assert_close(low, full, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure", ["diag", "block", "full"])
def test_what_it_gains_bounds_what_the_evidence_gains(structure: str) -> None:
    """`log det` is concave: `E(η) ≥ E(η₀) + S(η) − S(η₀)` for every η, near or far."""
    model, x, y = problem("classification")
    la = fitted(model, warped(POINT, x), y, "classification", structure)
    start = float(la.log_evidence() - la.data_evidence(warped(POINT, x), y))
    slack = []
    for angle in (-1.5, 0.3, 0.41, 2.5):
        for size in (0.1, 0.8, 3.0):
            eta = torch.tensor([angle, size], dtype=torch.float64)
            bound = start + float(la.data_evidence(warped(eta, x), y))
            slack.append(float(refitted("classification", structure, eta)) - bound)
    assert min(slack) >= -1e-10
    assert max(slack) > 1e-2
    assert min(slack) < 1e-3  # close by it is tight


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["diag", "ekfac", "block", "full"])
def test_its_value_has_the_effective_dimension(likelihood: str, structure: str) -> None:
    """`tr(P⁻¹ T H/σ²) = γ`, and the fit is that of the evidence."""
    model, x, y = problem(likelihood)
    la = fitted(model, x, y, likelihood, structure)
    noise = torch.tensor(0.3 if likelihood == "regression" else 1.0, dtype=torch.float64)
    fit = float(la.curvature.statistics.log_likelihood_at(noise))
    assert float(la.data_evidence(x, y)) == pytest.approx(1.3 * fit - 0.5 * la.effective_dimension(), rel=1e-10)


def test_batches_add_up_and_stand_for_all() -> None:
    model, x, y = problem("classification")
    la = fitted(model, x, y, "classification", "kron")
    whole = float(la.data_evidence(x, y))
    assert float(la.data_evidence(x, y, scale=1)) == pytest.approx(whole, rel=1e-12)
    added = sum(float(la.data_evidence(x[i:j], y[i:j], scale=1)) for i, j in ((0, 3), (3, 8)))
    assert added == pytest.approx(whole, rel=1e-12)
    standing = sum(float(la.data_evidence(x[i : i + 2], y[i : i + 2])) for i in range(0, 8, 2)) / 4
    assert standing == pytest.approx(whole, rel=1e-12)


class Dense(nn.Module):
    """Three classes at two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x))).unflatten(1, (3, 2))


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))


SHAPES: dict[str, tuple[Any, Any, Any]] = {
    "positions": (Dense, Categorical(dim=1), lambda x: (x[:, :2] > 0).long() + 1),
    "ignored": (Dense, Categorical(dim=1), lambda x: torch.where(x[:, :2] > 0, 1, -100)),
    "one output": (flat, Gaussian(0.5), lambda x: x[:, 0].sin()),
    "yes or no": (flat, Bernoulli(), lambda x: (x[:, 0] > 0).double()),
}  # fmt: skip


@pytest.mark.parametrize("center", ["network", "newton"])
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_of_other_shapes(name: str, center: str) -> None:
    make, likelihood, targets = SHAPES[name]
    torch.manual_seed(0)
    model, x = make().double(), networks.inputs("mlp", 6)
    y = targets(x)

    def evidence(eta: Tensor) -> Tensor:
        return Laplace(model, likelihood, "full").fit([(warped(eta, x), y)]).log_evidence(center=center)

    la = Laplace(model, likelihood, "full").fit([(warped(POINT, x), y)]).at(center=center)
    eta = POINT.clone().requires_grad_()
    (found,) = torch.autograd.grad(la.data_evidence(warped(eta, x), y), eta)
    units = torch.eye(2, dtype=torch.float64) * 1e-5
    expected = torch.stack([(evidence(POINT + h) - evidence(POINT - h)) / 2e-5 for h in units])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("network", ["cnn", "batchnorm", "attention"])
def test_other_networks_by_the_scale_of_their_inputs(network: str) -> None:
    model, x, y = networks.make(network), networks.inputs(network, 6), networks.targets("classification", 6)
    la = Laplace(model, "classification", "full").fit([(x, y)])
    size = torch.ones((), dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(la.data_evidence(size * x, y), size)
    high, low = (
        Laplace(model, "classification", "full").fit([(k * x, y)]).log_evidence() for k in (1 + 1e-5, 1 - 1e-5)
    )
    assert float(found) == pytest.approx(float(high - low) / 2e-5, rel=1e-5)


def test_sure_outputs_have_finite_gradients() -> None:
    """Probabilities that are 0 or 1 in float32 have no curvature, and no slope of it either."""
    model = nn.Linear(1, 3)
    nn.init.constant_(model.weight, 200.0)
    x, binary = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    for likelihood, y in (("binary", binary), ("classification", torch.tensor([0, 2]))):
        with torch.no_grad():
            model.weight[0] *= -1
        la = Laplace(model, likelihood, "diag").fit([(x, y)])
        moved = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(la.data_evidence(moved, y), moved)
        assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize(
    ("options", "moved", "message"),
    [
        ({"structure": "diag", "curvature": "empirical"}, {}, "differentiates the GGN"),
        ({"structure": "full", "curvature": "hessian", "prior": 100.0}, {}, "differentiates the GGN"),
        ({"structure": "kron"}, {"center": "newton"}, "center='network'"),
        ({"structure": "kron", "prior": FactoredDamping(8, 1.0)}, {}, "no evidence"),
    ],
)
def test_refusals(options: dict[str, Any], moved: dict[str, Any], message: str) -> None:
    model, x, y = problem("classification")
    la = Laplace(model, "classification", **options).fit([(x, y)]).at(**moved)
    with pytest.raises(InputError, match=message):
        la.data_evidence(x, y)


def test_targets_are_checked() -> None:
    model, x, y = problem("classification")
    la = fitted(model, x, y, "classification", "diag")
    with pytest.raises(InputError, match="8 outputs"):
        la.data_evidence(x, y[:3])
    with pytest.raises(InputError, match="out of range"):
        la.data_evidence(x, y + 7)
    with pytest.raises(InputError, match="scale must be positive"):
        la.data_evidence(x, y, scale=-1)
