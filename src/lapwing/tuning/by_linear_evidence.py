"""Maximize the linear model's own evidence over prior precisions and noise, its mode moving along.

Rounds of two steps: the mode θ* under the current precisions, found from data and warm-started, and then new precisions
for it. At the optimum MacKay's conditions hold with that mode, `γ_g = λ_g ‖θ*_g − μ₀‖²`. Taken as an iteration,
`λ_g ← γ_g/‖θ*_g − μ₀‖²`, they creep where data determine few of a group's directions; so a round solves them with θ*
moving as the curvature says (a Newton step from the last mode), and goes no further than where the evidence falls. All
starts from `λ_g = p_g/‖θ̃_g − μ₀‖²` and moves in logarithms, so that every iterate transforms with the scale of a group.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.errors import ConvergenceWarning, InputError, TuningWarning
from lapwing.linear_model import LinearModel
from lapwing.mode import Mode, find_mode
from lapwing.progress import bar
from lapwing.tuning.by_evidence import Space, maximize, search_space
from lapwing.tuning.groups import Group
from lapwing.tuning.result import Round, Tuning

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

_FARTHEST = math.log(1e3)  # of a precision in one round
_COARSE = 1e-2  # tolerance of the mode while precisions are far off
_LEVEL = 1e-6  # by which the evidence may fall for rounding and what the mode is off
_UNDETERMINED = 1e-3  # directions of a group, below which its precision is said to run off


def tune_by_linear_evidence(
    la: Laplace,
    groups: tuple[Group, ...],
    loader: Iterable[Any],
    noise: bool = True,
    tolerance: float = 3e-4,
    max_rounds: int = 50,
    mode_tolerance: float = 1e-5,
    max_mode_steps: int = 500,
) -> tuple[Laplace, Tuning]:
    """Choose prior precisions by group, and the noise of a regression where `noise`, at the linear model's own mode.

    Converged when `|γ_g − λ_g ‖θ*_g − μ₀‖²|` is at most `tolerance` times the larger of the two for each group, and
    likewise for the noise, and the mode to `mode_tolerance`. Otherwise, and where a precision runs off, a
    `TuningWarning` says so. The rounds are in `Tuning.rounds`.
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance must be between 0 and 1, got {tolerance}.")
    if max_rounds < 1:
        raise InputError(f"max_rounds must be at least 1, got {max_rounds}.")
    start = float(la.at(center="network").log_evidence())
    la = la.at(prior=_start(la, groups), center="linear")
    with la._linear_model(loader, "tune_prior(method='linear-evidence')") as model:
        search = _Search(model, groups, noise, max_mode_steps)
        stop = search.at(la, la.mode_, _COARSE)
        rounds = [stop.round()]
        for _ in bar(range(max_rounds), "tune prior", la.progress):
            if stop.residual <= tolerance and stop.mode.residual > mode_tolerance:
                stop = search.at(stop.la, stop.mode, mode_tolerance)
                rounds[-1] = stop.round()
            if stop.residual <= tolerance:
                break
            # A mode need not be better known than the precisions that are chosen by it.
            ahead = search.further(stop, max(mode_tolerance, min(_COARSE, 0.1 * stop.residual)))
            if ahead is None:
                break
            stop = ahead
            rounds.append(stop.round())
    messages = [*stop.space.held, *stop.undetermined()]
    if stop.mode.residual > mode_tolerance:
        messages.append(
            f"The linear model's mode did not converge: its first-order condition is violated by "
            f"{stop.mode.residual:.2g}. Raise max_mode_steps or mode_tolerance."
        )
    if stop.residual > tolerance:
        messages.append(
            f"The linear model's evidence did not converge in {len(rounds) - 1} rounds: the optimality condition is "
            f"violated by {stop.residual:.2g} (tolerance {tolerance:.2g}). Raise max_rounds or tolerance."
        )
    for message in messages:
        warnings.warn(message, TuningWarning, stacklevel=3)
    last, converged = stop.round(), stop.residual <= tolerance and stop.mode.residual <= mode_tolerance
    return stop.la, Tuning(
        "linear-evidence", start, stop.value, converged, len(rounds) - 1, stop.residual, last.precisions, last.noise,
        warnings=tuple(messages), rounds=tuple(rounds),
    )  # fmt: skip


def _start(la: Laplace, groups: tuple[Group, ...]) -> Any:
    """`λ_g = p_g/‖θ̃_g − μ₀‖²`, where all directions are determined; the current one for a group at the prior mean."""
    posterior = la.posterior
    distances = {name: (posterior.weights[name].double() - posterior.means[name]).square() for name in posterior.sizes}
    current = {name: value.detach().expand(posterior.sizes[name]) for name, value in posterior.precisions.items()}
    by_name: dict[str, Tensor] = {}
    for group in groups:
        distance = group.total(distances)
        count = group.counts().to(distance)
        by_name |= group.expand(torch.where(distance > 0, count / distance, group.total(current) / count))
    return replace(posterior._gaussian(), precision=by_name)


@dataclass(frozen=True)
class _Stop:
    """Precisions and noise, their mode, and how far both are from the optimum."""

    la: Laplace
    mode: Mode
    space: Space
    value: float
    gradient: Tensor
    distances: Tensor

    @property
    def determined(self) -> Tensor:
        """`γ` of every precision, as MacKay's condition counts it."""
        return self.distances + 2 * self.gradient

    @property
    def violations(self) -> Tensor:
        """Of the optimality condition, relative; 0 for what is held or ran off."""
        relative = 2 * self.gradient.abs() / torch.maximum(self.distances, self.determined).clamp(min=1e-300)
        return torch.where(self.gone | ~self.space.free, 0.0, relative)

    @property
    def residual(self) -> float:
        return float(self.violations.max())

    @property
    def gone(self) -> Tensor:
        """What ran off: it stays where that was seen."""
        count = sum(group.shape.numel() for group in self.space.groups)
        gone = torch.zeros_like(self.space.free)
        gone[:count] = self.determined[:count] < _UNDETERMINED
        return gone & self.space.free

    def undetermined(self) -> list[str]:
        """What the data say nothing about."""
        labels = [group.label for group in self.space.groups for _ in range(group.shape.numel())]
        gone = [label for label, flag in zip(labels, self.gone.tolist(), strict=False) if flag]
        if not gone:
            return []
        named = ", ".join(repr(label) for label in dict.fromkeys(gone))
        return [
            f"{len(gone)} of {len(self.space.start)} precisions ran off to infinity ({named}): the data determine less "
            f"than {_UNDETERMINED} of a direction there, and the best prior holds these weights at its mean."
        ]

    def round(self) -> Round:
        shown = {
            label: float(value) if value.dim() == 0 else value.clone()
            for label, value in self.space.precisions(self.space.start).items()
        }
        noise = float(self.la._noise) if self.space.noise else None
        return Round(self.value, shown, noise, self.residual, self.mode.iterations, self.mode.residual)


@dataclass(frozen=True)
class _Search:
    model: LinearModel
    groups: tuple[Group, ...]
    noise: bool
    max_mode_steps: int

    def at(self, la: Laplace, mode: Mode | None, tolerance: float) -> _Stop:
        """Find the mode of these precisions, from another one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the last mode counts, and the tuning says so
            found = find_mode(self.model, la.posterior, mode, tolerance, self.max_mode_steps, show=False)
        here = copy.copy(la)
        here.mode_ = found
        space = search_space(here, self.groups, self.noise, from_here=True)
        value, gradient = space.evidence(space.start)
        return _Stop(here, found, space, value, gradient, space.distances(space.start))

    def further(self, stop: _Stop, mode_tolerance: float) -> _Stop | None:
        """Better precisions; None if there are none, up to rounding."""
        moving = search_space(stop.la.recentered(), self.groups, self.noise, from_here=True)
        moving = replace(moving, free=moving.free & stop.space.free & ~stop.gone, reach=_FARTHEST)
        ahead = moving.clip(maximize(moving, min(1e-3, 0.1 * stop.residual), 50)[0]) - moving.start
        for _ in range(8):
            proposed = moving.at(moving.start + ahead)
            there = stop.la.at(prior=proposed.prior, noise=proposed._noise if moving.noise else None)
            found = self.at(there, stop.mode, mode_tolerance)
            if found.value + found.mode.gap >= stop.value - _LEVEL * abs(stop.value):
                return found
            ahead = ahead / 2
        return None
