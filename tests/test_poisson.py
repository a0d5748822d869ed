"""Counts against autograd, torch's Poisson distribution, fine grids and Monte Carlo."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import InputError, Laplace, Poisson
from lapwing.likelihoods.base import GaussianOutputs
from lapwing.predictive.counts import CountPrediction, log_poisson_integral
from tests import oracles

NOISE = torch.ones((), dtype=torch.float64)
SHAPES = ((6,), (5, 3), (3, 2, 2))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counts(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(6, shape, generator=torch.Generator().manual_seed(seed))


def outer(columns: Tensor) -> Tensor:
    flat = columns.reshape(len(columns), columns.shape[1], -1)
    return torch.einsum("knc,knd->ncd", flat, flat)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_prob_and_hessian(shape: tuple[int, ...]) -> None:
    likelihood, f, y = Poisson(), drawn(*shape), counts(*shape)
    expected = torch.distributions.Poisson(f.exp()).log_prob(y.double())
    expected = expected.flatten(1).sum(1) if f.dim() > 1 else expected
    torch.testing.assert_close(likelihood.log_prob(f, y), expected, rtol=1e-12, atol=1e-12)
    assert likelihood.statistics(f, y).log_likelihood == pytest.approx(float(expected.sum()))
    hessians = oracles.output_hessians(likelihood, f, y)
    columns = likelihood.hessian_columns(f, y)
    torch.testing.assert_close(outer(columns.part(0, columns.count)), hessians, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(likelihood.hessian_sum(f, y), hessians.sum(0))
    torch.testing.assert_close(likelihood.hessian_diagonal(f, y), hessians.diagonal(dim1=1, dim2=2).reshape(shape))


def test_random_columns_have_the_hessian_as_mean() -> None:
    likelihood, f, generator, count = Poisson(), drawn(2, 3), torch.Generator().manual_seed(0), 40_000
    expected = oracles.output_hessians(likelihood, f, counts(2, 3))
    many = f.repeat(count, 1)
    for vectors in (
        likelihood.signed_columns(many, many, generator).part(0, 1)[0],
        likelihood.sampled_gradients(f, counts(2, 3), count, generator),
    ):
        products = torch.einsum("snc,snd->sncd", *[vectors.reshape(count, 2, 3)] * 2)
        error = products.std(0) / math.sqrt(count)
        assert bool(((products.mean(0) - expected).abs() <= 5 * error + 1e-12).all())


@pytest.mark.parametrize("mean", [-3.0, 0.0, 2.0, 7.0])
@pytest.mark.parametrize("variance", [0.0, 1e-6, 0.1, 1.0, 4.0])
def test_the_integral_against_a_fine_grid(mean: float, variance: float) -> None:
    """Also for counts that the prediction finds absurd, and where the integrand is far narrower than the Gaussian."""
    y = torch.tensor([0.0, 1.0, 3.0, 40.0, 1000.0], dtype=torch.float64)
    m, s = torch.full_like(y, mean), torch.full_like(y, variance)
    z = torch.linspace(-40, 40, 400_001, dtype=torch.float64).unsqueeze(1)
    f = m + s.sqrt() * z
    terms = y * f - f.exp() - torch.lgamma(y + 1) - 0.5 * z.square() - 0.5 * math.log(2 * math.pi)
    expected = terms.logsumexp(0) + math.log(80 / 400_000)
    # With s = 4 and a rate near 0 the integrand is far from a Gaussian; 48 nodes then leave a few parts in a million.
    torch.testing.assert_close(log_poisson_integral(m, s, y), expected, rtol=1e-5 if variance > 1 else 1e-8, atol=1e-8)


def test_the_probabilities_sum_to_one_and_differentiate() -> None:
    y = torch.arange(400, dtype=torch.float64)
    m = torch.full_like(y, 0.7).requires_grad_()
    s = torch.full_like(y, 0.5).requires_grad_()
    found = log_poisson_integral(m, s, y)
    assert found.exp().sum().item() == pytest.approx(1, abs=1e-6)
    gradients = torch.autograd.grad(found[3], (m, s))
    step = 1e-5
    for which, gradient in enumerate(gradients):
        moved = []
        for sign in (-1, 1):
            at = [torch.tensor(0.7), torch.tensor(0.5)]
            at[which] = at[which].double() + sign * step
            moved.append(float(log_poisson_integral(at[0].double(), at[1].double(), torch.tensor(3.0).double())))
        assert float(gradient[3]) == pytest.approx((moved[1] - moved[0]) / (2 * step), rel=1e-5)


def test_moments_against_a_million_draws() -> None:
    m, s = torch.tensor([[0.3, 1.5]], dtype=torch.float64), torch.tensor([[0.4, 0.05]], dtype=torch.float64)
    f = GaussianOutputs(m, s, torch.diag_embed(s))
    exact: Any = Poisson().predict_gaussian(f, NOISE, None, 0, None)
    generator, count = torch.Generator().manual_seed(0), 1_000_000
    rates = (m + s.sqrt() * torch.randn(count, 2, generator=generator, dtype=torch.float64)).exp()
    y = torch.poisson(rates, generator=generator)
    assert bool(((exact.mean[0] - y.mean(0)).abs() <= 5 * y.std(0) / math.sqrt(count)).all())
    torch.testing.assert_close(exact.variance[0], y.var(0), rtol=0.02, atol=0)
    torch.testing.assert_close(exact.epistemic[0], rates.var(0), rtol=0.02, atol=0)
    torch.testing.assert_close(exact.aleatoric[0], rates.mean(0), rtol=0.01, atol=0)
    torch.testing.assert_close(exact.std.square(), exact.aleatoric + exact.epistemic)
    split = exact.uncertainty()
    assert torch.equal(split.total, split.aleatoric + split.epistemic)
    with pytest.raises(InputError, match="measure of uncertainty"):
        exact.uncertainty("spread")
    seen = torch.tensor([[2.0, 5.0]], dtype=torch.float64)
    share = (y == seen).double().mean(0).log().sum()
    assert float(exact.log_prob(seen)) == pytest.approx(float(share), abs=0.02)
    low, high = exact.interval(0.9)
    for quantile, probability in ((low, 0.05), (high, 0.95)):
        at, below = ((y <= quantile - k).double().mean(0) for k in (0, 1))
        assert bool((at >= probability - 0.003).all())
        assert bool((below < probability + 0.003).all())
    mixed: Any = Poisson().predict_gaussian(f, NOISE, "mc", 40_000, generator)
    torch.testing.assert_close(mixed.mean, exact.mean, rtol=0.02, atol=0)
    torch.testing.assert_close(mixed.variance, exact.variance, rtol=0.05, atol=0)
    torch.testing.assert_close(mixed.log_prob(seen), exact.log_prob(seen), rtol=0.02, atol=0)
    torch.testing.assert_close(mixed.log_prob(seen), mixed.distribution().log_prob(seen))
    torch.testing.assert_close(exact.distribution().mean, exact.mean, rtol=0.01, atol=0)


def test_large_and_small_quantiles() -> None:
    rates = torch.tensor([[1e-4, 1.0, 1e4]], dtype=torch.float64)
    low, high = CountPrediction.mixture(rates.log().unsqueeze(0)).interval(0.5)
    for rate, a, b in zip(rates[0], low[0], high[0], strict=True):
        pmf = torch.distributions.Poisson(rate).log_prob(torch.arange(12_000, dtype=torch.float64)).exp().cumsum(0)
        assert (float(a), float(b)) == (int((pmf < 0.25).sum()), int((pmf < 0.75).sum()))


def test_counts_through_laplace(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = drawn(20, 2), counts(20, 1)
    la = Laplace(model, "count", "full").fit([(x, y)])
    j, f = oracles.packed_jacobian(la, x)[:, 0], oracles.evaluate(model, x)
    precision = torch.einsum("np,n,nq->pq", j, f[:, 0].exp(), j) + torch.eye(j.shape[1], dtype=torch.float64)
    s = torch.einsum("np,pq,nq->n", j, torch.linalg.inv(precision), j)
    torch.testing.assert_close(la.predict(x).mean[:, 0], (f[:, 0] + s / 2).exp(), rtol=1e-9, atol=0)
    la.tune_prior()
    la.save(tmp_path / "counts.safetensors")
    loaded = Laplace.load(tmp_path / "counts.safetensors", model)
    assert loaded.likelihood == Poisson()
    torch.testing.assert_close(loaded.predict(x).log_prob(y), la.predict(x).log_prob(y))
    assert la.predict(x, method="sampled", samples=10).log_prob(y).shape == (20,)
    flat = Laplace(nn.Sequential(model, nn.Flatten(0)), "poisson").fit([(x, y[:, 0])])
    assert flat.predict(x, link="mc", samples=7).log_prob(y[:, 0]).shape == (20,)


def test_bad_input_says_what_and_how() -> None:
    f = torch.zeros(2, 1, dtype=torch.float64)
    for wrong in (torch.tensor([[-1.0], [0.0]]), torch.tensor([[0.5], [0.0]])):
        with pytest.raises(InputError, match="whole numbers"):
            Poisson().check(f, wrong, "here")
    with pytest.raises(InputError, match="log-rates, not rates"):
        Poisson().check(f + 1000, torch.zeros(2, 1), "here")
    with pytest.raises(InputError, match="Supported: exact, mc"):
        Poisson().predict_gaussian(GaussianOutputs(f, f, None), NOISE, "probit", 1, None)
    with pytest.raises(InputError, match="no noise"):
        Poisson().noise_scale(1.0)
    with pytest.raises(InputError, match="between 0 and 1"):
        Poisson().predict_samples(f[None], NOISE).interval(1.0)
    with pytest.raises(InputError, match="counts of shape"):
        Poisson().predict_samples(f[None], NOISE).log_prob(torch.zeros(2))


def entropies(rates: Tensor, weights: Tensor) -> tuple[float, float]:
    """Entropy of a mixture of Poisson distributions and the mean of theirs, by direct summation: `[S]` each."""
    y = torch.arange(400, dtype=torch.float64)
    logs = y[:, None] * rates.log() - rates - torch.lgamma(y + 1)[:, None]  # [counts, S]
    mixed = (logs.exp() * weights).sum(1)
    within = -(torch.xlogy(logs.exp(), logs.exp()).sum(0) * weights).sum()
    return float(-torch.xlogy(mixed, mixed).sum()), float(within)


def test_entropy_of_counts() -> None:
    """Known rates, a mixture, and a log-normal rate against a fine sum over it."""
    rates = torch.tensor([[0.3, 4.0, 80.0], [2.0, 4.0, 50.0]], dtype=torch.float64)
    found = CountPrediction.mixture(rates.log().unsqueeze(1)).uncertainty("entropy")
    for i in range(3):
        total, within = entropies(rates[:, i], torch.full((2,), 0.5, dtype=torch.float64))
        assert float(found.total[0, i]) == pytest.approx(total, rel=1e-6)
        assert float(found.aleatoric[0, i]) == pytest.approx(within, rel=1e-6)
    assert float(found.epistemic[0, 1]) == pytest.approx(0, abs=1e-9)  # both draws have the same rate
    mean, variance = torch.tensor([[-1.0, 1.5, 3.0]]).double(), torch.tensor([[0.5, 0.2, 0.01]]).double()
    prediction = CountPrediction.log_normal(mean, variance)
    found = prediction.uncertainty("entropy")
    grid = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    weights = (-0.5 * grid.square()).exp()
    for i in range(3):
        total, within = entropies((mean[0, i] + variance[0, i].sqrt() * grid).exp(), weights / weights.sum())
        assert float(found.total[0, i]) == pytest.approx(total, rel=1e-5)
        assert float(found.aleatoric[0, i]) == pytest.approx(within, rel=1e-5)
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic)
    torch.testing.assert_close(prediction.entropy, found.total)
    assert found.source == "quadrature"
    with pytest.raises(InputError, match=r"100000 are probable.*uncertainty\('variance'\)"):
        CountPrediction.mixture(torch.full((1, 1), 13.0).double()).uncertainty("entropy")
