"""Joint predictions: blocks against marginals and dense algebra, samples against the covariance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Categorical, Gaussian, InputError, Laplace
from tests import networks, oracles

STRUCTURES = ["diag", "kron", "ekfac", "block", "full", "lowrank"]
LIKELIHOODS = ["classification", "binary", "regression"]


def fitted(likelihood: str = "regression", structure: str = "kron", network: str = "mlp", **options: Any) -> Laplace:
    x, y = networks.inputs(network, 8), networks.targets(likelihood, 8)
    chosen: Any = Gaussian(0.2) if likelihood == "regression" else likelihood
    return Laplace(networks.make(network), chosen, structure, prior=3.0, **options).fit([(x, y)])


X = networks.inputs("mlp", 5, seed=9)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_blocks_are_the_marginals(structure: str, likelihood: str) -> None:
    la = fitted(likelihood, structure)
    joint: Any = la.predict(X, joint=True)
    alone = la.latent(X).covariance
    for n in range(5):
        own = slice(3 * n, 3 * n + 3)
        torch.testing.assert_close(joint.covariance[own, own], alone[n], rtol=1e-9, atol=1e-12)
    marginals, plain = joint.marginals, la.predict(X)
    names = ("mean", "variance", "epistemic") if likelihood == "regression" else ("probs", "entropy")
    for name in names:
        torch.testing.assert_close(getattr(marginals, name), getattr(plain, name), rtol=1e-9, atol=1e-12)


def test_against_dense_algebra() -> None:
    la = fitted("regression", "full")
    rows = oracles.packed_jacobian(la, X).flatten(0, 1)
    precision = la.curvature.blocks[0].accumulator.matrix() / 0.2
    precision = precision + 3 * torch.eye(len(precision), dtype=torch.float64)
    expected = rows @ torch.linalg.solve(precision, rows.T)
    torch.testing.assert_close(la.latent(X, joint=True).covariance, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("network", ["mlp", "cnn", "attention", "gru", "tokens"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_cross_covariance_is_a_block_of_the_joint(structure: str, network: str) -> None:
    la, x = fitted("regression", structure, network), networks.inputs(network, 5, seed=9)
    whole = la.latent(x, joint=True).covariance
    torch.testing.assert_close(la.cross_covariance(x[:2], x[2:]), whole[:6, 6:], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.cross_covariance(x[:4], x[4:]), whole[:12, 12:], rtol=1e-9, atol=1e-12)
    twice = la.cross_covariance(x, x)
    torch.testing.assert_close(twice, whole, rtol=1e-9, atol=1e-12)


def test_a_large_batch_goes_in_parts() -> None:
    """Rows that the whole joint covariance would have too many of."""
    la = fitted(max_columns=210)
    x = networks.inputs("mlp", 150, seed=3)
    found = la.cross_covariance(x[:4], x[4:])
    assert found.shape == (12, 438)
    rows, others = (oracles.packed_jacobian(fitted(structure="full"), part).flatten(0, 1) for part in (x[:4], x[4:]))
    full = fitted(structure="full", max_columns=210)
    precision = full.curvature.blocks[0].accumulator.matrix().double() / 0.2
    precision = precision + 3 * torch.eye(len(precision), dtype=torch.float64)
    expected = rows @ torch.linalg.solve(precision, others.T)
    torch.testing.assert_close(full.cross_covariance(x[:4], x[4:]), expected, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(full.cross_covariance(x[4:], x[:4]), expected.T, rtol=1e-8, atol=1e-11)


def test_two_batches_must_make_one() -> None:
    la = fitted()
    with pytest.raises(InputError, match="do not make one batch"):
        la.cross_covariance(X, X[:, :2])
    with pytest.raises(InputError, match="different form"):
        la.cross_covariance(X, {"x": X})


def close_to(samples: Tensor, covariance: Tensor) -> None:
    """The sample covariance within 6 of its standard errors, `√((c_ij² + c_ii c_jj)/S)`."""
    found = torch.cov(samples.flatten(1).T)
    variance = covariance.diagonal()
    error = ((covariance.square() + variance[:, None] * variance) / len(samples)).sqrt()
    assert bool(((found - covariance).abs() < 6 * error + 1e-12).all())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_samples_have_the_joint_covariance(likelihood: str) -> None:
    la = fitted(likelihood)
    joint: Any = la.predict(X, joint=True)
    drawn = joint.sample(20_000, torch.Generator().manual_seed(0))
    assert drawn.shape == (20_000, 5, 3)
    close_to(drawn, joint.covariance)
    spread = joint.covariance.diagonal().sqrt().reshape(5, 3) / math.sqrt(20_000)
    assert bool(((drawn.mean(0) - joint.mean).abs() < 5 * spread).all())
    assert torch.equal(drawn, joint.sample(20_000, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("structure", ["kron", "full", "lowrank"])
@pytest.mark.parametrize("center", ["network", "newton"])
def test_pushed_samples_have_it_too(structure: str, center: str) -> None:
    la = fitted("regression", structure)
    mean, covariance = la.latent(X, joint=True, center=center)
    drawn = la.sample(6)
    pushed: Any = la.predict(X, method="pushed", samples=drawn, joint=True)
    jacobian = oracles.jacobian(la.model, X, list(drawn))
    moves = [
        torch.einsum("ncp,sp->snc", jacobian[name].flatten(2), (drawn[name] - la.model.get_parameter(name)).flatten(1))
        for name in drawn
    ]
    expected = (la.model(X) + torch.stack(moves).sum(0)).detach()
    torch.testing.assert_close(pushed.outputs, expected, rtol=1e-9, atol=1e-12)
    generator = torch.Generator().manual_seed(0)
    many: Any = la.predict(X, method="pushed", samples=600, joint=True, generator=generator, center=center)
    close_to(many.outputs, covariance)
    torch.testing.assert_close(many.covariance, torch.cov(many.outputs.flatten(1).T))
    assert bool(((many.mean - mean).abs() < 5 * covariance.diagonal().reshape(5, 3).sqrt() / math.sqrt(600)).all())


def test_joint_log_prob_of_a_regression() -> None:
    la = fitted()
    joint = la.predict(X, joint=True)
    y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, covariance = la.latent(X, joint=True)
    normal = torch.distributions.MultivariateNormal(mean.flatten(), covariance + 0.2 * torch.eye(15).double())
    torch.testing.assert_close(joint.log_prob(y), normal.log_prob(y.flatten()))
    # The chain rule: one input is its marginal.
    torch.testing.assert_close(la.predict(X[:1], joint=True).log_prob(y[:1]), la.predict(X[:1]).log_prob(y[:1])[0])
    drawn = la.sample(4, torch.Generator().manual_seed(0))
    for method in ("sampled", "pushed"):
        found: Any = la.predict(X, method=method, samples=drawn, joint=True)
        logs = torch.distributions.Normal(found.outputs, math.sqrt(0.2)).log_prob(y).sum((1, 2))
        torch.testing.assert_close(found.log_prob(y), logs.logsumexp(0) - math.log(4))
    with pytest.raises(InputError, match="against means of"):
        joint.log_prob(y[:2])


def test_joint_log_prob_of_classes() -> None:
    """Twins: the joint probability of their labels is more than the product, for one logit decides both."""
    la = fitted("classification")
    twins, y = X[:1].expand(2, -1), torch.tensor([1, 1])
    mean, covariance = la.latent(X[:1])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.distributions.MultivariateNormal(mean[0], covariance[0]).sample((200_000,)).softmax(1)[:, 1]
    joint: Any = la.predict(twins, joint=True)
    found = joint.log_prob(y, samples=200_000, generator=generator)
    torch.testing.assert_close(found.exp(), drawn.square().mean(), rtol=0, atol=4e-3)
    product = la.predict(twins, link="mc", samples=100_000, generator=generator).log_prob(y).sum()
    assert float(found) > float(product)
    with pytest.raises(InputError, match=r"prediction.sample"):
        joint.distribution()


def test_too_many_outputs_ask_for_jacobian_vector_products() -> None:
    la = fitted("classification", max_columns=10)
    with pytest.raises(InputError, match=r"5 × 3 outputs.*method='pushed', joint=True"):
        la.predict(X, joint=True)
    pushed: Any = la.predict(X, method="pushed", joint=True, samples=7)
    assert pushed.outputs.shape == (7, 5, 3)
    la.max_columns = 2
    with pytest.raises(InputError, match="method='pushed'"):
        la.predict(X)
    assert la.predict(X, method="pushed", samples=4).probs.shape == (5, 3)
    with pytest.raises(InputError, match="at least 1"):
        la.predict(X, method="pushed", samples=0)
    with pytest.raises(InputError, match="Supported: exact"):
        fitted().predict(X, joint=True, link="probit")
    with pytest.raises(InputError, match="not differentiable"):
        la.predict(X.clone().requires_grad_(), method="pushed", samples=2)


def test_pushed_predictions_of_dense_outputs() -> None:
    """Images: 2 × 16 × 16 outputs each, from samples alone; memory grows with the outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1))
    x, y = torch.randn(6, 1, 16, 16), torch.randint(2, (6, 16, 16))
    la = Laplace(model, Categorical(dim=1), "diag", "rademacher", prior=50.0).fit([(x, y)])
    prediction = la.predict(x[:2], method="pushed", samples=20, generator=torch.Generator().manual_seed(0))
    assert prediction.probs.shape == (2, 2, 16, 16)
    assert prediction.epistemic.shape == (2, 16, 16)
    exact = la.latent(x[:2], diagonal=True)
    joint: Any = la.predict(x[:2], method="pushed", samples=200, joint=True, generator=torch.Generator().manual_seed(0))
    ratio = joint.outputs.var(0) / exact.covariance
    assert float(ratio.mean()) == pytest.approx(1, abs=0.1)  # correlated outputs: √(2/200) at the worst


def test_differentiable_in_x() -> None:
    la = fitted()
    x = X.clone().requires_grad_()
    y = torch.zeros(5, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(la.predict(x, joint=True).log_prob(y), x)
    direction = torch.randn(X.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ahead, behind = (la.predict(X + step * direction, joint=True).log_prob(y) for step in (1e-5, -1e-5))
    assert float((gradient * direction).sum()) == pytest.approx(float((ahead - behind) / 2e-5), rel=1e-5)
