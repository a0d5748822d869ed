"""A linear model with Gaussian noise is an oracle for the whole pipeline: Bayesian linear regression."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn

from lapwing import Gaussian, Laplace

STRUCTURES = ["kron", "ekfac", "block", "full", "lowrank"]  # diag is not exact for correlated inputs


def data(outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    x[:, 1] += 0.8 * x[:, 0]
    y = x @ torch.randn(4, outputs, generator=generator, dtype=torch.float64)
    return x, y + 0.3 * torch.randn(30, outputs, generator=generator, dtype=torch.float64) + 0.5


def closed_form(
    x: Tensor, y: Tensor, precision: float, noise: float, temperature: float, bias: bool
) -> tuple[Tensor, Tensor, float]:
    """Posterior mean `[I, O]`, covariance `[I, I]` (per output) and tempered log evidence."""
    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1) if bias else x
    width = design.shape[1]
    scale = temperature / noise
    p = scale * design.T @ design + precision * torch.eye(width, dtype=x.dtype)
    mean = torch.linalg.solve(p, scale * design.T @ y)
    log_likelihood = -0.5 * y.numel() * math.log(2 * math.pi * noise) - 0.5 * (y - design @ mean).square().sum() / noise
    log_prior = 0.5 * mean.numel() * math.log(precision / (2 * math.pi)) - 0.5 * precision * mean.square().sum()
    log_det = y.shape[1] * torch.linalg.slogdet(p)[1]
    evidence = temperature * log_likelihood + log_prior + 0.5 * mean.numel() * math.log(2 * math.pi) - 0.5 * log_det
    return mean, torch.linalg.inv(p), float(evidence)


def marginal(x: Tensor, y: Tensor, precision: float, noise: float, bias: bool) -> float:
    """`log N(y; 0, XXᵀ/λ + σ²)`, another way to the evidence at T = 1."""
    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1) if bias else x
    covariance = design @ design.T / precision + noise * torch.eye(len(x), dtype=x.dtype)
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=x.dtype), covariance)
    return float(sum(normal.log_prob(y[:, i]) for i in range(y.shape[1])))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("center", ["network", "newton"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_bayesian_linear_regression(structure: str, outputs: int, bias: bool, center: str, temperature: float) -> None:
    x, y = data(outputs)
    mean, covariance, evidence = closed_form(x, y, 1.7, 0.4, temperature, bias)
    if temperature == 1.0:
        assert evidence == pytest.approx(marginal(x, y, 1.7, 0.4, bias), abs=1e-9)
    model = nn.Linear(4, outputs, bias=bias).double()
    if center == "network":  # the weights are the mode; for the Newton center any weights will do
        with torch.no_grad():
            model.weight.copy_(mean[:4].T)
            if bias:
                model.bias.copy_(mean[4])
    la = Laplace(model, Gaussian(noise=0.4), structure, prior=1.7, temperature=temperature)
    la = la.fit(list(zip(x.split(11), y.split(11), strict=True))).at(center=center)
    assert float(la.log_evidence()) == pytest.approx(evidence, rel=1e-10)
    found = la.posterior.mean
    torch.testing.assert_close(found["weight"], mean[:4].T, rtol=1e-10, atol=1e-10)
    test = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    design = torch.cat([test, torch.ones_like(test[:, :1])], dim=1) if bias else test
    prediction = la.predict(test)
    torch.testing.assert_close(prediction.mean, design @ mean, rtol=1e-10, atol=1e-10)
    spread = torch.einsum("ni,ij,nj->n", design, covariance, design)
    torch.testing.assert_close(prediction.epistemic, spread[:, None].expand(-1, outputs), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(prediction.variance, prediction.epistemic + 0.4, rtol=1e-10, atol=1e-12)
    block = la.posterior.blocks[0]
    root = block.basis.expand(torch.diag(block.scale.sqrt().flatten()).unflatten(1, block.basis.shape))
    expected = torch.kron(torch.eye(outputs, dtype=x.dtype), covariance.contiguous())
    torch.testing.assert_close(root.T @ root, expected, rtol=1e-10, atol=1e-12)
    normal = torch.distributions.Normal(prediction.mean, prediction.std)
    target = torch.randn(6, outputs, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    torch.testing.assert_close(prediction.log_prob(target), normal.log_prob(target).sum(1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_newton_center_finds_bayesian_ridge(structure: str) -> None:
    """Precision and noise tuned from arbitrary weights are scikit-learn's."""
    inputs, target = load_diabetes(return_X_y=True)
    inputs, target = inputs - inputs.mean(0), target - target.mean()
    ridge = BayesianRidge(
        alpha_1=0, alpha_2=0, lambda_1=0, lambda_2=0, fit_intercept=False, tol=1e-12, max_iter=10_000
    ).fit(inputs, target)
    x, y = torch.tensor(inputs), torch.tensor(target).unsqueeze(1)
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(10, 1, bias=False).double()
        la = Laplace(model, Gaussian(noise=[1.0, 1e3][seed]), structure, prior=[1.0, 1e-3][seed])
        la = la.fit([(x, y)]).at(center="newton").tune_prior()
        assert la.tuning_ is not None
        assert la.tuning_.converged
        assert next(iter(la.tuning_.precisions.values())) == pytest.approx(ridge.lambda_, rel=1e-4)
        assert la.noise == pytest.approx(1 / ridge.alpha_, rel=1e-4)
        torch.testing.assert_close(la.posterior.mean["weight"][0], torch.tensor(ridge.coef_), rtol=1e-4, atol=1e-3)


def test_tuning_at_the_network_center_is_not_the_empirical_bayes_optimum() -> None:
    """At weights trained under another precision (λ = 1), the evidence there has another optimum."""
    inputs, target = load_diabetes(return_X_y=True)
    x, y = torch.tensor(inputs - inputs.mean(0)), torch.tensor((target - target.mean()) / target.std()).unsqueeze(1)
    ridge = BayesianRidge(alpha_1=0, alpha_2=0, lambda_1=0, lambda_2=0, fit_intercept=False, tol=1e-12, max_iter=9999)
    ridge.fit(x.numpy(), y[:, 0].numpy())
    noise = 1 / ridge.alpha_
    model = nn.Linear(10, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(closed_form(x, y, 1.0, noise, 1.0, False)[0].T)
    la = Laplace(model, Gaussian(noise=noise), "full").fit([(x, y)])
    newton, network = la.at(center="newton").tune_prior().tuning_, la.at().tune_prior().tuning_
    assert newton is not None
    assert network is not None
    assert newton.precisions["all"] == pytest.approx(ridge.lambda_, rel=1e-4)
    assert network.precisions["all"] > 1.5 * ridge.lambda_


def test_noise_ratios() -> None:
    """Outputs with noise variances 1 : 4 are two regressions with their own noise."""
    x, y = data(2)
    ratios = torch.tensor([1.0, 4.0], dtype=torch.float64)
    model = nn.Linear(4, 2, bias=False).double()
    la = Laplace(model, Gaussian(noise=ratios), "block", prior=1.7).fit([(x, y)]).at(center="newton", noise=0.4)
    torch.testing.assert_close(la.noise, 0.4 * ratios)
    parts = [closed_form(x, y[:, i : i + 1], 1.7, 0.4 * float(ratios[i]), 1.0, False) for i in range(2)]
    assert float(la.log_evidence()) == pytest.approx(sum(part[2] for part in parts), rel=1e-10)
    for i, part in enumerate(parts):
        torch.testing.assert_close(la.posterior.mean["weight"][i], part[0][:, 0], rtol=1e-10, atol=1e-10)
        spread = torch.einsum("ni,ij,nj->n", x, part[1], x)
        torch.testing.assert_close(la.predict(x).epistemic[:, i], spread, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(la.predict(x).aleatoric[:, i], torch.full_like(x[:, 0], 0.4 * float(ratios[i])))
