"""Links: every closed form against 10⁶ draws inside the range it states, and what it must not depend on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lapwing import Bernoulli, Categorical, Gaussian, InputError, Laplace
from lapwing.likelihoods.base import GaussianOutputs
from lapwing.predictive.links import CATEGORICAL, bernoulli_link, bridge, categorical_link, delta, mf1, mf2, probit
from tests import networks

DRAWS = 1_000_000  # standard errors below 0.0005
X = networks.inputs("mlp", 6, seed=9)


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def integral(mean: Tensor, covariance: Tensor, draws: int = DRAWS) -> Tensor:
    """`E[softmax(f)]` by brute force: `[K]`."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt()
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros_like(mean)
    for _ in range(10):
        total += (mean + gaussian(generator, draws // 10, len(mean)) @ root.T).softmax(1).sum(0)
    return total / draws


def differences(covariance: Tensor) -> Tensor:
    """The largest `Var(f_i − f_j)`."""
    variance = covariance.diagonal()
    return (variance[:, None] + variance - 2 * covariance).max()


def error(name: str, mean: Tensor, covariance: Tensor) -> float:
    link = CATEGORICAL[name]
    found = link.log_probs(mean, covariance if link.covariances else covariance.diagonal()).exp()
    return float((found - integral(mean, covariance)).abs().max())


def any_covariance(generator: torch.Generator, classes: int, largest: float) -> Tensor:
    """A random one, scaled so that the largest variance of a difference is `largest`, plus variance that all share."""
    root = gaussian(generator, classes, classes)
    covariance = root @ root.T
    return covariance * largest / differences(covariance) + 3.0


@pytest.mark.parametrize(("classes", "seed"), [(2, 0), (3, 0), (3, 1), (5, 2), (10, 3)])
def test_against_a_million_draws(classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    eye = torch.eye(classes, dtype=torch.float64)
    mean = 2 * gaussian(generator, classes)
    centered = mean - mean.mean()
    for variance in (0.5, 9.0):
        assert error("probit", centered, variance * eye) < 0.08
    assert error("mf1", mean + 5, torch.diag(uniform(generator, classes))) < 0.08
    assert error("mf1", mean + 5, torch.diag(4 + 4 * uniform(generator, classes))) < 0.12
    for largest, bound in ((1.0, 0.05), (4.0, 0.1)):
        assert error("mf2", mean + 5, any_covariance(generator, classes, largest)) < bound
    for largest in (0.1, 0.5):
        assert error("delta", mean + 5, any_covariance(generator, classes, largest)) < 0.05 * largest**2 + 1e-3
    # Dirichlets: the logits' mode and inverse Hessian in the softmax basis, of which the bridge is the inverse.
    concentration = 20 + 30 * uniform(generator, classes)
    inverse = 1 / concentration
    shape = torch.diag(inverse) - (inverse[:, None] + inverse) / classes + inverse.sum() / classes**2
    logits = concentration.log() - concentration.log().mean()
    for name in ("bridge", "bridge-norm"):
        assert error(name, logits, shape) < 0.5 / float(concentration.min())
    # The correction for large variances goes to uniform, as the integral does; half of it is not too much to ask.
    large = 400 * eye
    uniformly = torch.full_like(mean, 1 / classes)
    gap = float((CATEGORICAL["bridge-norm"].log_probs(centered / 8, large).exp() - uniformly).abs().max())
    assert gap < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_the_bridge_is_exact_for_dirichlets(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    concentration = 0.2 + 5 * uniform(generator, 4, 6)
    inverse = 1 / concentration
    variance = inverse * (1 - 2 / 6) + inverse.sum(1, keepdim=True) / 36
    expected = concentration / concentration.sum(1, keepdim=True)
    torch.testing.assert_close(bridge(concentration.log() + 3.0, variance).exp(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(bridge(concentration.log(), 50 * variance).exp(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["probit", "mf1", "mf2", "delta"])
def test_softmax_where_nothing_varies(name: str) -> None:
    """The bridges are no functions of variance 0; see their own test."""
    mean = gaussian(torch.Generator().manual_seed(0), 3, 5)
    link = CATEGORICAL[name]
    zero = mean.new_zeros(3, 5, 5) if link.covariances else torch.zeros_like(mean)
    torch.testing.assert_close(link.log_probs(mean, zero), mean.log_softmax(1), rtol=1e-12, atol=1e-14)


def test_bridges_without_variance() -> None:
    """Refused at 0; the limit of equal variances is softmax for two classes, and flatter than it for more."""
    mean = torch.tensor([[2.0, -1.0, -1.0]], dtype=torch.float64)
    with pytest.raises(InputError, match="link='mf2'"):
        bridge(mean, torch.zeros_like(mean))
    tiny = torch.full_like(mean, 1e-12)
    raw = 1 / 3 + mean.exp() * (-mean).exp().sum() / 9
    torch.testing.assert_close(bridge(mean, tiny).exp(), raw / raw.sum(), rtol=1e-10, atol=0)
    assert float(bridge(mean, tiny).exp().max()) < float(mean.softmax(1).max()) - 0.05
    torch.testing.assert_close(bridge(mean[:, :2], tiny[:, :2]).exp(), mean[:, :2].softmax(1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["mf2", "bridge-norm", "delta"])
def test_only_differences_of_logits_count(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mean, covariance = gaussian(generator, 5), any_covariance(generator, 5, 0.5)
    link = CATEGORICAL[name].log_probs
    expected = link(mean, covariance)
    torch.testing.assert_close(link(mean + 7, covariance), expected, rtol=1e-10, atol=1e-12)
    with_shared = covariance + 11.0
    torch.testing.assert_close(link(mean, with_shared), expected, rtol=1e-10, atol=1e-12)
    sideways = gaussian(generator, 5)  # f + 1·z with z correlated with f: cov + 1bᵀ + b1ᵀ + c11ᵀ
    correlated = covariance + sideways + sideways[:, None] + 20.0
    torch.testing.assert_close(link(mean, correlated), expected, rtol=1e-9, atol=1e-11)


def test_probit_and_mf1_are_not_functions_of_differences() -> None:
    """What the guide warns of, so that it stays true."""
    mean, variance = torch.tensor([2.0, 0.0, 0.0]), torch.tensor([4.0, 4.0, 4.0])
    assert float((probit(mean, variance).exp() - probit(mean + 5, variance).exp()).abs().max()) < 1e-6
    uneven = torch.tensor([9.0, 1.0, 1.0])
    assert float((probit(mean, uneven).exp() - probit(mean + 5, uneven).exp()).abs().max()) > 0.2
    assert int(probit(mean + 5, uneven).argmax()) != 0
    torch.testing.assert_close(mf1(mean, uneven), mf1(mean + 5, uneven), rtol=1e-4, atol=1e-6)
    assert float((mf1(mean, variance).exp() - mf1(mean, variance + 50).exp()).abs().max()) > 0.15


def test_two_classes_are_one_binary_logit() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, covariance = gaussian(generator, 4, 2), torch.stack([any_covariance(generator, 2, 3.0) for _ in range(4)])
    gap = mean[:, 0] - mean[:, 1]
    spread = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    binary: Any = bernoulli_link(gap, spread, "probit", 1, None)
    torch.testing.assert_close(mf2(mean, covariance).exp()[:, 0], binary.probs, rtol=1e-12, atol=0)
    small: Any = bernoulli_link(gap, spread / 10, "delta", 1, None)
    torch.testing.assert_close(delta(mean, covariance / 10).exp()[:, 0], small.probs, rtol=1e-12, atol=0)


def test_binary_links_against_a_million_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = 3 * gaussian(generator, 20)
    noise = gaussian(generator, DRAWS // 2)
    noise = torch.cat([noise, -noise])  # a million for each mean, in pairs
    for variance, link, bound in ((0.25, "delta", 1e-3), (0.25, "probit", 0.01), (4.0, "probit", 0.02), (50.0, "probit", 0.02)):  # fmt: skip
        exact = torch.stack([torch.sigmoid(one + math.sqrt(variance) * noise).mean() for one in mean])
        found: Any = bernoulli_link(mean, torch.full_like(mean, variance), link, 1, None)
        torch.testing.assert_close(found.probs, exact, rtol=0, atol=bound + 5e-4)  # the draws' own standard error
        torch.testing.assert_close(found.log_yes.exp() + found.log_no.exp(), torch.ones_like(mean))


@pytest.mark.parametrize("mean", [-2.0, 0.3, 1.0])
def test_the_error_of_delta_is_of_second_order_in_the_variance(mean: float) -> None:
    """Half the variance, a quarter of the error, by quadrature without noise."""
    nodes, weights = (torch.tensor(part) for part in np.polynomial.hermite_e.hermegauss(60))

    def gap(variance: float) -> float:
        exact = (torch.sigmoid(mean + math.sqrt(variance) * nodes) * weights).sum() / weights.sum()
        at = torch.tensor([mean], dtype=torch.float64)
        return float(bernoulli_link(at, torch.full_like(at, variance), "delta", 1, None).probs - exact)

    assert gap(0.01) / gap(0.005) == pytest.approx(4, rel=0.02)
    assert abs(gap(0.25)) < 0.05 * 0.25**2 + 1e-4


def test_delta_is_refused_where_it_is_no_probability() -> None:
    mean = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    covariance = torch.diag_embed(torch.tensor([[30.0, 0.1, 0.1], [0.1, 0.1, 0.1]]))
    with pytest.raises(InputError, match=r"at 1 of 2 inputs.*link='mc'"):
        delta(mean, covariance)
    with pytest.raises(InputError, match="at 1 of 2 inputs"):
        bernoulli_link(torch.tensor([1.0, 0.0]), torch.tensor([60.0, 1.0]), "delta", 1, None)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian()])
def test_a_link_that_does_not_fit_names_those_that_do(likelihood: Any) -> None:
    names = {"categorical": "bridge, bridge-norm, delta, mc, mf1, mf2, probit", "bernoulli": "delta, mc, probit"}
    wrong = {"categorical": "logit", "bernoulli": "mf2", "gaussian": "probit"}[likelihood.name]
    f = GaussianOutputs(torch.zeros(2, 3), torch.ones(2, 3), None)
    with pytest.raises(InputError, match=f"Supported: {names.get(likelihood.name, 'exact')}"):
        likelihood.predict_gaussian(f, torch.ones(()), wrong, 10, None)


@pytest.mark.parametrize("name", [*CATEGORICAL, "mc"])
def test_every_link_predicts_and_is_differentiable_in_x(name: str) -> None:
    x, y = networks.inputs("mlp", 8), networks.targets("classification", 8)
    la = Laplace(networks.make("mlp"), "classification", "full", prior=20.0).fit([(x, y)])
    mean, covariance = la.latent(X)
    prediction = la.predict(X, link=name, samples=50)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(6, dtype=torch.float64))
    if name != "mc":
        link = CATEGORICAL[name]
        spread = covariance if link.covariances else covariance.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(prediction.probs, link.log_probs(mean, spread).exp())

    def score(x: Tensor) -> Tensor:
        found = la.predict(x, link=name, samples=50, generator=torch.Generator().manual_seed(0))
        return found.entropy.sum() + found.log_prob(y[:6]).sum()

    leaf = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(leaf), leaf)
    direction = gaussian(torch.Generator().manual_seed(0), *X.shape)
    with torch.no_grad():
        numeric = (score(X + 1e-5 * direction) - score(X - 1e-5 * direction)) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(float(numeric), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", CATEGORICAL)
def test_every_position_has_its_own_logits(name: str) -> None:
    """Classes along any dimension, against a loop over positions."""
    generator = torch.Generator().manual_seed(0)
    root = 0.3 * gaussian(generator, 2, 24, 24) / math.sqrt(24)
    covariance, mean = root @ root.mT, gaussian(generator, 2, 2, 4, 3)  # classes along dim 2
    f = GaussianOutputs(mean, covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape), covariance)
    found = categorical_link(f, 2, name, 10, None).probs
    place = torch.arange(24).reshape(2, 4, 3)
    for n in range(2):
        for i in range(2):
            for j in range(3):
                own = covariance[n][place[i, :, j]][:, place[i, :, j]]
                link = CATEGORICAL[name]
                expected = link.log_probs(mean[n, i, :, j], own if link.covariances else own.diagonal()).exp()
                torch.testing.assert_close(found[n, i, :, j], expected, rtol=1e-12, atol=1e-14)


def test_many_classes() -> None:
    """Above 64 outputs a link keeps the covariance only if it needs it; pairs of classes go in parts."""
    torch.manual_seed(0)
    model = nn.Linear(3, 80).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    la = Laplace(model, "classification", prior=30.0).fit([(x, torch.randint(80, (4,)))])
    mean, covariance = la.latent(x)
    torch.testing.assert_close(la.predict(x, link="mf2").probs, mf2(mean, covariance).exp())
    torch.testing.assert_close(la.predict(x, link="delta").probs, delta(mean, covariance).exp())
    torch.testing.assert_close(la.predict(x, link="mf1").probs, mf1(mean, covariance.diagonal(dim1=1, dim2=2)).exp())
    wide, spread = torch.randn(2, 3000), torch.rand(2, 3000)  # three parts of rows
    gaps = (wide[:, :, None] - wide[:, None]) / (1 + math.pi / 8 * (spread[:, :, None] + spread[:, None])).sqrt()
    torch.testing.assert_close(mf1(wide, spread), (-(-gaps).logsumexp(2)).log_softmax(1))
