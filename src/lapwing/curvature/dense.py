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


@dataclass
class DenseAccumulator:
    """`H = Σ_kn g_kn g_knᵀ`: `[p, p]`. An exact Hessian may have negative eigenvalues; they are kept."""

    sums: Tensor
    budget: int
    kind: str = "dense"
    elementwise: bool = False

    def observe(self, inputs: LayerInputs) -> None:
        pass

    def update(self, gradients: Gradients) -> None:
        size = self.sums.shape[0]
        for start, stop in parts(gradients, size, self.budget):
            rows = gradients.rows(start, stop).reshape(-1, size).to(self.sums.dtype)
            self.sums.addmm_(rows.T, rows)

    def merge(self, other: Self) -> Self:
        return replace(self, sums=self.sums + other.sums)

    def scale(self, factor: float) -> Self:
        return replace(self, sums=self.sums * factor)

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
        self.sums = tensors["sums"]

    def to(self, device: torch.device) -> Self:
        return replace(self, sums=self.sums.to(device))
