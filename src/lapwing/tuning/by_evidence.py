"""Maximize the evidence over prior precisions and noise, jointly and to convergence; no data needed.

In the logarithms of precisions and noise the evidence at a fixed center is concave. Its stationary
points are MacKay's: `γ_g = λ_g ‖θ*_g − μ₀‖²` for every group g, with γ the effective dimension.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.errors import InputError, TuningWarning
from lapwing.priors import GaussianPrior
from lapwing.tuning.groups import Groups, labels
from lapwing.tuning.result import Tuning

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

_EDGE = 40.0  # |log λ| beyond which an optimum is said to run off


def tune_by_evidence(
    la: Laplace, groups: Groups = "scalar", noise: bool = True, tolerance: float = 1e-6, max_rounds: int = 20
) -> tuple[Laplace, Tuning]:
    """Choose prior precisions by group, and the noise of a regression where `noise`.

    Converged when `|γ_g − λ_g ‖θ*_g − μ₀‖²|` is at most `tolerance` times `λ_g ‖θ*_g − μ₀‖²` for each
    group, and likewise for the noise; otherwise a `TuningWarning` says so. A group whose optimum runs off
    (its weights are at the prior mean: λ → ∞; it has no curvature: λ → 0; the squared error is 0: σ² → 0)
    is held at its value, with a warning.
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance must be between 0 and 1, got {tolerance}.")
    space = _space(la, groups, noise)
    if not bool(space.free.any()):
        raise InputError("Nothing to tune. " + " ".join(space.held))
    start = float(la.log_evidence())
    point, rounds = space.start, 0
    residual = space.residual(point)
    while residual > tolerance and rounds < max_rounds:
        point = space.ascend(point)
        residual = space.residual(point)
        rounds += 1
    converged = residual <= tolerance
    messages = [*space.held, *space.at_edge(point)]
    if not converged:
        messages.append(
            f"The evidence did not converge in {max_rounds} rounds: the optimality condition is violated by "
            f"{residual:.2g} (tolerance {tolerance:.2g}). Raise max_rounds or tolerance."
        )
    for message in messages:
        warnings.warn(message, TuningWarning, stacklevel=3)
    tuned = space.at(point)
    shown = {
        label: float(value) if value.dim() == 0 else value.clone() for label, value in space.precisions(point).items()
    }
    value = float(tuned.log_evidence())
    chosen_noise = float(tuned._noise) if space.noise else None
    return tuned, Tuning(
        "evidence", start, value, converged, rounds, residual, shown, chosen_noise, [], tuple(messages)
    )


@dataclass(frozen=True)
class _Group:
    """The parameters of one label; `shape` is () for a shared precision, else one per element."""

    label: str
    members: tuple[str, ...]
    shape: torch.Size
    size: int


@dataclass(frozen=True)
class _Space:
    """The logarithms to choose as one flat vector: the groups' in order, then that of the noise."""

    la: Laplace
    groups: tuple[_Group, ...]
    noise: bool
    start: Tensor
    free: Tensor
    weight: Tensor
    held: tuple[str, ...]

    def precisions(self, point: Tensor) -> dict[str, Tensor]:
        """Precision by label."""
        sizes = [group.shape.numel() for group in self.groups]
        parts = point[: sum(sizes)].clamp(-_EDGE, _EDGE).exp().split(sizes)
        return {group.label: part.reshape(group.shape) for group, part in zip(self.groups, parts, strict=True)}

    def at(self, point: Tensor) -> Laplace:
        values = self.precisions(point)
        by_name = {name: values[group.label] for group in self.groups for name in group.members}
        mean = self.la.posterior._gaussian().mean
        return self.la.at(
            prior=GaussianPrior(by_name, mean), noise=point[-1].clamp(-_EDGE, _EDGE).exp() if self.noise else None
        )

    def evidence(self, point: Tensor) -> Tensor:
        return self.at(point).log_evidence()

    def residual(self, point: Tensor) -> float:
        """The largest relative violation of the optimality conditions among what may move."""
        moving = point.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.evidence(moving), moving)
        posterior = self.at(point).posterior
        weighted = {
            name: (
                precision * (posterior.weights[name].double() + posterior.step[name] - posterior.means[name]).square()
            )
            for name, precision in posterior.precisions.items()
        }
        scales = [
            weighted[group.members[0]].flatten() if group.shape else _total([weighted[name] for name in group.members])
            for group in self.groups
        ]
        scale = torch.cat(scales) * posterior.prior_scale
        if self.noise:
            observations = self.la.curvature.statistics.observations * posterior.temperature
            scale = torch.cat([scale, observations[None]])
        ratio = 2 * gradient.abs() / scale.clamp(min=1e-300)
        ratio = torch.where(self.free & (point.abs() < _EDGE), ratio, torch.zeros_like(ratio))
        return float(ratio.max())

    def ascend(self, point: Tensor) -> Tensor:
        """One round of L-BFGS, each coordinate scaled by the root of the number of parameters it speaks for."""
        scaled = (point * self.weight).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [scaled], max_iter=100, history_size=20, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -self.evidence(torch.where(self.free, scaled / self.weight, point))
            loss.backward()
            return loss

        optimizer.step(closure)
        return torch.where(self.free, scaled.detach() / self.weight, point)

    def at_edge(self, point: Tensor) -> list[str]:
        edge = self.free & (point.abs() >= _EDGE)
        if not bool(edge.any()):
            return []
        return [f"{int(edge.sum())} of {point.numel()} tuned values ran off to 0 or infinity: no interior optimum."]


def _space(la: Laplace, groups: Groups, noise: bool) -> _Space:
    posterior = la.posterior
    posterior._gaussian()
    names = labels(groups, [layer for block in la.curvature.blocks for layer in block.layers])
    curvature = _curvature_diagonal(la)
    found, starts, frees, weights, held = list[_Group](), list[Tensor](), list[Tensor](), list[Tensor](), list[str]()
    for label in dict.fromkeys(names.values()):
        members = tuple(name for name, other in names.items() if other == label)
        distance = torch.cat(
            [(posterior.weights[name].double() - posterior.means[name]).square().flatten() for name in members]
        )
        diagonal = torch.cat([curvature[name].flatten() for name in members])
        current = torch.cat(
            [posterior.precisions[name].detach().expand(posterior.sizes[name]).flatten() for name in members]
        )
        curved, apart = diagonal > 0, (distance > 0) | torch.tensor(la.center != "network")
        if groups == "parameter":
            group = _Group(label, members, posterior.sizes[members[0]], 1)
            start = torch.where(
                curved & apart, _diagonal_optimum(posterior.likelihood_scale * diagonal, distance), current
            )
        else:
            group = _Group(label, members, torch.Size(()), distance.numel())
            start = current.log().mean().exp()[None]
            curved, apart = curved.any()[None], apart.any()[None]
        for missing, reason in ((~curved, "without curvature (the data say nothing): the best precision is 0"),
                                (curved & ~apart, "at the prior mean: the best precision is infinite")):  # fmt: skip
            if bool(missing.any()):
                which = (
                    f"{int(missing.sum())} of {missing.numel()} elements of {label!r} are"
                    if group.shape
                    else f"Prior group {label!r} is"
                )
                held.append(f"{which} {reason}; held.")
        found.append(group)
        starts.append(start.log())
        frees.append(curved & apart)
        weights.append(torch.full_like(start, group.size))
    if noise and la.likelihood.noise is not None:
        statistics = la.curvature.statistics
        if statistics.squared_error <= 0:
            held.append("The squared error is 0: the best noise is 0; held.")
        starts.append(la._noise.detach().log()[None])
        frees.append(torch.tensor([statistics.squared_error > 0], device=starts[0].device))
        weights.append(torch.full_like(starts[-1], max(1.0, statistics.observations)))
    has_noise = noise and la.likelihood.noise is not None
    weight = torch.cat(weights).sqrt()
    return _Space(la, tuple(found), has_noise, torch.cat(starts).detach(), torch.cat(frees), weight, tuple(held))


def _total(terms: list[Tensor]) -> Tensor:
    return torch.stack([term.sum() for term in terms]).sum()[None]


def _diagonal_optimum(curvature: Tensor, distance: Tensor) -> Tensor:
    """The best precision of a single weight: the positive root of `λ² + sλ = s/θ²`."""
    ratio = curvature / distance.clamp(min=1e-300)
    return (2 * ratio / (curvature + (curvature.square() + 4 * ratio).sqrt()).clamp(min=1e-300)).clamp(1e-15, 1e15)


def _curvature_diagonal(la: Laplace) -> dict[str, Tensor]:
    """The diagonal of H by parameter name, rounding errors set to 0; float64."""
    found: dict[str, Tensor] = {}
    for i, block in enumerate(la.curvature.blocks):
        plain = la.posterior.spectrum.decompose(i, None)
        diagonal = plain.basis.double().marginal(plain.eigenvalues)
        rounding = torch.finfo(la.posterior.weights[block.parameters[0]].dtype).eps * diagonal.abs().amax()
        found |= block.unpack(torch.where(diagonal > rounding, diagonal, torch.zeros_like(diagonal)))
    return found
