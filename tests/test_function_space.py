"""The posterior in function space: all points are the full posterior in weight space; subsets lie above it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Categorical, FunctionSpace, Gaussian, GaussianPrior, InputError, Laplace, NotFittedError
from tests import networks, oracles

PRIOR = {"*bias": 0.6, "*": 1.7}


def pair(
    network: str, likelihood: Any, prior: Any = PRIOR, temperature: float = 1.3, **options: Any
) -> tuple[FunctionSpace, Laplace]:
    """All points, and the same in weight space."""
    kind = likelihood if isinstance(likelihood, str) else "regression"
    model, x, y = networks.make(network), networks.inputs(network, 7), networks.targets(kind, 7)
    data = list(zip(x.split(3), y.split(3), strict=True))
    process = FunctionSpace(model, likelihood, prior=prior, temperature=temperature, **options).fit(data)
    return process, Laplace(model, likelihood, "full", prior=prior, temperature=temperature).fit(data)


LIKELIHOODS = ["classification", "binary", Gaussian(0.3), Gaussian([0.5, 1.0, 2.0])]


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=["classification", "binary", "gaussian", "ratios"])
@pytest.mark.parametrize("network", ["mlp", "cnn", "grouped-cnn", "tied", "tied-embedding", "batchnorm", "attention", "gru"])
def test_all_points_are_the_full_posterior(network: str, likelihood: Any) -> None:
    process, la = pair(network, likelihood)
    x = networks.inputs(network, 4, seed=9)
    for options in ({}, {"joint": True}, {"diagonal": True}):
        found, expected = process.latent(x, **options), la.latent(x, **options)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-8, atol=1e-8)
    assert float(process.log_evidence()) == pytest.approx(float(la.log_evidence()), rel=1e-9)
    assert process.effective_dimension() == pytest.approx(la.effective_dimension(), rel=1e-8)
    ours, theirs = process.predict(x), la.predict(x)
    name = "mean" if isinstance(likelihood, Gaussian) else "probs"
    torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-8, atol=1e-8)
