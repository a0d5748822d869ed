"""Maximize the linear model's own evidence over prior precisions and noise, its mode moving along.

Rounds of two steps: the mode θ* under the current precisions, found from data and warm-started, and then new precisions
for it. MacKay's update, `λ_g ← γ_g/‖θ*_g − μ₀‖²` (and `σ² ← Σ err²/(n − γ)`), is their fixed point; in logarithms, with
the last rounds remembered (L-BFGS: the gradient `½(γ_g − λ_g ‖θ*_g − μ₀‖²)` is exact, as θ* maximizes what it enters),
it does not creep where data determine few of a group's directions. A round that lowers the evidence is halved.
All starts from `λ_g = p_g/‖θ̃_g − μ₀‖²`, so that every iterate transforms with the scale of a group.
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

from lapwing import lbfgs
from lapwing.errors import ConvergenceWarning, InputError, TuningWarning, warn
from lapwing.linear_model import LinearModel, linear_model
from lapwing.mode import Mode, find_mode
from lapwing.progress import bar
from lapwing.tuning.by_evidence import EDGE, Space, search_space
from lapwing.tuning.groups import Group
from lapwing.tuning.result import Round, Tuning

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

_FARTHEST = math.log(1e3)  # of a precision in one round
_COARSE = 1e-2  # tolerance of the mode while precisions are far off
_LEVEL = 1e-6  # by which the evidence may fall for rounding
_UNDETERMINED = 1e-2  # directions of a group, below which its precision is said to run off

Pairs = list[tuple[Tensor, Tensor]]


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
    with linear_model(la, loader, "tune_prior(method='linear-evidence')") as model:
        search = _Search(model, groups, noise, mode_tolerance, max_mode_steps)
        stop = search.at(_start(la, groups, noise), la.mode_, _COARSE)
        rounds, pairs = [stop.round()], Pairs()
        for _ in bar(range(max_rounds), "tune prior", la.progress):
            if stop.residual <= tolerance:
                stop = search.refined(stop)
                rounds[-1] = stop.round()
                if stop.residual <= tolerance:
                    break
            ahead = search.further(stop, pairs)
            if ahead is not None:
                pairs = [*pairs, (ahead.space.start - stop.space.start, stop.slope - ahead.slope)][-20:]
                stop = ahead
                rounds.append(stop.round())
            elif pairs:
                pairs = Pairs()
            elif stop.mode.residual > mode_tolerance:
                stop = search.refined(stop)
                rounds[-1] = stop.round()
            else:
                break
        stop = search.refined(stop)
        rounds[-1] = stop.round()
    messages = [*stop.space.held, *stop.ran_off()]
    if stop.mode.residual > mode_tolerance:
        messages.append(
            f"The linear model's mode did not converge: its first-order condition is violated by "
            f"{stop.mode.residual:.2g}. Raise max_mode_steps or mode_tolerance."
        )
    if stop.residual > tolerance:
        out = len(rounds) > max_rounds
        fix = "Raise max_rounds or tolerance." if out else "No step raised the evidence any more: raise tolerance."
        messages.append(
            f"The linear model's evidence did not converge in {len(rounds) - 1} rounds: the optimality condition is "
            f"violated by {stop.residual:.2g} (tolerance {tolerance:.2g}). {fix}"
        )
    for message in messages:
        warn(message, TuningWarning)
    last, converged = stop.round(), stop.residual <= tolerance and stop.mode.residual <= mode_tolerance
    return stop.la, Tuning(
        "linear-evidence", start, stop.value, converged, len(rounds) - 1, stop.residual, last.precisions, last.noise,
        warnings=tuple(messages), rounds=tuple(rounds),
    )  # fmt: skip


def _start(la: Laplace, groups: tuple[Group, ...], noise: bool) -> Laplace:
    """`λ_g = p_g/‖θ̃_g − μ₀‖²`, where all directions are determined; the current one for what is held or at μ₀."""
    space = search_space(la.at(center="newton"), groups, noise, from_here=True)
    if not bool(space.free.any()):
        raise InputError("Nothing to tune. " + " ".join(space.held))
    posterior = la.posterior
    distances = {name: (posterior.weights[name].double() - posterior.means[name]).square() for name in posterior.sizes}
    distance = torch.cat([group.total(distances).flatten() for group in groups])
    counts = torch.cat([group.counts().flatten() for group in groups]).to(distance)
    point, count = space.start.clone(), len(counts)
    known = space.free[:count] & (distance > 0)
    point[:count] = torch.where(known, (counts / distance).log().clamp(-EDGE, EDGE), point[:count])
    return la.at(prior=space.at(point).prior, center="linear")


@dataclass(frozen=True)
class _Stop:
    """Precisions and noise, their mode, and how far both are from the optimum.

    `distances` are `λ_g ‖θ*_g − μ₀‖²` of the precisions, and T times the observations for the noise.
    """

    la: Laplace
    mode: Mode
    space: Space
    value: float
    gradient: Tensor
    distances: Tensor
    dimension: float

    @property
    def determined(self) -> Tensor:
        """`γ` of every precision, as MacKay's condition counts it."""
        return self.distances + 2 * self.gradient

    @property
    def gone(self) -> Tensor:
        """What runs off to infinity; it stays where that was seen."""
        gone = self.space.free & (self.gradient >= 0) & (self.determined < _UNDETERMINED)
        gone[sum(group.shape.numel() for group in self.space.groups) :] = False  # the noise
        return gone

    @property
    def slope(self) -> Tensor:
        """The gradient, 0 for what is held or gone."""
        return torch.where(self.gone, 0.0, self.gradient)

    @property
    def residual(self) -> float:
        """The largest violation of an optimality condition, relative to its terms."""
        terms = torch.maximum(self.distances, self.determined).clamp(min=1e-300)
        return float((2 * self.slope.abs() / terms).max())

    def updates(self) -> Tensor:
        """MacKay's, in logarithms, none above the largest step of a round."""
        wanted, given = self.determined.clone(), self.distances.clone()
        if self.space.noise:
            given[-1] -= self.dimension  # T n − γ
            wanted[-1] = given[-1] + 2 * self.gradient[-1]  # T Σ err²/σ²
        ratio = wanted.clamp(min=0) / given.clamp(min=1e-300)
        return ratio.log().clamp(-_FARTHEST, _FARTHEST)

    def metric(self, vector: Tensor) -> Tensor:
        """The diagonal matrix that takes the gradient to MacKay's updates."""
        bounds = 2 / torch.maximum(self.distances, self.determined).clamp(min=1e-300)
        updates = self.updates() / torch.where(self.gradient == 0, 1.0, self.gradient)
        return vector * torch.where(updates > 0, updates, bounds)

    def ran_off(self) -> list[str]:
        """What the data say nothing about."""
        labels = [group.label for group in self.space.groups for _ in range(group.shape.numel())]
        freed = self.space.free & (self.space.start <= -EDGE)
        low = (
            f"the data determine less than {_UNDETERMINED} of a direction there, and the best prior holds these weights"
        )
        said = []
        for where, flags, why in (
            ("infinity", self.gone, f"{low} at its mean"),
            ("0", freed, "the best prior leaves these weights free"),
        ):
            names = [label for label, flag in zip(labels, flags.tolist(), strict=False) if flag]
            if names:
                named = ", ".join(map(repr, dict.fromkeys(names)))
                said.append(f"{len(names)} of {len(labels)} precisions ran off to {where} ({named}): {why}.")
        return said

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
    mode_tolerance: float
    max_mode_steps: int

    def at(self, la: Laplace, mode: Mode | None, tolerance: float) -> _Stop:
        """Find the mode of these precisions, from another one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the last mode counts, and the tuning says so
            found = find_mode(
                self.model, la.posterior, mode, tolerance, self.max_mode_steps, la.memory_budget, show=False
            )
        here = copy.copy(la)
        here.mode_ = found
        space = search_space(here, self.groups, self.noise, from_here=True)
        value, gradient, distances = space.evidence(space.start)
        return _Stop(here, found, space, value, gradient, distances, here.effective_dimension())

    def refined(self, stop: _Stop) -> _Stop:
        """The same precisions, their mode as well known as was asked for."""
        if stop.mode.residual <= self.mode_tolerance:
            return stop
        return self.at(stop.la, stop.mode, self.mode_tolerance)

    def further(self, stop: _Stop, pairs: Pairs) -> _Stop | None:
        """Better precisions; None if there are none, up to rounding."""
        # A mode need not be better known than the precisions that are chosen by it.
        tolerance = max(self.mode_tolerance, min(_COARSE, 0.05 * stop.residual))
        ahead = lbfgs.direction(stop.slope, pairs, stop.metric)
        if float(ahead @ stop.slope) <= 0:
            ahead = stop.metric(stop.slope)
        space = replace(stop.space, reach=_FARTHEST)
        for _ in range(10):
            proposed = space.at(space.start + ahead)
            there = stop.la.at(prior=proposed.prior, noise=proposed._noise if space.noise else None)
            found = self.at(there, stop.mode, tolerance)
            gain, slack = found.value - stop.value, _LEVEL * abs(stop.value) + found.mode.gap
            if gain > slack or (gain >= -slack and found.residual < stop.residual):
                return found
            ahead = ahead / 2
        return None
