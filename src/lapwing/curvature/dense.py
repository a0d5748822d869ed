"""A block of H itself: one layer (block), or all weights (full)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lapwing.basis import DenseBasis
from lapwing.curvature.accumulator import Decomposition, eigh
from lapwing.gradients import Gradients, parts
from lapwing.gradients import Inputs as LayerInputs
from lapwing.gram import Gram


@dataclass
class DenseAccumulator:
    """`H = Σ_kn g_kn g_knᵀ`: `[p, p]`. An exact Hessian may have negative eigenvalues; they are kept."""

    total: Gram
    budget: int
    kind: str = "dense"
    elementwise: bool = False

    @property
    def sums(self) -> Tensor:
        """H: `[p, p]`."""
        return self.total.sums[0]

    @property
    def size(self) -> int:
        return self.total.shape[1]

    def observe(self, inputs: LayerInputs) -> None:
        pass

    def update(self, gradients: Gradients) -> None:
        for start, stop in parts(gradients, self.size, self.budget):
            self.total.add_kept_rows(gradients.rows(start, stop).reshape(1, -1, self.size), slice(None))

    def add(self, matrix: Tensor) -> None:
        """Add a whole `[p, p]` that is not a sum of outer products."""
        self.total.add_products(matrix.unsqueeze(0), matrix[:1], 0, slice(None), bias=False)

    def settle(self) -> None:
        self.total.settle()

    def merge(self, other: Self) -> Self:
        return replace(self, total=Gram.of((self.sums + other.sums).unsqueeze(0)))

    def scale(self, factor: float) -> Self:
        return replace(self, total=Gram.of((self.sums * factor).unsqueeze(0)))

    def decompose(self, shape: Tensor | None) -> Decomposition:
        if shape is None:
            values, vectors = eigh(self.sums)
        else:
            root = shape.rsqrt()
            values, vectors = eigh(root.unsqueeze(1) * self.sums * root)
            vectors = (root.detach().unsqueeze(1) * vectors).to(self.sums.dtype)
        rounding = self.sums.shape[0] * torch.finfo(self.sums.dtype).eps * values.detach().abs().amax()
        # Below rounding a negative eigenvalue is a zero; beyond it, it belongs to an exact Hessian.
        values = torch.where((values < 0) & (values >= -10 * rounding), torch.zeros_like(values), values)
        return Decomposition(DenseBasis((self.sums.shape[0],), vectors), values)

    def matrix(self) -> Tensor:
        return self.sums

    def tensors(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.total = Gram.of(tensors["sums"].unsqueeze(0))

    def to(self, device: torch.device) -> Self:
        return replace(self, total=Gram.of(self.sums.to(device).unsqueeze(0)))
