"""What setting weights to 0 costs: by the posterior, and in fact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lapwing.batches import check_targets, read
from lapwing.errors import InputError
from lapwing.guard import borrowed, random_state_kept
from lapwing.laplace import Laplace
from lapwing.likelihoods import Statistics
from lapwing.posterior import Posterior


def joint_loss(la: Laplace, masks: dict[str, Tensor]) -> float:
    """`gᵀδ + ½ δᵀ P δ` of the step δ that sets what goes to 0, with g the slope at the center."""
    posterior = la.posterior
    step = {
        name: torch.zeros_like(value, dtype=torch.float64)
        if name not in masks
        else value.double().masked_fill(masks[name], 0).neg()
        for name, value in posterior.mean.items()
    }
    prior = torch.stack([(posterior.precisions[name] * value.square()).sum() for name, value in step.items()]).sum()
    total = posterior.likelihood_scale * posterior.step_curvature(step) + posterior.prior_scale * prior
    slope = torch.stack([(posterior.slope[name] * value).sum() for name, value in step.items()]).sum()
    return float((slope + 0.5 * total).detach())


def spared(la: Laplace) -> dict[str, Tensor]:
    """What a model without an element need not pay, at least: `½ log(1/Σ_ii)` and the prior's normalizer and mean."""
    posterior, found = la.posterior, {}
    scale = posterior.prior_scale.detach()
    for name, value in marginal_precisions(la).items():
        precision, circle = posterior.precisions[name].detach(), math.log(2 * math.pi)
        normalizer = scale * (precision.log() - circle) + circle
        found[name] = 0.5 * (value.log() - normalizer + scale * precision * posterior.means[name].square())
    return found


def marginal_precisions(la: Laplace) -> dict[str, Tensor]:
    """`1/(P⁻¹)_ii` by parameter name, float64."""
    return {name: value.detach().reciprocal() for name, value in la.posterior.covariance_diagonal().items()}


def measurement(la: Laplace, loader: Iterable[Any]) -> Callable[[dict[str, Tensor]], float]:
    """What `log p(D, θ)` at the center loses by masks: a pass over the data for each."""
    state, mean = la._unchanged(), la.posterior.mean
    fitted = all(torch.equal(value, state.tape.parameters[name]) for name, value in mean.items())
    before = _log_joint(la, mean, la.curvature.statistics if fitted else _statistics(la, mean, loader))

    def loss(masks: dict[str, Tensor]) -> float:
        pruned = {name: value * masks[name] if name in masks else value for name, value in mean.items()}
        return before - _log_joint(la, pruned, _statistics(la, pruned, loader))

    return loss


def _log_joint(la: Laplace, weights: dict[str, Tensor], statistics: Statistics) -> float:
    """`T log p(D|θ) − ½ ‖θ − μ₀‖²_Π`."""
    fit = statistics.log_likelihood_at(la.posterior.noise.detach())
    return la.temperature * float(fit) - float(penalty(la.posterior, weights))


def _statistics(la: Laplace, weights: dict[str, Tensor], loader: Iterable[Any]) -> Statistics:
    """Those of the network with these weights: one pass over the data of the fit."""
    found, tape = Statistics(), la._unchanged().tape
    with random_state_kept(), borrowed(la.model, ()), torch.no_grad():
        for where, inputs, targets in read(loader, la.device, la.unpack, "measure", la.progress):
            outputs = tape.forward(weights, inputs)
            check_targets(where, outputs, targets)
            la.likelihood.check(outputs, targets, where)
            found += la.likelihood.statistics(outputs, targets)
    examples = la.curvature.examples
    if abs(found.examples - examples) > 1e-6 * examples:
        raise InputError(
            f"To measure the loss takes the data of the fit: that saw {examples:g} examples, the loader shows "
            f"{found.examples:g}."
        )
    return found


def penalty(posterior: Posterior, parameters: Mapping[str, Tensor]) -> Tensor:
    """`½ ‖θ − μ₀‖²_Π` of the Bayesian parameters, 0-d; differentiable in them."""
    terms = [
        (precision.detach() * (parameters[name] - posterior.means[name]).square()).sum()
        for name, precision in posterior.precisions.items()
    ]
    return 0.5 * posterior.prior_scale.detach() * torch.stack(terms).sum()
