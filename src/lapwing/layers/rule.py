"""What a kind of layer must say about itself to be read as `(a, g)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


def tolerance(dtype: torch.dtype) -> float:
    """How far two ways to compute a thing may differ, relative to its size.

    Many networks in float64 still compute norms, rotations and positions in float32.
    """
    return max(math.sqrt(torch.finfo(dtype).eps), 1e-5)


@dataclass(frozen=True)
class Call:
    """One call of a layer's function, as its rule read it."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    options: dict[str, Any]


@dataclass(frozen=True)
class ExampleAxis:
    """Where the examples are in a tensor: along `axis`, of size N·k, as `[N, k]` or (inner) `[k, N]`."""

    axis: int
    inner: bool = False

    def first(self, x: Tensor, examples: int, skip: int = 0) -> Tensor:
        """Move the examples of `[*skip, ..., N·k, ...]` to the front: `[*skip, N, k, ...]`."""
        x = x.movedim(self.axis + skip, skip)
        others = x.shape[skip] // examples
        if self.inner:
            return torch.unflatten(x, skip, (others, examples)).transpose(skip, skip + 1)
        return torch.unflatten(x, skip, (examples, others))


@dataclass(frozen=True)
class Moments:
    """Sums over examples and positions: `Σ a aᵀ: [Q, I, I]`, `Σ a: [Q, I]` and how many `a` there were."""

    products: Tensor
    sums: Tensor
    count: int


def moments_of(a: Tensor) -> Moments:
    """The moments of `a: [n, Q, R, I]`."""
    flat = a.permute(1, 3, 0, 2).flatten(2)  # [Q, I, n·R]
    return Moments(flat @ flat.mT, flat.sum(2), flat.shape[2])


class Rule(Protocol):
    """How calls of one kind of layer read in the canonical layout.

    Q: groups that do not share weights, R: positions that share a weight, I inputs, O outputs.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]

    def read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Bind the arguments of the call."""

    def shape(self, call: Call) -> tuple[int, int, int]:
        """(Q, O, I) of the weight, the bias not counted."""

    def example_axes(self, call: Call, output: torch.Size) -> range:
        """The dimensions of the output that may hold the examples."""

    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        """`a` of the examples in `part`: `[n, Q, R, I]`."""

    def moments(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Moments:
        """First and second moments of `a`, without `a` itself where there is a cheaper way."""

    def gradients(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        """Gradients at the output `[K, *output]` as `g`: `[K, N, Q, R, O]`."""
