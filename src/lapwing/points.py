"""The examples that a Gaussian process is conditioned on: their features, and `I + s Sᵀ K S` factored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.batches import check_targets
from lapwing.errors import InputError
from lapwing.fitted import Looks
from lapwing.kernel import Features, Kernel, read_features
from lapwing.likelihoods import Statistics
from lapwing.subset import Chunk
from lapwing.tape import Tape

if TYPE_CHECKING:
    from lapwing.function_space import FunctionSpace


@dataclass(frozen=True, eq=False)
class Part:
    """Features of some points, and their `S: [n, D, r]`, or `√diag Λ: [n, D]` where outputs are independent."""

    features: Features
    root: Tensor


@dataclass
class Points:
    """The points that the process is conditioned on; `seen` is how many there were, `cholesky` of `I + s Sᵀ K S`."""

    tape: Tape
    chunks: list[Chunk]
    seen: int
    looks: Looks
    statistics: Statistics = field(default_factory=Statistics)
    held: list[Part] | None = None
    cholesky: Tensor | None = None

    @property
    def count(self) -> int:
        return sum(len(chunk.targets) for chunk in self.chunks)

    def parts(self, space: FunctionSpace) -> Iterator[Part]:
        """Those kept, or else made anew. The model must be borrowed."""
        if self.held is not None:
            yield from self.held
            return
        for chunk in self.chunks:
            start = 0
            for features in read_features(self.tape, chunk.inputs, space.max_columns):
                targets = chunk.targets[start : start + len(features.outputs)]
                check_targets(chunk.where, features.outputs, targets)
                space.likelihood.check(features.outputs, targets, chunk.where)
                yield Part(features, _root(space, features.outputs, targets))
                start += len(targets)
            if start != len(chunk.targets):
                raise InputError(f"{chunk.where}: {len(chunk.targets)} targets for {start} outputs.")

    def keep(self, space: FunctionSpace) -> None:
        """Hold the features if they fit into half of the budget; sum up what the data say at the network."""
        held: list[Part] | None = []
        statistics, start = Statistics(), 0
        targets = torch.cat([chunk.targets for chunk in self.chunks])
        for part in self.parts(space):
            outputs = part.features.outputs
            statistics += space.likelihood.statistics(outputs, targets[start : start + len(outputs)])
            start += len(outputs)
            if held is not None:
                held.append(part)
                held = held if sum(one.features.bytes for one in held) <= space.memory_budget // 2 else None
        self.held, self.statistics = held, statistics

    def condition(self, space: FunctionSpace, kernel: Kernel) -> None:
        """Factor `B = I + s Sᵀ K S`: `[B, B]`, or `[D, M, M]` where outputs are independent."""
        rows: list[list[Tensor]] = []
        for i, one in enumerate(self.parts(space)):
            row = []
            for j, two in enumerate(self.parts(space)):
                row.append(rows[j][i].mT if j < i else space.scale * _both(one, two, kernel))
            rows.append(row)
        matrix = torch.cat([torch.cat(row, dim=-1) for row in rows], dim=-2)
        self.cholesky = torch.linalg.cholesky(matrix + torch.eye(matrix.shape[-1]).to(matrix))

    def whitened(self, space: FunctionSpace, kernel: Kernel, features: Features) -> Tensor:
        """`√s B^{-1/2} Sᵀ K_M*`: `[B, n·D]`, or `[D, M, n]` where outputs are independent."""
        assert self.cholesky is not None
        pieces = []
        for part in self.parts(space):
            block = kernel.between(part.features, features)
            if kernel.independent:
                pieces.append(part.root.T.unsqueeze(2) * block)
            else:
                pieces.append(torch.einsum("ndr,ndme->nrme", part.root, block).flatten(2).flatten(0, 1))
        known = space.scale**0.5 * torch.cat(pieces, dim=-2)
        found: Tensor = torch.linalg.solve_triangular(self.cholesky, known, upper=False)
        return found


def _both(one: Part, two: Part, kernel: Kernel) -> Tensor:
    """`S_iᵀ K_ij S_j`: `[n·r, m·q]`, or `[D, n, m]` where outputs are independent."""
    block = kernel.between(one.features, two.features)
    if kernel.independent:
        return one.root.T.unsqueeze(2) * block * two.root.T.unsqueeze(1)
    whole: Tensor = torch.einsum("ndr,ndme,meq->nrmq", one.root, block, two.root)
    return whole.flatten(2).flatten(0, 1)


def _root(space: FunctionSpace, outputs: Tensor, targets: Tensor) -> Tensor:
    if space.independent:
        return space.likelihood.hessian_diagonal(outputs, targets).flatten(1).double().sqrt()
    columns = space.likelihood.hessian_columns(outputs, targets)
    every: Tensor = columns.part(0, columns.count).reshape(columns.count, len(outputs), -1)
    return every.permute(1, 2, 0).double()
