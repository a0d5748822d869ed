"""Gradients of the log-evidence in the data, against differences of evidences that are fitted anew."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import FactoredDamping, Gaussian, InputError, Laplace
from tests import networks

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
    return fitted(model, warped(eta, x), y, likelihood, structure, **options).log_evidence(center=center)


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
    la = fitted(model, warped(POINT, x), y, likelihood, structure, **options).at(center=center)
    eta = POINT.clone().requires_grad_()
    (found,) = torch.autograd.grad(la.data_evidence(warped(eta, x), y), eta)
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["diag", "block", "full"])
def test_the_gradient_is_that_of_evidences_fitted_anew(likelihood: str, structure: str) -> None:
    torch.testing.assert_close(
        gradient(likelihood, structure), differences(likelihood, structure), rtol=1e-7, atol=1e-8
    )


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_newton_center_of_the_full_structure(likelihood: str) -> None:
    found, expected = gradient(likelihood, "full", "newton"), differences(likelihood, "full", "newton")
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
    assert not torch.allclose(found, gradient(likelihood, "full"), rtol=1e-2)  # it is another gradient
