"""Per-example gradients of one layer, in the form in which the tape delivers them.

`Pair` is `(a, g)`: the gradient of example n for backpropagated vector k is `Σ_r g_knr a_nrᵀ`. `TokenPair` is the
same for embeddings, where a is one-hot. `Uses` adds up several that do not read alike. `Rows` holds the gradients
themselves, for parameters without a Kronecker form. All count the parameters of a layer in the same order:
row-major `[Q, O, I]`, with the bias as the last input, which is always 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.layers.rule import Layout
from lapwing.layers.window import Images
from lapwing.matmul import squares_of_products, times
from lapwing.tokens import TokenPair, Tokens


@dataclass(frozen=True)
class Layer:
    """A set of parameters that the structures treat together.

    `shape` is (Q, O, I) with the bias counted in I where the layer has a Kronecker form, and None where
    it comes as rows. `path` says how its per-example gradients are computed. `layout` is how its weight reads as
    `[Q, O, I]`, None if in its own order. `form` is "pair", "tokens" (O is a vocabulary, and its side of the
    curvature diagonal), "tied" (both kinds of use) or "rows".
    """

    name: str
    parameters: tuple[str, ...]
    sizes: tuple[torch.Size, ...]
    shape: tuple[int, int, int] | None
    path: str
    layout: Layout | None = None
    form: str = "pair"

    @property
    def size(self) -> int:
        return sum(size.numel() for size in self.sizes)

    def pack(self, values: dict[str, Tensor]) -> Tensor:
        """Parameters by name, each `[*lead, *size]`, to the layer's own layout `[*lead, p]`."""
        parts = [
            values[name].flatten(values[name].dim() - len(size)) if size else values[name].unsqueeze(-1)
            for name, size in zip(self.parameters, self.sizes, strict=True)
        ]
        if self.layout is not None:
            weight = values[self.parameters[0]]
            parts[0] = self.layout.canonical(weight, weight.dim() - len(self.sizes[0]))
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
        if self.layout is not None:
            parts = (self.layout.own(parts[0]), *parts[1:])
        return {
            name: part.reshape((*vector.shape[:-1], *size))
            for name, size, part in zip(self.parameters, self.sizes, parts, strict=True)
        }


@dataclass(frozen=True)
class UseInputs:
    """The inputs `a: [N, Q, R, I]` of one use, unfolded only for the examples asked for; of the layer's `groups`."""

    read: Callable[[slice], Tensor]
    read_images: Callable[[slice], Images | None]
    groups: range | None = None

    def times(self, part: slice, matrix: Tensor) -> Tensor:
        """`a M` of some examples for a matrix `[Q, I, J]`: `[n, Q, R, J]`."""
        images = self.read_images(part)
        if images is None:
            return times(self.read(part).to(matrix.dtype), matrix)
        found: Tensor = images.times(matrix).unflatten(0, (part.stop - part.start, -1))  # [n, k, Q, positions, J]
        return found[:, 0] if found.shape[1] == 1 else found.transpose(1, 2).flatten(2, 3)


@dataclass(frozen=True)
class Inputs:
    """The inputs of all uses of a layer, of the examples from `first` on."""

    uses: tuple[UseInputs | Tokens, ...]
    examples: int
    bias: bool
    first: int = 0

    def of(self, examples: range) -> Inputs:
        """Those of some examples alone."""
        return replace(self, examples=len(examples), first=self.first + examples.start)

    def part(self, start: int, stop: int) -> Tensor:
        """`[n, Q, R, I]`, the positions of all uses side by side; the bias is not a column here."""
        parts = [use.read(self._slice(start, stop)) for use in self.uses if isinstance(use, UseInputs)]
        assert len(parts) == len(self.uses)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def by_example(self, start: int, stop: int) -> Tensor:
        """The same; where they are patches of images, those of an example lie together in memory."""
        use = self.uses[0]
        if len(self.uses) > 1 or not isinstance(use, UseInputs):
            return self.part(start, stop)
        images = use.read_images(self._slice(start, stop))
        return self.part(start, stop) if images is None or len(images.x) > stop - start else images.patches()

    def times(self, start: int, stop: int, matrix: Tensor) -> Tensor:
        """`a M` of some examples for a matrix `[Q, I, J]`, the bias included: `[n, Q, R, J]`."""
        weight = matrix[:, :-1] if self.bias else matrix
        parts = [use.times(self._slice(start, stop), weight) for use in self.uses if isinstance(use, UseInputs)]
        assert len(parts) == len(self.uses)
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return found.add_(matrix[:, None, -1]) if self.bias else found

    def _slice(self, start: int, stop: int) -> slice:
        return slice(self.first + start, self.first + stop)

    def together(self) -> UseInputs:
        """All uses as one."""
        return UseInputs(lambda part: self.part(part.start, part.stop), lambda _: None)


@dataclass(frozen=True)
class Pair:
    """`a: [N, Q, R, I]` (lazy) and `g: [K, N, Q, R, O]`, for columns `column` and on, examples `start` and on, of the
    layer's `groups`.
    """

    inputs: Inputs
    g: Tensor
    column: int = 0
    start: int = 0
    groups: range | None = None

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
        weight = outer(g, a.to(g.dtype))
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


@dataclass(frozen=True)
class Uses:
    """Several uses of one weight that do not read alike; their gradients add up. `shape` is the layer's (Q, O, I)."""

    parts: tuple[Pair | TokenPair, ...]
    shape: tuple[int, int, int]
    start: int = 0

    @property
    def column(self) -> int:
        return self.parts[0].column

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    @property
    def examples(self) -> int:
        return self.parts[0].examples

    def rows(self, start: int, stop: int) -> Tensor:
        """`[K, n, Q, O, I]`."""
        return torch.stack([self.whole(part, part.rows(start, stop)) for part in self.parts]).sum(0)

    def whole(self, part: Pair | TokenPair, values: Tensor) -> Tensor:
        """Values of a part's own groups `[*lead, q, O, I]` among zeros for the others: `[*lead, Q, O, I]`."""
        if isinstance(part, TokenPair) or part.groups is None:
            return values
        before, after = part.groups.start, self.shape[0] - part.groups.stop
        return torch.nn.functional.pad(values, (0, 0, 0, 0, before, after))

    def contract(self, vector: Tensor) -> Tensor:
        """Inner product of each gradient with one vector `[p]` of the layer: `[K, N]`."""
        groups = vector.unflatten(0, self.shape)
        total = torch.zeros(self.columns, self.examples, dtype=vector.dtype, device=vector.device)
        for part in self.parts:
            own = groups if isinstance(part, TokenPair) or part.groups is None else groups[list(part.groups)]
            total = total + part.contract(own.flatten())
        return total


Gradients = Pair | TokenPair | Uses | Rows


def outer(g: Tensor, a: Tensor) -> Tensor:
    """`Σ_r g_knr a_nrᵀ`: `[K, n, Q, O, I]` from `g: [K, n, Q, R, O]` and `a: [n, Q, R, I]`."""
    if not _side_by_side(g):
        return torch.stack([column.mT @ a for column in g]) if len(g) > 1 else (g[0].mT @ a).unsqueeze(0)
    formed: Tensor = (_by_example(g) @ a[:, 0]).unflatten(1, (len(g), -1)).transpose(0, 1)
    return formed.unsqueeze(2)


def outer_squares(g: Tensor, a: Tensor, budget: int) -> Tensor:
    """`Σ_kn (Σ_r g_knr a_nrᵀ)²`: `[Q, O, I]`; formed one by one, or as many examples as `budget` bytes hold."""
    together = _side_by_side(g)
    if g.shape[2] == 1:
        found = [squares_of_products(_by_example(own), a[:, 0]) for own in ((g,) if together else g.split(1))]
        squares = [own.unflatten(0, (-1, g.shape[4])).sum(0) for own in found if own is not None]
        if squares:  # all columns are alike
            return torch.stack(squares).sum(0, keepdim=True)
    size = g.shape[2] * g.shape[4] * a.shape[3] * a.element_size() * (g.shape[0] if together else 1)
    step = max(1, budget // size)
    total = a.new_zeros(g.shape[2], g.shape[4], a.shape[3])
    for start in range(0, len(a), step):
        inputs, own = a[start : start + step], g[:, start : start + step]
        for columns in (own,) if together else own.split(1):
            total += outer(columns, inputs).square_().sum((0, 1))
    return total


def _by_example(g: Tensor) -> Tensor:
    """`[n, K·O, R]` of `g: [K, n, 1, R, O]`: a view where the columns of an example lie side by side."""
    return g[:, :, 0].permute(1, 0, 3, 2).flatten(1, 2)


def _side_by_side(g: Tensor) -> bool:
    """Whether the columns of an example are in memory, so that they take one product; else they would be copied."""
    columns, _, groups, _, outputs = g.shape
    return groups == 1 and columns > 1 and g.stride(0) == outputs * g.stride(4)


def total(gradients: Gradients, budget: int) -> Tensor:
    """The gradients summed over the examples: `[K, p]`."""
    if isinstance(gradients, Rows):
        return gradients.values.sum(1)
    if isinstance(gradients, TokenPair):
        return gradients.total()
    if isinstance(gradients, Uses):
        wide = [total(part, budget).unflatten(1, _own_shape(part, gradients.shape)) for part in gradients.parts]
        whole = [gradients.whole(part, values) for part, values in zip(gradients.parts, wide, strict=True)]
        return torch.stack(whole).sum(0).flatten(1)
    each = gradients.inputs.part(0, 1).numel()
    sums: Tensor | None = None
    for start, stop in parts(gradients, each, budget // 4):
        a, g = gradients.inputs.part(start, stop), gradients.g[:, start:stop]
        weight = torch.einsum("knqro,nqri->kqoi", g, a.to(g.dtype))
        if gradients.inputs.bias:
            weight = torch.cat([weight, g.sum((1, 3)).unsqueeze(-1)], dim=-1)
        sums = weight.flatten(1) if sums is None else sums + weight.flatten(1)
    assert sums is not None
    return sums


def rows_at(gradients: Gradients, elements: Tensor, size: int, budget: int) -> Tensor:
    """The gradients at some of the layer's `size` parameters, `elements: [k]`: `[K, N, k]`.

    With one position per example only those are computed; else a few examples at a time are, and cut down.
    """
    if isinstance(gradients, Pair) and gradients.positions == 1 and gradients.groups is None:
        a = gradients.inputs.part(0, gradients.examples).squeeze(2).to(gradients.g.dtype)
        if gradients.inputs.bias:
            a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1)
        outputs, inputs = gradients.g.shape[4], a.shape[-1]
        left, column = elements // inputs, elements % inputs
        return gradients.g[:, :, left // outputs, 0, left % outputs] * a[:, left // outputs, column]
    found = [
        gradients.rows(start, stop).reshape(gradients.columns, stop - start, -1)[..., elements]
        for start, stop in parts(gradients, size, budget)
    ]
    return torch.cat(found, dim=1)


def _own_shape(part: Pair | TokenPair, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    groups = None if isinstance(part, TokenPair) else part.groups
    return shape if groups is None else (len(groups), *shape[1:])


def dense(gradient: Tensor) -> Tensor:
    """Gradients of embeddings with `sparse=True` are sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def parts(gradients: Gradients, elements: int, budget: int) -> Iterator[tuple[int, int]]:
    """Ranges of examples such that K·n·elements numbers stay below `budget` bytes."""
    each = max(1, gradients.columns * elements * _element_size(gradients))
    step = max(1, math.floor(budget / each))
    for start in range(0, gradients.examples, step):
        yield start, min(start + step, gradients.examples)


def _element_size(gradients: Gradients) -> int:
    if isinstance(gradients, Uses):
        return _element_size(gradients.parts[0])
    return (gradients.values if isinstance(gradients, Rows) else gradients.g).element_size()
