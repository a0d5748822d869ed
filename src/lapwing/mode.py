"""The mode of the linearized model: `θ* = argmin Σ_n ℓ(h(x_n, θ), y_n) + ½‖θ − μ₀‖²_Π`.

`h(x, θ) = f(x, θ̃) + J(x)(θ − θ̃)` and `ℓ = −T log p`. The problem is convex, so there is one mode, whatever
stopped the network's own training before it reached one. It is found by limited-memory BFGS that starts from the
posterior covariance: a step is one Jacobian-vector product (how the outputs move), a search along it in output space
alone, and one vector-Jacobian product (the gradient at its end). Every iterate transforms with the scale of a group of
weights whose prior precision does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing import lbfgs
from lapwing.errors import ConvergenceWarning, InputError, warn
from lapwing.flat import Flat
from lapwing.likelihoods import Statistics
from lapwing.linear_model import LinearModel
from lapwing.progress import bar

if TYPE_CHECKING:
    from lapwing.posterior import Posterior

_ROUNDING = 1e-13  # of a loss
_PAIRS = 50  # steps that are remembered, where the budget of bytes lets them
_PATIENCE = 20  # steps on which neither the loss nor the gradient falls, after which rounding is all there is


@dataclass(frozen=True)
class Mode:
    """θ*, what the data say there, and how well it was found.

    `step` is `θ* − θ̃` by parameter name, float64; `statistics` and `gradient` (`∇ = Σ_n J_nᵀ ∇_h log p`, by name) are
    those of the linear model at θ*, at unit noise. `residual` is the violation of the first-order condition relative to
    its terms, `‖Π(θ* − μ₀) − T∇/σ²‖ / (‖Π(θ* − μ₀)‖ + ‖T∇/σ²‖)` in the norm of Π⁻¹. As the problem is convex, θ* is off
    by no more than the numerator in the norm of Π, and its loss by half its square, `gap`. `losses` are those of all
    iterates.
    """

    step: dict[str, Tensor]
    statistics: Statistics
    gradient: dict[str, Tensor]
    residual: float
    gap: float
    converged: bool
    losses: tuple[float, ...]

    @property
    def iterations(self) -> int:
        """Steps that were made."""
        return len(self.losses) - 1

    def to(self, device: torch.device) -> Mode:
        step, gradient = (
            {name: value.to(device) for name, value in values.items()} for values in (self.step, self.gradient)
        )
        return replace(self, step=step, gradient=gradient)


def find_mode(
    model: LinearModel,
    posterior: Posterior,
    start: Mode | None = None,
    tolerance: float = 1e-4,
    max_steps: int = 500,
    budget: int = 2**30,
    show: bool = True,
) -> Mode:
    """Find θ* under the prior, noise and temperature of `posterior`, from `start` or from the network's weights.

    Converged where `Mode.residual` is at most `tolerance`; otherwise a `ConvergenceWarning` says so.
    """
    if not 0 < tolerance < 1:
        raise InputError(f"find_mode: tolerance must be between 0 and 1, got {tolerance}.")
    if max_steps < 1:
        raise InputError(f"find_mode: max_steps must be at least 1, got {max_steps}.")
    problem = _Problem.of(model, posterior)
    point = problem.network()
    if start is not None:
        warm = problem.moved(point, problem.flat.pack(start.step), 1.0)
        point = warm if warm.loss < point.loss else point
    losses = [point.loss]
    gradient = problem.gradient(point)
    pairs: list[tuple[Tensor, Tensor]] = []
    kept = max(2, min(_PAIRS, budget // (16 * problem.flat.length)))
    best, idle = gradient.residual, 0
    for _ in bar(range(max_steps), "find mode", show):
        if gradient.residual <= tolerance or idle == _PATIENCE:
            break
        ahead = problem.search(point, lbfgs.direction(-gradient.total, pairs, problem.solve))
        if ahead is None:  # no descent above rounding
            if not pairs:
                break
            pairs = []
            continue
        after = problem.gradient(ahead)
        pairs = [*pairs, (ahead.step - point.step, after.total - gradient.total)][-kept:]
        level = point.loss - ahead.loss <= _ROUNDING * abs(point.loss)
        idle = idle + 1 if level and after.residual > 0.9 * best else 0
        best = min(best, after.residual)
        point, gradient = ahead, after
        losses.append(point.loss)
    if gradient.residual > tolerance:
        warn(
            f"The linear model's mode did not converge in {len(losses) - 1} steps: the first-order condition is "
            f"violated by {gradient.residual:.2g} of its terms (tolerance {tolerance:.2g}). Raise max_steps or "
            "tolerance, take a stronger prior or a structure closer to 'full', or use a network in float64.",
            ConvergenceWarning,
        )
    statistics = sum(
        (model.likelihood.statistics(h, y) for h, y in zip(point.outputs, model.targets, strict=True)), Statistics()
    )
    return Mode(
        problem.flat.unpack(point.step), statistics, problem.flat.unpack(gradient.data), gradient.residual,
        gradient.gap, gradient.residual <= tolerance, tuple(losses),
    )  # fmt: skip


@dataclass(frozen=True)
class _Point:
    """A step from θ̃ `[p]`, the outputs `[N, *output]` of every batch there, and the loss."""

    step: Tensor
    outputs: list[Tensor]
    loss: float


@dataclass(frozen=True)
class _Gradient:
    """The loss's gradient `total: [p]`, and `data`, the log-likelihood's at unit noise."""

    total: Tensor
    data: Tensor
    residual: float
    gap: float


@dataclass(frozen=True)
class _Problem:
    """`−s Σ log p(y|h) + ½ Σ_i π_i (m_i + δ_i)²` with `s = T/σ²`, π the prior precision and `m = θ̃ − μ₀`, all `[p]`."""

    model: LinearModel
    posterior: Posterior
    flat: Flat
    scale: float
    precision: Tensor
    distance: Tensor

    @staticmethod
    def of(model: LinearModel, posterior: Posterior) -> _Problem:
        flat = Flat(posterior.sizes)
        with torch.no_grad():
            expanded = {name: posterior.precisions[name].expand(size) for name, size in flat.sizes.items()}
            distance = {name: posterior.weights[name].double() - posterior.means[name] for name in flat.sizes}
            precision = flat.pack(expanded) * posterior.prior_scale
            return _Problem(model, posterior, flat, float(posterior.likelihood_scale), precision, flat.pack(distance))

    def solve(self, vector: Tensor) -> Tensor:
        """`P⁻¹ v`."""
        return self.flat.pack(self.posterior.solve(self.flat.unpack(vector)))

    def network(self) -> _Point:
        return self._point(torch.zeros_like(self.distance), list(self.model.outputs))

    def moved(self, point: _Point, direction: Tensor, length: float) -> _Point:
        """`length` times a direction further; one pass over the data."""
        return self._ahead(point, direction, self.model.push(self.flat.unpack(direction)), length)

    def _ahead(self, point: _Point, direction: Tensor, moves: list[Tensor], length: float) -> _Point:
        outputs = [h + length * u for h, u in zip(point.outputs, moves, strict=True)]
        return self._point(point.step + length * direction, outputs)

    def _point(self, step: Tensor, outputs: list[Tensor]) -> _Point:
        fit = sum(
            float(self.model.likelihood.log_prob(h, y).sum()) for h, y in zip(outputs, self.model.targets, strict=True)
        )
        penalty = float((self.precision * (self.distance + step).square()).sum())
        return _Point(step, outputs, 0.5 * penalty - self.scale * fit)

    def gradient(self, point: _Point) -> _Gradient:
        """One pass over the data."""
        slopes: list[Tensor] = []
        for h, y in zip(point.outputs, self.model.targets, strict=True):
            leaf = h.detach().requires_grad_()
            slopes += torch.autograd.grad(self.model.likelihood.log_prob(leaf, y).sum(), leaf)
        data = self.flat.pack(self.model.pull(slopes))
        prior = self.precision * (self.distance + point.step)
        total = prior - self.scale * data
        terms = self._size(prior) + self._size(self.scale * data)
        size = self._size(total)
        return _Gradient(total, data, size / terms if terms > 0 else 0.0, 0.5 * size**2)

    def _size(self, vector: Tensor) -> float:
        """In the norm of Π⁻¹."""
        return float((vector.square() / self.precision).sum().sqrt())

    def search(self, point: _Point, direction: Tensor) -> _Point | None:
        """The lowest point along a direction; None if there is none below this one, up to rounding."""
        moves = self.model.push(self.flat.unpack(direction))
        pull = float((self.precision * (self.distance + point.step)) @ direction)
        stiffness = float(self.precision @ direction.square())
        derivatives = _derivatives(self.model, self.scale, point.outputs, moves, pull, stiffness)
        length = _root(derivatives)
        if length is None:
            return None
        ahead = self._ahead(point, direction, moves, length)
        return ahead if ahead.loss <= point.loss + _ROUNDING * abs(point.loss) else None


Derivatives = Callable[[float], tuple[float, float]]


def _derivatives(
    model: LinearModel, scale: float, outputs: list[Tensor], moves: list[Tensor], pull: float, stiffness: float
) -> Derivatives:
    """First and second derivative of the loss along a line, from outputs alone."""

    def at(length: float) -> tuple[float, float]:
        first, second = pull + length * stiffness, stiffness
        for h, u, y in zip(outputs, moves, model.targets, strict=True):
            where = torch.tensor(length, dtype=torch.float64, device=h.device, requires_grad=True)
            fit = model.likelihood.log_prob(h + where * u, y).sum()
            (slope,) = torch.autograd.grad(fit, where, create_graph=True)
            first -= scale * float(slope.detach())
            if slope.requires_grad:
                second -= scale * float(torch.autograd.grad(slope, where)[0])
        return first, second

    return at


def _root(derivatives: Derivatives, exact: float = 1e-9) -> float | None:
    """Where the slope of a convex function that falls at 0 vanishes: Newton's method between the known signs."""
    falling, rising = 0.0, math.inf
    start, curve = derivatives(0.0)
    if not start < 0:
        return None
    length = -start / curve if curve > 0 else 1.0
    for _ in range(60):
        slope, curve = derivatives(length)
        if abs(slope) <= exact * abs(start):
            break
        if slope < 0:
            falling = length
        else:
            rising = length
        newton = length - slope / curve if curve > 0 else math.inf
        if not falling < newton < rising:
            newton = 0.5 * (falling + rising) if rising < math.inf else 4 * max(length, 1e-12)
        if newton == length:
            break
        length = newton
    return length
