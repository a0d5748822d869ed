"""Draws from the full GGN of ResNet-20, all 270,000 weights, against the same posterior in function space.

Data and weights as in `test_real.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapwing import FunctionSpace, sample_by_optimization
from tests.test_real import images, network, pytestmark

__all__ = ["images", "network", "pytestmark"]  # fixtures, and the reason to skip


@pytest.mark.slow
def test_draws_have_the_covariance_of_function_space(network: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    """Outputs at held-out images, whitened by their exact covariance, are standard normal, and solves agree with it."""
    x, y = images
    batches, test = [(x[:8], y[:8])], x[8:10]
    drawn = sample_by_optimization(
        network, "classification", batches, 2, 100.0, tolerance=0.02, generator=torch.Generator().manual_seed(0)
    )
    assert drawn.solution is not None
    assert drawn.solution.converged
    process = FunctionSpace(network, "classification", prior=100.0, progress=False).fit(batches)
    mean, covariance = process.latent(test, joint=True)
    moved = (drawn.outputs(test) - mean).double().flatten(1)  # [2, 20]
    root = torch.linalg.cholesky(covariance.double())
    white = torch.linalg.solve_triangular(root, moved.T, upper=False)
    degrees = white.numel()
    assert float(white.square().sum()) == pytest.approx(degrees, abs=4.5 * (2 * degrees) ** 0.5)
    network.eval()
    slope = torch.autograd.grad(network(test)[0, 0], list(drawn.ggn.parameters.values()))
    direction = drawn.ggn.pack(dict(zip(drawn.ggn.parameters, slope, strict=True))).double().unsqueeze(1)
    variance = float((direction * drawn.solve(direction).vectors).sum())
    assert variance == pytest.approx(float(covariance[0, 0]), rel=1e-3)  # an error of 2 % in the norm enters squared
