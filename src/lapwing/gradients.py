"""Per-example gradients of one layer, in the form in which the tape delivers them.

`Pair` is `(a, g)`: the gradient of example n for backpropagated vector k is `Σ_r g_knr a_nrᵀ`.
`Rows` holds the gradients themselves, for parameters that no rule reads as a pair.
Both count the parameters of a layer in the same order: row-major `[Q, O, I]`, with the bias as the
last input, which is always 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.layers.rule import Moments


@dataclass(frozen=True)
class Layer:
    """A set of parameters that the structures treat together.

    `shape` is (Q, O, I) with the bias counted in I where the layer is read as a pair, and None where
    it comes as rows. `path` says how its per-example gradients are computed.
    """

    name: str
    parameters: tuple[str, ...]
    sizes: tuple[torch.Size, ...]
    shape: tuple[int, int, int] | None
    path: str

    @property
    def size(self) -> int:
        return sum(size.numel() for size in self.sizes)

    def pack(self, values: dict[str, Tensor]) -> Tensor:
        """Parameters by name, each `[*lead, *size]`, to the layer's own layout `[*lead, p]`."""
        parts = [
            values[name].flatten(values[name].dim() - len(size)) if size else values[name].unsqueeze(-1)
            for name, size in zip(self.parameters, self.sizes, strict=True)
        ]
        if self.shape is None or len(parts) == 1:
            return torch.cat(parts, dim=-1)
        groups, outputs, _ = self.shape
        weight, bias = (part.unflatten(-1, (groups * outputs, -1)) for part in parts)
        return torch.cat([weight, bias], dim=-1).flatten(-2)

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`: `[*lead, p]` to parameters by name."""
        if self.shape is None or len(self.parameters) == 1:
            parts = vector.split([size.numel() for size in self.sizes], dim=-1)
        else:
            groups, outputs, inputs = self.shape
            matrix = vector.unflatten(-1, (groups * outputs, inputs))
            parts = (matrix[..., :-1].flatten(-2), matrix[..., -1])
        return {
            name: part.reshape((*vector.shape[:-1], *size))
            for name, size, part in zip(self.parameters, self.sizes, parts, strict=True)
        }


@dataclass(frozen=True)
class Inputs:
    """The inputs `a: [N, Q, R, I]` of a layer, unfolded only for the examples asked for."""

    read: tuple[Callable[[slice], Tensor], ...]
    read_moments: tuple[Callable[[slice], Moments], ...]
    examples: int
    bias: bool

    def part(self, start: int, stop: int) -> Tensor:
        """`[n, Q, R, I]`, the positions of all uses side by side; the bias is not a column here."""
        parts = [read(slice(start, stop)) for read in self.read]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def moments(self, start: int, stop: int) -> list[Moments]:
        """The moments of `a`, one for each use."""
        return [read(slice(start, stop)) for read in self.read_moments]


@dataclass(frozen=True)
class Pair:
    """`a: [N, Q, R, I]` (lazy) and `g: [K, N, Q, R, O]`, for columns `column` and on."""

    inputs: Inputs
    g: Tensor
    column: int = 0
    start: int = 0

    @property
    def columns(self) -> int:
        return self.g.shape[0]

    @property
    def examples(self) -> int:
        return self.g.shape[1]

    @property
    def positions(self) -> int:
        return self.g.shape[3]

    def rows(self, start: int, stop: int) -> Tensor:
        """The gradients themselves of some examples: `[K, n, Q, O, I]`, the bias as last input."""
        a, g = self.inputs.part(start, stop), self.g[:, start:stop]
        weight = torch.einsum("knqro,nqri->knqoi", g, a.to(g.dtype))
        if not self.inputs.bias:
            return weight
        return torch.cat([weight, g.sum(3).unsqueeze(-1)], dim=-1)

    def contract(self, vector: Tensor) -> Tensor:
        """Inner product of each gradient with one vector `[p]` of the layer: `[K, N]`."""
        matrix = vector.unflatten(0, (self.g.shape[2], self.g.shape[4], -1))
        weight = matrix[..., :-1] if self.inputs.bias else matrix
        change = torch.einsum("nqri,qoi->nqro", self.inputs.part(0, self.examples), weight)
        if self.inputs.bias:
            change = change + matrix[..., -1].unsqueeze(1)
        return torch.einsum("knqro,nqro->kn", self.g, change)


@dataclass(frozen=True)
class Rows:
    """Gradients of columns `column` and on, examples `start` and on: `values: [K, n, p]`."""

    values: Tensor
    column: int = 0
    start: int = 0

    @property
    def columns(self) -> int:
        return self.values.shape[0]

    @property
    def examples(self) -> int:
        return self.values.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        return self.values[:, start:stop]

    def contract(self, vector: Tensor) -> Tensor:
        """Inner product of each gradient with one vector `[p]`: `[K, n]`."""
        return self.values @ vector


Gradients = Pair | Rows


def parts(gradients: Gradients, elements: int, budget: int) -> Iterator[tuple[int, int]]:
    """Ranges of examples such that K·n·elements numbers stay below `budget` bytes."""
    element_size = (gradients.g if isinstance(gradients, Pair) else gradients.values).element_size()
    each = max(1, gradients.columns * elements * element_size)
    step = max(1, math.floor(budget / each))
    for start in range(0, gradients.examples, step):
        yield start, min(start + step, gradients.examples)
