"""Gradients of an embedding, kept at the rows that its tokens picked.

The gradient of example n is `Σ_r w_r e_{id_r} g_rᵀ`, a matrix `[V, D]` that is 0 but for the rows of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """`ids: [N, R]`, and `weights: [N, R]` (0 where a position reads nothing), None for ones."""

    ids: Tensor
    weights: Tensor | None = None

    @property
    def examples(self) -> int:
        return self.ids.shape[0]

    @property
    def count(self) -> int:
        """How many positions read a row."""
        return self.ids.numel() if self.weights is None else int((self.weights != 0).sum())

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(self.ids[start:stop], None if self.weights is None else self.weights[start:stop])

    def squares(self, vocabulary: int, dtype: torch.dtype) -> Tensor:
        """`Σ_nr w²` by row of the weight: `[V]`."""
        sums = torch.zeros(vocabulary, dtype=dtype, device=self.ids.device)
        weights = torch.ones_like(self.ids, dtype=dtype) if self.weights is None else self.weights.to(dtype).square()
        return sums.index_add_(0, self.ids.flatten(), weights.detach().flatten())


@dataclass(frozen=True)
class Segments:
    """The rows that are not 0: `values: [K, S, D]` of examples `example: [S]` at rows `row: [S]`."""

    values: Tensor
    example: Tensor
    row: Tensor
    examples: int

    def squares(self, vocabulary: int) -> Tensor:
        """Sum of squares over columns and examples: `[1, V, D]`."""
        sums = self.values.new_zeros(vocabulary, self.values.shape[2])
        return sums.index_add(0, self.row, self.values.square().sum(0)).unsqueeze(0)

    def variance(self, scale: Tensor) -> Tensor:
        """`Σ scale ∘ values²` of each column and example, with `scale: [V, D]`: `[K, n]`."""
        weighted = torch.einsum("ksd,sd->ks", self.values.square(), scale[self.row])
        return self.values.new_zeros(self.values.shape[0], self.examples).index_add(1, self.example, weighted)

    def covariance(self, scale: Tensor) -> Tensor:
        """`Σ scale ∘ values_k ∘ values_l` of each example: `[n, K, K]`."""
        rows = (self.values * scale[self.row].sqrt()).transpose(0, 1)
        columns = self.values.shape[0]
        return self.values.new_zeros(self.examples, columns, columns).index_add(0, self.example, rows @ rows.mT)

    def joint(self, scale: Tensor) -> Tensor:
        """The same between all examples: `[n·K, n·K]`. Only rows that some example picked are written out."""
        picked, place = self.row.unique(return_inverse=True)
        weighted = self.values * scale[self.row].sqrt()
        columns, _, width = weighted.shape
        dense = weighted.new_zeros(columns, self.examples * len(picked), width)
        dense = dense.index_copy(1, self.example * len(picked) + place, weighted)
        rows: Tensor = dense.unflatten(1, (self.examples, len(picked))).transpose(0, 1).flatten(0, 1).flatten(1)
        return rows @ rows.mT


@dataclass(frozen=True)
class TokenPair:
    """Tokens and `g: [K, N, R, D]`, for columns `column` and on; the weight is `[V, D]`."""

    tokens: Tokens
    g: Tensor
    vocabulary: int
    column: int = 0
    start: int = 0

    @property
    def columns(self) -> int:
        return self.g.shape[0]

    @property
    def examples(self) -> int:
        return self.g.shape[1]

    def present(self) -> Tensor:
        """`g` at the positions that read a row: `[K, P, D]`."""
        flat = self.g.flatten(1, 2)
        if self.tokens.weights is None:
            return flat
        return flat[:, self.tokens.weights.flatten() != 0]

    def segments(self, start: int, stop: int) -> Segments:
        """The gradients of some examples, positions with the same token of an example added up."""
        tokens, g = self.tokens.part(start, stop), self.g[:, start:stop]
        if tokens.weights is not None:
            g = g * tokens.weights.to(g.dtype).unsqueeze(-1)
        place = torch.arange(stop - start, device=g.device).unsqueeze(1) * self.vocabulary + tokens.ids
        found, segment = place.unique(return_inverse=True)
        values = g.new_zeros(g.shape[0], len(found), g.shape[3]).index_add(1, segment.flatten(), g.flatten(1, 2))
        return Segments(values, found // self.vocabulary, found % self.vocabulary, stop - start)

    def rows(self, start: int, stop: int) -> Tensor:
        """The gradients themselves: `[K, n, 1, V, D]`."""
        found = self.segments(start, stop)
        dense = self.g.new_zeros(self.columns, (stop - start) * self.vocabulary, self.g.shape[3])
        dense = dense.index_copy(1, found.example * self.vocabulary + found.row, found.values)
        rows: Tensor = dense.unflatten(1, (stop - start, 1, self.vocabulary))
        return rows

    def total(self) -> Tensor:
        """`Σ_n` of the gradients: `[K, V·D]`."""
        sums = self.g.new_zeros(self.columns, self.vocabulary, self.g.shape[3])
        self.add_total(sums)
        return sums.flatten(1)

    def add_total(self, sums: Tensor) -> None:
        """Add `Σ_n` of the gradients to `[K, V, D]`."""
        g = self.g if self.tokens.weights is None else self.g * self.tokens.weights.to(self.g.dtype).unsqueeze(-1)
        sums.index_add_(1, self.tokens.ids.flatten(), g.flatten(1, 2).to(sums.dtype))

    def contract(self, vector: Tensor) -> Tensor:
        """Inner product of each gradient with one vector `[V·D]`: `[K, N]`."""
        picked = vector.unflatten(0, (self.vocabulary, -1))[self.tokens.ids]  # [N, R, D]
        if self.tokens.weights is not None:
            picked = picked * self.tokens.weights.to(picked.dtype).unsqueeze(-1)
        return torch.einsum("knrd,nrd->kn", self.g, picked)
