"""Training with the evidence in the loop: the right loss, the right hyperparameters, the same result after Ctrl-C."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, TensorDataset

from lapwing import (
    Bernoulli,
    Categorical,
    EvidenceInTheLoop,
    FactoredDamping,
    FileError,
    Gaussian,
    GaussianPrior,
    InputError,
    Laplace,
    TuningWarning,
    train_with_evidence,
)
from lapwing.training import Epoch, Training
from tests import networks

# ------------------------------------------------------------------------------------- empirical Bayes


def regression(seed: int, examples: int = 60, features: int = 4) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, features, generator=source, dtype=torch.float64)
    weight = 1.5 * torch.randn(features, 1, generator=source, dtype=torch.float64)
    return x, x @ weight + 0.5 * torch.randn(examples, 1, generator=source, dtype=torch.float64)


def empirical_bayes(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """λ, σ² and the log marginal at the maximum of `N(y; 0, XXᵀ/λ + σ²I)`, from the dense covariance."""
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logs], max_iter=1000, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )
    eye, zero = torch.eye(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)

    def loss() -> Tensor:
        optimizer.zero_grad()
        covariance = x @ x.T / logs[0].exp() + logs[1].exp() * eye
        value = -torch.distributions.MultivariateNormal(zero, covariance).log_prob(y[:, 0])
        value.backward()
        return value

    optimizer.step(loss)
    return float(logs[0].exp()), float(logs[1].exp()), -float(loss())


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("seed", [0, 1])
def test_linear_regression_finds_the_precision_and_noise_of_empirical_bayes(structure: str, seed: int) -> None:
    # 300 steps of gradient descent and 30 alternations contract the error to about 1e-8.
    x, y = regression(seed)
    precision, noise, log_marginal = empirical_bayes(x, y)
    trained = train_with_evidence(
        nn.Linear(4, 1, bias=False).double(),
        [(x, y)],
        "regression",
        epochs=300,
        structure=structure,
        curvature="ggn",
        every=10,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    last = trained.history[-1]
    assert last.precisions is not None
    assert last.noise is not None
    assert last.precisions["all"] == pytest.approx(precision, rel=1e-6)
    assert last.noise == pytest.approx(noise, rel=1e-6)
    assert last.log_evidence == pytest.approx(log_marginal, rel=1e-10)
    assert trained.la is not None
    assert float(trained.la.log_evidence()) == pytest.approx(log_marginal, rel=1e-10)
    ridge = torch.linalg.solve(x.T @ x + noise * precision * torch.eye(4, dtype=torch.float64), x.T @ y)
    torch.testing.assert_close(trained.model.weight.detach().T, ridge, rtol=1e-5, atol=1e-6)
