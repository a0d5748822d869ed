"""Vectors in output space to backpropagate, made a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """K vectors per example, `[K, N, *output]` in all; `part(i, j)` makes those from i to j."""

    count: int
    part: Callable[[int, int], Tensor]


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
