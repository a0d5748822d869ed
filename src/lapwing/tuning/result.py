"""What a tuning did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Round:
    """Where one round of an alternation stood: evidence, precisions by group, noise, how far its optimality condition
    was violated, and the steps and the residual of its mode.
    """

    value: float
    precisions: dict[str, Any]
    noise: float | None
    residual: float
    mode_steps: int
    mode_residual: float


@dataclass(frozen=True)
class Tuning:
    """The outcome of `tune_prior`.

    `value` is the best evidence or score, `start` that of the prior before; `residual` is the largest
    relative violation of the optimality condition (evidence); `candidates` lists what was tried with
    its score (validation); `rounds` are those of an alternation (linear evidence); `warnings` say what was held
    fixed and why.
    """

    method: str
    start: float
    value: float
    converged: bool
    iterations: int
    residual: float = 0.0
    precisions: dict[str, Any] = field(default_factory=dict)
    noise: float | None = None
    candidates: list[tuple[dict[str, Any], float]] = field(default_factory=list, repr=False)
    warnings: tuple[str, ...] = ()
    rounds: tuple[Round, ...] = field(default=(), repr=False)
