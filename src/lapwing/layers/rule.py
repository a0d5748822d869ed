"""What a kind of layer must say about itself to be read as `(a, g)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


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

    def example_axes(self, output: Tensor) -> range:
        """The dimensions of the output that may hold the examples."""

    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        """`a` of the examples in `part`: `[n, Q, R, I]`."""

    def gradients(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        """Gradients at the output `[K, *output]` as `g`: `[K, N, Q, R, O]`."""
