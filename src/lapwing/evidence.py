"""The evidence (marginal likelihood) of the Laplace approximation, with all normalizers.

`T·log p(D|θ*) + log p(θ*) + (p/2) log 2π − ½ log det P`, differentiable in prior precision, noise and
temperature. At the Newton center the log-likelihood is that of the quadratic model there, at the linear
model's own mode that of the linear model. First derivatives there are exact: θ* maximizes the terms it
enters (envelope theorem), so it is held fixed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.posterior import Posterior


def log_evidence(posterior: Posterior) -> Tensor:
    """0-d, float64. Values of different models on the same data compare."""
    fit = log_likelihood(posterior)
    size = posterior.spectrum.curvature.size
    return (
        posterior.temperature * fit
        + posterior.prior_scale * log_prior(posterior)
        + 0.5 * size * math.log(2 * math.pi)
        - 0.5 * posterior.log_det_precision()
    )


def log_likelihood(posterior: Posterior) -> Tensor:
    """`log p(D|θ*)`, untempered; 0-d."""
    curvature = posterior.spectrum.curvature
    at_network = curvature.statistics.log_likelihood_at(posterior.noise)
    if posterior.center == "network":
        return at_network
    if posterior.center == "linear":
        return posterior.linear_mode.statistics.log_likelihood_at(posterior.noise)
    slope = torch.stack(
        [(curvature.gradient[name].double() * step).sum() for name, step in posterior.step.items()]
    ).sum()
    return at_network + (slope - 0.5 * posterior.step_curvature()) / posterior.noise


def log_prior(posterior: Posterior) -> Tensor:
    """`log N(θ*; μ₀, Π⁻¹)`, untempered; 0-d."""
    terms, together = list[Tensor](), dict[int, list[str]]()
    squares = posterior.squared_distances
    for name, precision in posterior.precisions.items():
        chosen = posterior.chosen.get(name)
        if precision.dim() == 0:
            together.setdefault(id(precision), []).append(name)
        else:
            logs = precision.log() if chosen is None else chosen * precision.log()
            terms.append(0.5 * (logs - precision * squares[name]).sum())
    for names in together.values():  # those that share one precision, at once
        precision = posterior.precisions[names[0]]
        square = torch.stack([squares[name].sum() for name in names]).sum()
        terms.append(0.5 * (sum(_count(posterior, name) for name in names) * precision.log() - precision * square))
    return torch.stack(terms).sum() - 0.5 * posterior.spectrum.curvature.size * math.log(2 * math.pi)


def _count(posterior: Posterior, name: str) -> float | Tensor:
    """How many weights of a parameter are Bayesian."""
    chosen = posterior.chosen.get(name)
    return posterior.sizes[name].numel() if chosen is None else chosen.sum()
