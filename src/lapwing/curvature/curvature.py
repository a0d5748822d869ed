"""Curvature: a sum over data, and nothing else. No prior, no temperature, no noise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.curvature.blocks import Block
from lapwing.errors import InputError
from lapwing.likelihoods import Statistics


@dataclass(frozen=True)
class Traces:
    """What `rank_tolerance` left out of `Σ_n tr Λ_n`, and the whole of it."""

    dropped: float = 0.0
    total: float = 0.0

    def __add__(self, other: Traces) -> Traces:
        return Traces(self.dropped + other.dropped, self.total + other.total)

    def scale(self, factor: float) -> Traces:
        return Traces(self.dropped * factor, self.total * factor)

    @property
    def fraction(self) -> float:
        """The fraction dropped; 0 where nothing was."""
        return self.dropped / self.total if self.total else 0.0


@dataclass(frozen=True)
class Curvature:
    """H block by block, with the other sums over the same data.

    `gradient` is `Σ_n J_nᵀ ∇_f log p` at unit noise by parameter name; `statistics` has N and Σ log p.
    """

    structure: str
    kind: str
    blocks: tuple[Block, ...]
    statistics: Statistics
    gradient: dict[str, Tensor]
    traces: Traces = Traces()

    @property
    def dropped(self) -> float:
        """The fraction of the trace in output space that `rank_tolerance` left out."""
        return self.traces.fraction

    @property
    def examples(self) -> float:
        """How many examples were seen."""
        return self.statistics.examples

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for block in self.blocks for name in block.parameters)

    @property
    def size(self) -> int:
        """The number of Bayesian parameters."""
        return sum(block.size for block in self.blocks)

    def merge(self, other: Curvature) -> Curvature:
        """The curvature of both data sets together (same model, weights, structure and kind)."""
        for what in ("structure", "kind"):
            if getattr(self, what) != getattr(other, what):
                raise InputError(
                    f"Curvatures of different {what} do not merge: {getattr(self, what)!r}, {getattr(other, what)!r}."
                )
        if [block.layers for block in self.blocks] != [block.layers for block in other.blocks]:
            raise InputError("Curvatures of different layers do not merge: fit both with the same model and weights.")
        if any(not _same(a.chosen, b.chosen) for a, b in zip(self.blocks, other.blocks, strict=True)):
            raise InputError("Curvatures of different subnetworks do not merge: fit both with the same weights.")
        for left, right in zip(self.blocks, other.blocks, strict=True):
            if _form(left) != _form(right):
                raise InputError(
                    f"The two curvatures keep {left.name!r} in different forms ({_form(left)}, {_form(right)}), so "
                    "they do not merge. Fit both with the same max_dense, max_factor and rank."
                )
        blocks = tuple(
            replace(left, accumulator=left.accumulator.merge(right.accumulator))
            for left, right in zip(self.blocks, other.blocks, strict=True)
        )
        gradient = {name: value + other.gradient[name] for name, value in self.gradient.items()}
        return replace(
            self,
            blocks=blocks,
            statistics=self.statistics + other.statistics,
            gradient=gradient,
            traces=self.traces + other.traces,
        )

    def scale(self, factor: float) -> Curvature:
        """All sums times a factor: 1/M turns M passes over a data set into their average."""
        blocks = tuple(replace(block, accumulator=block.accumulator.scale(factor)) for block in self.blocks)
        gradient = {name: value * factor for name, value in self.gradient.items()}
        return replace(
            self,
            blocks=blocks,
            statistics=self.statistics.scale(factor),
            gradient=gradient,
            traces=self.traces.scale(factor),
        )

    def to(self, device: torch.device) -> Curvature:
        blocks = tuple(replace(block, accumulator=block.accumulator.to(device)) for block in self.blocks)
        return replace(self, blocks=blocks, gradient={name: g.to(device) for name, g in self.gradient.items()})


def _form(block: Block) -> tuple[str, dict[str, list[int]]]:
    return block.accumulator.kind, {key: list(value.shape) for key, value in block.accumulator.tensors().items()}


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)
