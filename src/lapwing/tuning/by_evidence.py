"""Maximize the evidence over prior precisions and noise, jointly and to convergence; no data needed.

In the logarithms of precisions and noise the evidence at a fixed center is concave. Its stationary
points are MacKay's: `γ_g = λ_g ‖θ*_g − μ₀‖²` for every group g, with γ the effective dimension. Where the
prior is tempered as well, they are `λ_g ‖θ*_g − μ₀‖² = p_g − Σ_i (λ_g/(s_i/σ² + λ_g))/T`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing import lbfgs
from lapwing.errors import InputError, TuningWarning, warn
from lapwing.evidence import log_evidence
from lapwing.priors import GaussianPrior
from lapwing.tuning.groups import Group
from lapwing.tuning.result import Tuning

if TYPE_CHECKING:
    from lapwing.laplace import Laplace
    from lapwing.posterior import Posterior

EDGE = 40.0  # |log λ| beyond which an optimum is said to run off


def tune_by_evidence(
    la: Laplace, groups: tuple[Group, ...], noise: bool = True, tolerance: float = 1e-6, max_steps: int = 500
) -> tuple[Laplace, Tuning]:
    """Choose prior precisions by group, and the noise of a regression where `noise`.

    Converged when `|γ_g − λ_g ‖θ*_g − μ₀‖²|` is at most `tolerance` times `λ_g ‖θ*_g − μ₀‖²` for each
    group, and likewise for the noise; otherwise a `TuningWarning` says so. A group whose optimum runs off
    (its weights are at the prior mean: λ → ∞; it has no curvature: λ → 0; the squared error is 0: σ² → 0)
    is held at its value, with a warning.
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance must be between 0 and 1, got {tolerance}.")
    space = search_space(la, groups, noise)
    if not bool(space.free.any()):
        raise InputError("Nothing to tune. " + " ".join(space.held))
    point, value, residual, steps = maximize(space, tolerance, max_steps)
    converged = residual <= tolerance
    messages = [*space.held, *space.run_off(point)]
    if not converged and len(messages) == len(space.held):
        messages.append(
            f"The evidence did not converge in {steps} steps: the optimality condition is violated by "
            f"{residual:.2g} (tolerance {tolerance:.2g}). Raise max_steps or tolerance."
        )
    for message in messages:
        warn(message, TuningWarning)
    tuned = space.at(point)
    shown = {
        label: float(value) if value.dim() == 0 else value.clone() for label, value in space.precisions(point).items()
    }
    chosen_noise = float(tuned._noise) if space.noise else None
    start = float(la.log_evidence())
    return tuned, Tuning("evidence", start, value, converged, steps, residual, shown, chosen_noise, [], tuple(messages))


def maximize(space: Space, tolerance: float, max_steps: int) -> tuple[Tensor, float, float, int]:
    """L-BFGS ascent; the point, its evidence and relative violation of the optimality conditions, and the steps.

    Along each coordinate the gradient is `½(γ − λ‖θ*‖²)` and the curvature at most `½ max(γ, λ‖θ*‖²)`, which
    gives first steps that neither overshoot nor crawl. It is taken anew at every step, without which one
    precision per parameter does not converge (torch.optim.LBFGS: 500 evaluations and not there, here 12).
    """
    point = space.start
    value, gradient, distances = space.evidence(point)
    pairs: list[tuple[Tensor, Tensor]] = []
    for step in range(max_steps + 1):
        size = space.sizes(distances)
        residual = float((2 * gradient.abs() / size).max())
        if residual <= tolerance or step == max_steps:
            break
        bound = 0.5 * torch.maximum(size, size + 2 * gradient)
        direction = lbfgs.direction(gradient, pairs, bound.reciprocal().mul)
        if float(direction @ gradient) <= 0:
            pairs, direction = [], gradient / bound
        direction = direction * min(1.0, 4.0 / float(direction.abs().max()))
        length, found = 1.0, False
        while length > 1e-9 and not found:
            after = point + length * direction
            new_value, new_gradient, new_distances = space.evidence(after)
            enough = new_value >= value + 1e-4 * length * float(direction @ gradient)
            # Where the evidence changes by rounding only, the gradient says whether the step was good.
            level = abs(new_value - value) <= 1e-10 * abs(value)
            smaller = float((new_gradient.square() / bound).sum()) < float((gradient.square() / bound).sum())
            found = enough or (level and smaller)
            length /= 2
        if not found:
            if not pairs:
                break
            pairs = []
            continue
        pairs = [*pairs, (after - point, gradient - new_gradient)][-20:]
        point, value, gradient, distances = after, new_value, new_gradient, new_distances
    return point, value, residual, step


@dataclass(frozen=True)
class Space:
    """The logarithms to choose as one flat vector: the groups' in order, then that of the noise.

    None moves further than `reach` from its start.
    """

    la: Laplace
    groups: tuple[Group, ...]
    noise: bool
    start: Tensor
    free: Tensor
    held: tuple[str, ...]
    reach: float = math.inf

    def clip(self, point: Tensor) -> Tensor:
        """The nearest point within reach."""
        low, high = self._bounds()
        return point.clamp(low, high)

    def _bounds(self) -> tuple[Tensor, Tensor]:
        return (self.start - self.reach).clamp(min=-EDGE), (self.start + self.reach).clamp(max=EDGE)

    def precisions(self, point: Tensor) -> dict[str, Tensor]:
        """Precision by label."""
        sizes = [group.shape.numel() for group in self.groups]
        parts = self.clip(point)[: sum(sizes)].exp().split(sizes)
        return {group.label: part.reshape(group.shape) for group, part in zip(self.groups, parts, strict=True)}

    def at(self, point: Tensor) -> Laplace:
        values = self.precisions(point)
        by_name = {name: value for group in self.groups for name, value in group.expand(values[group.label]).items()}
        if len(self.groups) == 1 and not self.groups[0].shape:
            by_name = {"*": values[self.groups[0].label]}
        mean = self.la.posterior._gaussian().mean
        return self.la.at(prior=GaussianPrior(by_name, mean), noise=self.clip(point)[-1].exp() if self.noise else None)

    def evidence(self, point: Tensor) -> tuple[float, Tensor, Tensor]:
        """Its value, its gradient, 0 for what is held or as far as it may go, and the distances there."""
        moving = point.clone().requires_grad_()
        posterior = self.at(moving).posterior
        value = log_evidence(posterior)
        (gradient,) = torch.autograd.grad(value, moving)
        low, high = self._bounds()
        gradient = torch.where(self.free & (low < point) & (point < high), gradient, 0.0)
        with torch.no_grad():
            return value.item(), gradient, self._distances(posterior)

    def sizes(self, distances: Tensor) -> Tensor:
        """What the gradient is measured against: the distances, or the size of a group at the prior mean."""
        counts = self._counts.to(distances)
        groups, noise = distances[: len(counts)], distances[len(counts) :]
        return torch.cat([torch.where(groups > 0, groups, counts), noise]).clamp(min=1e-300)

    def _distances(self, posterior: Posterior) -> Tensor:
        """`λ_g ‖θ*_g − μ₀‖²` of each group, and T times the observations for the noise."""
        weighted = {
            name: precision * posterior.squared_distances[name] for name, precision in posterior.precisions.items()
        }
        found = torch.cat([group.total(weighted).flatten() for group in self.groups]) * posterior.prior_scale
        if not self.noise:
            return found
        return torch.cat([found, (self.la.curvature.statistics.observations * posterior.temperature)[None]])

    @cached_property
    def _counts(self) -> Tensor:
        return torch.cat([group.counts().flatten() for group in self.groups])

    def run_off(self, point: Tensor) -> list[str]:
        """What has no interior optimum: at the edge, or where the center moves, without a direction determined."""
        gone = self.free & (point.abs() >= EDGE)
        if self.la.center != "network":
            sizes = self._counts.to(point)
            count = len(sizes)
            distances = self._distances(self.at(point).posterior)
            gone[:count] |= self.free[:count] & (self.sizes(distances)[:count] < 1e-8 * sizes)
        if not bool(gone.any()):
            return []
        return [
            f"{int(gone.sum())} of {point.numel()} tuned values ran off to 0 or infinity: the data do not determine "
            "them, there is no interior optimum."
        ]


def search_space(la: Laplace, groups: tuple[Group, ...], noise: bool, from_here: bool = False) -> Space:
    """What to choose, and where to start: at the current precisions and noise, or unless `from_here` near the optimum
    where that is known. What has no optimum is held.
    """
    posterior = la.posterior
    posterior._gaussian()
    curvature = _above_rounding(posterior)
    distances = {name: (posterior.weights[name].double() - posterior.means[name]).square() for name in posterior.sizes}
    current = {name: value.detach().expand(posterior.sizes[name]) for name, value in posterior.precisions.items()}
    logarithms = {name: value.log() for name, value in current.items()}
    starts, frees, held = list[Tensor](), list[Tensor](), list[str]()
    for group in groups:
        diagonal, distance = group.total(curvature), group.total(distances)
        curved, apart = diagonal > 0, (distance > 0) | torch.tensor(la.center != "network")
        start = (group.total(logarithms) / group.counts().to(diagonal)).exp()
        if not from_here and [*group.sizes.values()] == [group.shape]:  # each weight has its own
            best = _diagonal_optimum(posterior.likelihood_scale * diagonal, distance)
            start = torch.where(curved & apart, best, start)
        # Tempering the prior as well moves these optima inside: above T = 1 for no curvature, below for no distance.
        both = la.tempered == "both"
        curved = curved | torch.tensor(both and la.temperature > 1, device=curved.device)
        apart = apart | torch.tensor(both and la.temperature < 1, device=curved.device)
        for missing, reason in ((~curved, "without curvature (the data say nothing): the best precision is 0"),
                                (curved & ~apart, "at the prior mean: the best precision is infinite")):  # fmt: skip
            if bool(missing.any()):
                which = (
                    f"{int(missing.sum())} of {missing.numel()} elements of {group.label!r} are"
                    if group.shape
                    else f"Prior group {group.label!r} is"
                )
                held.append(f"{which} {reason}; held.")
        starts.append(start.log().flatten())
        frees.append((curved & apart).flatten())
    has_noise = noise and la.likelihood.noise is not None
    if has_noise:
        statistics = la.curvature.statistics
        if statistics.squared_error <= 0:
            held.append("The squared error is 0: the best noise is 0; held.")
        starts.append(la._noise.detach().log()[None])
        frees.append(torch.tensor([statistics.squared_error > 0], device=starts[0].device))
    return Space(la, groups, has_noise, torch.cat(starts).detach(), torch.cat(frees), tuple(held))


def _above_rounding(posterior: Posterior) -> dict[str, Tensor]:
    """The diagonal of H, 0 where it is not more than the rounding of the largest in its block: there may be none."""
    diagonal, found = posterior.curvature_diagonal(), dict[str, Tensor]()
    for block in posterior.spectrum.blocks:
        largest = torch.stack([diagonal[name].abs().amax() for name in block.parameters]).amax()
        rounding = torch.finfo(posterior.weights[block.parameters[0]].dtype).eps * largest
        for name in block.parameters:
            found[name] = torch.where(diagonal[name] > rounding, diagonal[name], torch.zeros_like(diagonal[name]))
    return found


def _diagonal_optimum(curvature: Tensor, distance: Tensor) -> Tensor:
    """The best precision of a single weight: the positive root of `λ² + sλ = s/θ²`."""
    ratio = curvature / distance.clamp(min=1e-300)
    return (2 * ratio / (curvature + (curvature.square() + 4 * ratio).sqrt()).clamp(min=1e-300)).clamp(1e-15, 1e15)
