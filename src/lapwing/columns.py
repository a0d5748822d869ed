"""Vectors in output space to backpropagate, made a few at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """K vectors per example, `[K, N, *output]` in all; `part(i, j)` makes those from i to j."""

    count: int
    part: Callable[[int, int], Tensor]
    slope: Tensor | None = None
    """Where given, `[N]`: `∇_f log p` of example n is so many times its first column."""


def given(columns: Tensor) -> Columns:
    """Columns that exist already: `[K, N, *output]`."""
    return Columns(columns.shape[0], lambda start, stop: columns[start:stop])


def diagonal(entries: Tensor) -> Columns:
    """One column per output that is `entries` `[N, *output]` there and 0 elsewhere."""
    flat = entries.reshape(entries.shape[0], -1)

    def part(start: int, stop: int) -> Tensor:
        columns = flat.new_zeros(stop - start, *flat.shape)
        index = torch.arange(start, stop, device=flat.device)
        columns[index - start, :, index] = flat[:, start:stop].T
        return columns.unflatten(2, entries.shape[1:]) if entries.dim() > 1 else columns.squeeze(2)

    return Columns(flat.shape[1], part)


def identity(outputs: Tensor) -> Columns:
    """The unit vectors of output space, for the rows of the Jacobian."""
    return diagonal(torch.ones_like(outputs.detach()))


def random_signs(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """−1 or 1 with equal probability, independently: `[*shape]`, as int8 on the device of `like`."""
    drawn = torch.randint(2, tuple(shape), generator=generator, dtype=torch.int8, device=like.device)
    return 2 * drawn - 1


def signed(entries: Tensor, generator: torch.Generator | None) -> Columns:
    """One column, the sum of those of `diagonal(entries)` with random signs: outer products have the same mean."""
    return given((entries * random_signs(entries.shape, entries, generator)).unsqueeze(0))


def averaged(draws: Sequence[Columns]) -> Columns:
    """All columns of several draws, over √S: their outer products are the mean of those of the S draws."""
    size = draws[0].count

    def part(start: int, stop: int) -> Tensor:
        pieces = [
            draws[i].part(max(start - i * size, 0), min(stop - i * size, size))
            for i in range(start // size, (stop - 1) // size + 1)
        ]
        return torch.cat(pieces) / math.sqrt(len(draws))

    return Columns(len(draws) * size, part)


def side_by_side(batches: Sequence[Columns]) -> Columns:
    """The columns of the examples of several batches, each with as many."""
    if len(batches) == 1:
        return batches[0]
    return Columns(batches[0].count, lambda start, stop: torch.cat([own.part(start, stop) for own in batches], dim=1))
