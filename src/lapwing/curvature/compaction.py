"""Fewer columns: a trained network is sure of most examples, and their columns add next to nothing.

The columns `S_n` of each example are rotated so that they are orthogonal, `‖S_nk‖²` being the eigenvalues of `Λ_n`. The
(example, column) pairs of a batch are ranked by them, and the smallest dropped up to a fraction ε of the batch's trace
`Σ_n tr Λ_n`. What is left is a lower bound of the exact sum, the same for the same batches.

Where the first columns have the direction of the gradient `∇_f log p` and it comes with them, they are kept for every
example as they are: they cost nothing, and of what `Λ_n` has besides them, the eigenvalues of which are ranked then,
there is little where a network is sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.columns import Columns

_FORWARD = 1.5  # what the forward pass of an example costs in backward passes of one column


@dataclass(frozen=True)
class Ranked:
    """The pairs that are kept: `columns: [K, N, D]`, largest first and 0 where dropped; `counts: [N]` per example.

    `dropped` and `total` are traces, the latter of all columns, ranked or not.
    """

    columns: Tensor
    counts: Tensor
    dropped: float
    total: float

    def whole_batches(self) -> int:
        """How many columns to backpropagate for the whole batch, the graph of which exists, before the examples that
        have more are cheaper in a batch of their own, which needs a forward pass as well.
        """
        counts = [int(count) for count in self.counts.bincount()]  # how many examples have 0 pairs, 1, ...
        costs = [
            first * len(self.counts) + sum((_FORWARD + k - first) * n for k, n in enumerate(counts) if k > first)
            for first in range(self.columns.shape[0] + 1)
        ]
        return min(range(len(costs)), key=costs.__getitem__)

    def left_over(self, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Columns `first` and on: the examples `[M]` that have some, their vectors `[K, M, D]`, and how many `[M]`."""
        examples = (self.counts > first).nonzero().squeeze(1)
        return examples, self.columns[first:, examples], self.counts[examples] - first


def rank(columns: Columns, tolerance: float, batches: Sequence[int], first: int = 0) -> Ranked:
    """Rotate, rank and drop columns `first` and on, in each of `batches` (how many examples it has) by itself."""
    roots = columns.part(0, columns.count)
    roots = roots.flatten(2).double() if roots.dim() > 2 else roots.unsqueeze(2).double()  # [K, N, D]
    totals = [own.square().sum() for own in roots.split(list(batches), dim=1)]
    roots = roots[first:]
    gram = torch.einsum("knd,lnd->nkl", roots, roots)
    traces = gram.diagonal(dim1=1, dim2=2).sum(1).split(list(batches))
    live = [
        own > _surely_dropped(own, tolerance * total, len(roots)) for own, total in zip(traces, totals, strict=True)
    ]
    index = torch.cat(live).nonzero().squeeze(1)
    values, vectors = torch.linalg.eigh(gram[index])
    rotated = torch.einsum("knd,nkl->lnd", roots[:, index], vectors).flip(0)  # largest first
    sizes = values.clamp(min=0).T.flip(0)  # [K, n]
    parts = sizes.split([int(own.sum()) for own in live], dim=1)
    kept = torch.cat(
        [
            _kept(own, tolerance * total - (trace.sum() - own.sum()))
            for own, total, trace in zip(parts, totals, traces, strict=True)
        ],
        1,
    )
    counts = torch.zeros(roots.shape[1], dtype=torch.long, device=roots.device)
    counts[index] = kept.sum(0)
    most = int(counts.amax()) if len(counts) else 0
    chosen = torch.zeros(most, *roots.shape[1:], dtype=roots.dtype, device=roots.device)
    chosen[:, index] = rotated[:most] * kept[:most].unsqueeze(2)
    dropped = float(sum(own.sum() for own in traces)) - float((sizes * kept).sum())
    return Ranked(chosen, counts, max(0.0, dropped), float(torch.stack(totals).sum()))


def _kept(sizes: Tensor, allowed: Tensor) -> Tensor:
    """Which pairs `[K, n]` are left when the smallest are dropped, together no more than `allowed`."""
    # The last columns come first, so that among equals of an example those go that come last.
    ascending, order = sizes.flip(0).flatten().sort(stable=True)
    dropped = ascending.cumsum(0) <= allowed
    kept: Tensor = torch.ones_like(dropped).scatter_(0, order, ~dropped).unflatten(0, sizes.shape).flip(0)
    return kept


def _surely_dropped(traces: Tensor, allowed: Tensor, columns: int) -> Tensor:
    """A size t such that all pairs up to t are within what may be dropped: `Σ_n min(tr Λ_n, K t) ≤ allowed`."""
    ascending = traces.sort().values
    below = torch.cat([ascending.new_zeros(1), ascending.cumsum(0)[:-1]])
    above = torch.arange(len(ascending), 0, -1).to(ascending)
    spent = below + above * ascending  # if K t were the i-th trace
    fits = spent <= allowed
    return ascending[fits].amax() / columns if bool(fits.any()) else torch.zeros_like(allowed) - 1


def like_outputs(vectors: Tensor, outputs: Tensor) -> Tensor:
    """`[K, M, D]` in the shape and dtype of outputs `[N, *output]`: `[K, M, *output]`."""
    return vectors.reshape(*vectors.shape[:2], *outputs.shape[1:]).to(outputs.dtype)
