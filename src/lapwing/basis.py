"""Bases in which a block of the curvature is diagonal, and per-example gradients in their coordinates.

`U` has `Uᵀ H U = diag(s)`; coordinates of a gradient g are `Uᵀ g`. Everything a posterior needs is
elementwise there: with `D = 1/(T s/σ² + λ)`, the variance of an output is `Σ (Uᵀ g)² D`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing import position_pairs, single_positions
from lapwing.gradients import Gradients, Pair, Uses, outer, outer_squares, parts
from lapwing.matmul import matmul, times
from lapwing.tokens import Segments, TokenPair


@dataclass(frozen=True)
class Scaling:
    """A diagonal side of a basis: `values: [..., d]`."""

    values: Tensor


Side = Tensor | Scaling | None  # one side of a basis: a matrix [..., d, d], a scaling, or the identity


class Basis(ABC):
    """A basis U of one block with p parameters; `shape` is that of its coordinates."""

    shape: tuple[int, ...]

    @abstractmethod
    def coordinates(self, gradients: Gradients, start: int, stop: int) -> Tensor:
        """`Uᵀ g` for examples `start` to `stop`: `[K, n, *shape]`."""

    @abstractmethod
    def expand(self, coordinates: Tensor) -> Tensor:
        """`U z`: `[*lead, *shape]` to `[*lead, p]`."""

    @abstractmethod
    def reduce(self, vector: Tensor) -> Tensor:
        """`Uᵀ v`: `[*lead, p]` to `[*lead, *shape]`."""

    @abstractmethod
    def marginal(self, scale: Tensor) -> Tensor:
        """The diagonal of `U diag(scale) Uᵀ`: `[p]`."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Basis:
        """The same basis in another dtype."""

    def squares(self, gradients: Gradients, budget: int) -> Tensor:
        """`Σ_kn (Uᵀ g_kn)²`: `[*shape]`."""
        return _sum(self.coordinates(gradients, *part).square().sum((0, 1)) for part in self._parts(gradients, budget))

    def variance(self, gradients: Gradients, scale: Tensor, budget: int) -> Tensor:
        """`g_knᵀ U diag(scale) Uᵀ g_kn`: `[K, n]`."""
        flat = scale.flatten()
        return torch.cat(
            [self.coordinates(gradients, *part).flatten(2).square() @ flat for part in self._parts(gradients, budget)],
            dim=1,
        )

    def covariance(self, gradients: Gradients, scale: Tensor, budget: int) -> Tensor:
        """`g_knᵀ U diag(scale) Uᵀ g_ln`: `[n, K, K]`."""
        root = scale.sqrt()
        covariances = []
        for part in self._parts(gradients, budget):
            rows = (self.coordinates(gradients, *part) * root).flatten(2).transpose(0, 1)
            covariances.append(rows @ rows.mT)
        return torch.cat(covariances)

    def joint(self, gradients: Gradients, scale: Tensor, budget: int) -> Tensor:
        """`g_knᵀ U diag(scale) Uᵀ g_lm` between all examples: `[N·K, N·K]`."""
        rows = (self.coordinates(gradients, 0, gradients.examples) * scale.sqrt()).flatten(2)
        rows = rows.transpose(0, 1).flatten(0, 1)
        return rows @ rows.mT

    def _parts(self, gradients: Gradients, budget: int) -> list[tuple[int, int]]:
        size = torch.Size(self.shape).numel()
        return list(parts(gradients, 2 * size, budget))


@dataclass(frozen=True)
class KroneckerBasis(Basis):
    """`U_G ⊗ U_A` for a layer read as `(a, g)`, one per group: sides `[Q, O, ·]` and `[Q, I, ·]`.

    With both sides the identity this is the basis of a diagonal approximation.
    """

    shape: tuple[int, int, int]
    output: Side = None
    input: Side = None
    orthonormal: tuple[bool, bool] = (True, True)
    """Whether the output and the input side are, as they are unless the prior has a shape there."""

    def coordinates(self, gradients: Gradients, start: int, stop: int) -> Tensor:
        if isinstance(gradients, Uses):
            found = [gradients.whole(part, self._of(part).coordinates(part, start, stop)) for part in gradients.parts]
            return torch.stack(found).sum(0)
        if not isinstance(gradients, Pair):
            return self.reduce(gradients.rows(start, stop).flatten(2))
        if self._rotates_first(gradients):
            return outer(*self._rotated(gradients, start, stop))
        return self.reduce(gradients.rows(start, stop).flatten(2))

    def _rotates_first(self, pair: Pair) -> bool:
        """Whether it is less work to rotate (a, g) and then form the matrix than to form it and then rotate."""
        _, outputs, inputs = self.shape
        left = outputs if isinstance(self.output, Tensor) else 1
        right = inputs if isinstance(self.input, Tensor) else 1
        rotate_first = pair.positions * (outputs * left + inputs * right / pair.columns)  # per example and column
        return rotate_first <= outputs * inputs * (left + right)

    def output_variance(self, a: Tensor, scale: Tensor) -> Tensor:
        """Variances of the outputs `W a` of a layer of one group under this basis, `a: [N, I]`: `[N, O]`.

        `Var_no = Σ_j U_oj² w_nj` with `w = â² Dᵀ`; no more is formed than the basis itself has.
        """
        if isinstance(self.input, Scaling):
            a = a * self.input.values[0]
        elif self.input is not None:
            a = matmul(a, self.input[0])
        weights = matmul(a.square(), scale[0].T)
        if self.output is None:
            return weights
        if isinstance(self.output, Scaling):
            return weights * self.output.values[0].square()
        return torch.cat([matmul(weights, rows.square().T) for rows in self.output[0].split(1024)], dim=1)

    def _of(self, part: Pair | TokenPair) -> KroneckerBasis:
        """The basis of the groups that a part has."""
        if isinstance(part, TokenPair) or part.groups is None:
            return self
        groups = slice(part.groups.start, part.groups.stop)
        sides = [
            Scaling(side.values[groups]) if isinstance(side, Scaling) else None if side is None else side[groups]
            for side in (self.output, self.input)
        ]
        return replace(self, shape=(len(part.groups), *self.shape[1:]), output=sides[0], input=sides[1])

    def _rotated(self, pair: Pair, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """`ĝ = g U_G: [K, n, Q, R, O]` and `â = a U_A: [n, Q, R, I]`, the bias included."""
        g, inputs = self._rotate_outputs(pair.g[:, start:stop]), pair.inputs
        if isinstance(self.input, Tensor):
            return g, inputs.times(start, stop, self.input)
        return g, self._rotate_inputs(inputs.part(start, stop).to(g.dtype), inputs.bias)

    def rotate(self, g: Tensor, a: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
        """`ĝ = g U_G` and `â = a U_A`; where there is a `bias`, â is that of `(a, 1)`."""
        return self._rotate_outputs(g), self._rotate_inputs(a.to(g.dtype), bias)

    def _rotate_outputs(self, g: Tensor) -> Tensor:
        if self.output is None:
            return g
        if isinstance(self.output, Scaling):
            return g * self.output.values.unsqueeze(1)
        if g.shape[2] == 1 and g.shape[3] >= _IMAGE and g.stride(3) == 1 and g.stride(1) > g.stride(0):
            return _rotate_images(g[:, :, 0], self.output[0]).unsqueeze(2)
        if g.shape[2] == 1 and g.stride(4) == 1 and g.stride(0) == g.shape[4]:  # columns side by side at every position
            pixels = g.permute(1, 2, 3, 0, 4)  # [n, 1, R, K, O]
            return times(pixels.flatten(0, 1), self.output).unsqueeze(1).permute(3, 0, 1, 2, 4)
        return times(g, self.output)

    def _rotate_inputs(self, a: Tensor, bias: bool) -> Tensor:
        side = self.input
        if not isinstance(side, Tensor):
            a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1) if bias else a
            return a if side is None else a * side.values.unsqueeze(1)
        rotated = times(a, side[:, :-1] if bias else side)
        return rotated + side[:, None, -1] if bias else rotated

    def expand(self, coordinates: Tensor) -> Tensor:
        matrix = _apply(coordinates, self.output, "...qoi,qpo->...qpi", "...qoi,qo->...qoi")
        return _apply(matrix, self.input, "...qoi,qji->...qoj", "...qoi,qi->...qoi").flatten(-3)

    def reduce(self, vector: Tensor) -> Tensor:
        matrix = _apply(vector.unflatten(-1, self.shape), self.output, "...qoi,qop->...qpi", "...qoi,qo->...qoi")
        return _apply(matrix, self.input, "...qoi,qij->...qoj", "...qoi,qi->...qoi")

    def marginal(self, scale: Tensor) -> Tensor:
        squared = KroneckerBasis(self.shape, _square(self.output), _square(self.input))
        return squared.expand(scale)

    def to(self, dtype: torch.dtype) -> KroneckerBasis:
        return replace(self, output=_to(self.output, dtype), input=_to(self.input, dtype))

    def squares(self, gradients: Gradients, budget: int) -> Tensor:
        if isinstance(gradients, TokenPair) and not isinstance(self.output, Tensor):
            return self._picked(gradients).squares(self.shape[1])
        if not isinstance(gradients, Pair):
            return super().squares(gradients, budget)
        if _by_pairs(gradients):
            return _sum(
                position_pairs.squares(*self._rotated(gradients, *part)) for part in self._chunks(gradients, budget)
            )
        close = min(budget, _CACHE)
        groups, outputs, inputs = self.shape
        if gradients.positions > 1 and self.output is None and self.input is None:
            each = math.ceil(groups * gradients.positions * inputs / gradients.columns)  # columns share the inputs
            chunks = parts(gradients, each, min(budget, _ROTATED))
            return _sum(_unrotated_squares(gradients, *part, close) for part in chunks)
        if gradients.positions > 1 and self._rotates_first(gradients):
            size = groups * gradients.positions * (outputs + math.ceil(inputs / gradients.columns))
            chunks = parts(gradients, size, min(budget, _ROTATED))
            return _sum(outer_squares(*self._rotated(gradients, *part), close) for part in chunks)
        if gradients.positions > 1:  # in place, as nobody else has these coordinates
            return _sum(
                self.coordinates(gradients, *part).square_().sum((0, 1)) for part in self._parts(gradients, close)
            )
        g, a = self._rotated(gradients, 0, gradients.examples)
        return torch.einsum("nqo,nqi->qoi", g.squeeze(3).square().sum(0), a.squeeze(2).square())

    def variance(self, gradients: Gradients, scale: Tensor, budget: int) -> Tensor:
        if isinstance(gradients, TokenPair) and not isinstance(self.output, Tensor):
            return self._picked(gradients).variance(scale[0])
        if isinstance(gradients, Pair) and _by_pairs(gradients):
            chunks = [self._rotated(gradients, *part) for part in self._chunks(gradients, budget)]
            return torch.cat([position_pairs.variance(g, a, scale) for g, a in chunks], dim=1)
        if not isinstance(gradients, Pair) or gradients.positions > 1:
            return super().variance(gradients, scale, budget)
        return single_positions.variance(self, gradients, scale)

    def covariance(self, gradients: Gradients, scale: Tensor, budget: int) -> Tensor:
        if isinstance(gradients, TokenPair) and not isinstance(self.output, Tensor):
            return self._picked(gradients).covariance(scale[0])
        if isinstance(gradients, Pair) and _by_pairs(gradients):
            chunks = [self._rotated(gradients, *part) for part in self._chunks(gradients, budget)]
            return torch.cat([position_pairs.covariance(g, a, scale) for g, a in chunks])
        if not isinstance(gradients, Pair) or gradients.positions > 1:
            return super().covariance(gradients, scale, budget)
        return single_positions.covariance(self, gradients, scale)

    def _chunks(self, pair: Pair, budget: int) -> list[tuple[int, int]]:
        """Ranges of examples whose products between positions fit into the budget."""
        groups, outputs, inputs = self.shape
        size = groups * pair.positions**2 * (outputs + inputs)
        return list(parts(pair, max(1, size // pair.columns), min(budget, _GATHERED)))

    def _picked(self, pair: TokenPair) -> Segments:
        """The coordinates of an embedding's gradients at the rows that are not 0."""
        found = pair.segments(0, pair.examples)
        values = found.values
        if isinstance(self.output, Scaling):
            values = values * self.output.values[0, found.row].unsqueeze(-1)
        if isinstance(self.input, Scaling):
            values = values * self.input.values[0]
        elif self.input is not None:
            values = values @ self.input[0]
        return replace(found, values=values)

    def joint(self, gradients: Gradients, scale: Tensor, budget: int) -> Tensor:
        if isinstance(gradients, TokenPair) and not isinstance(self.output, Tensor):
            return self._picked(gradients).joint(scale[0])
        if not isinstance(gradients, Pair):
            return super().joint(gradients, scale, budget)
        g, a = self._rotated(gradients, 0, gradients.examples)
        root = scale.sqrt()
        total = g.new_zeros((g.shape[0] * g.shape[1],) * 2)
        outputs = max(1, budget // (2 * g.shape[0] * g.shape[1] * g.shape[2] * a.shape[3] * g.element_size()))
        for first in range(0, g.shape[4], outputs):
            part = slice(first, first + outputs)
            rows = torch.einsum("knqro,nqri->nkqoi", g[..., part], a) * root[:, part]
            rows = rows.flatten(2).flatten(0, 1)
            total = total + rows @ rows.mT
        return total


_IMAGE = 32  # positions from which a product for every image is as quick as one large product
_CACHE = 2**22  # bytes that stay close to the processor, as what is elementwise on large arrays should
_ROTATED = 2**24  # bytes of inputs and gradients that are rotated together
_GATHERED = 2**26  # bytes of products between positions, of which each is used once


def _by_pairs(pair: Pair) -> bool:
    """Whether products between the positions of an example are fewer than those between positions and columns."""
    return pair.positions > 1 and pair.positions + 1 < 2 * pair.columns


@dataclass(frozen=True)
class DenseBasis(Basis):
    """Any basis of a block of p parameters: a matrix `[p, p]`, a scaling `[p]`, or the identity."""

    shape: tuple[int]
    vectors: Side = None

    def coordinates(self, gradients: Gradients, start: int, stop: int) -> Tensor:
        return self.reduce(gradients.rows(start, stop).reshape(gradients.columns, stop - start, -1))

    def expand(self, coordinates: Tensor) -> Tensor:
        return _apply(coordinates, self.vectors, "...i,ji->...j", "...i,i->...i")

    def reduce(self, vector: Tensor) -> Tensor:
        return _apply(vector, self.vectors, "...i,ij->...j", "...i,i->...i")

    def marginal(self, scale: Tensor) -> Tensor:
        return DenseBasis(self.shape, _square(self.vectors)).expand(scale)

    def to(self, dtype: torch.dtype) -> DenseBasis:
        return DenseBasis(self.shape, _to(self.vectors, dtype))


def _unrotated_squares(pair: Pair, start: int, stop: int, budget: int) -> Tensor:
    """`Σ_kn (Σ_r g_knr a_nrᵀ)²` of some examples: `[Q, O, I]`; the bias, whose input is 1, apart."""
    g = pair.g[:, start:stop]
    weight = outer_squares(g, pair.inputs.by_example(start, stop).to(g.dtype), budget)
    if not pair.inputs.bias:
        return weight
    return torch.cat([weight, g.sum(3).square().sum((0, 1)).unsqueeze(-1)], dim=-1)


def _rotate_images(g: Tensor, side: Tensor) -> Tensor:
    """`g U` of `g: [K, n, R, O]` that lies in memory as `[n, K, O, R]`, and so does what is returned: no copy."""
    columns, examples = g.shape[:2]
    images = g.transpose(0, 1).mT.flatten(0, 1)  # [n·K, O, R]
    rotated: Tensor = torch.bmm(side.T.expand(len(images), -1, -1), images).unflatten(0, (examples, columns))
    return rotated.mT.transpose(0, 1)


def _apply(x: Tensor, side: Side, contract: str, scale: str) -> Tensor:
    if side is None:
        return x
    if isinstance(side, Scaling):
        return torch.einsum(scale, x, side.values)
    return torch.einsum(contract, x, side)


def side_marginal(side: Tensor | None, values: Tensor) -> Tensor:
    """The diagonals of `U diag(values) Uᵀ` for the groups of one side: `[Q, d]`, in the dtype of the values."""
    return values if side is None else (side.to(values.dtype).square() @ values.unsqueeze(2)).squeeze(2)


def _square(side: Side) -> Side:
    if isinstance(side, Scaling):
        return Scaling(side.values.square())
    return None if side is None else side.square()


def _to(side: Side, dtype: torch.dtype) -> Side:
    if isinstance(side, Scaling):
        return Scaling(side.values.to(dtype))
    return None if side is None else side.to(dtype)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
