"""The part of linearized outputs that a low-rank curvature determines.

`P⁻¹ = D₀ M⁻¹ − Σ_j (D₀ − D_j) u_j u_jᵀ`. The first term is diagonal, a sum over layers. The second needs the
coordinates `u_j·g = Σ_l u_jl·g_l` of whole gradients, which add up over the layers as these arrive: `[K, N, k]`
numbers instead of `[K, N, p]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.gradients import Gradients
from lapwing.reflectors import LowRankBasis, project


@dataclass(frozen=True)
class Coordinates:
    """`u_j·g_kn` for the k directions of a basis: `values: [K, N, k]`, weighed by `more` `[k]`, `D_j − D₀ ≤ 0`."""

    basis: LowRankBasis
    floor: Tensor
    more: Tensor
    values: Tensor

    @staticmethod
    def zeros(basis: LowRankBasis, scale: Tensor, outputs: Tensor) -> Coordinates:
        """For outputs `[N, ...]` and the posterior variances `scale` `[p]` in the basis."""
        floor, more = basis.split(scale.detach())
        dtype = basis.tall.dtype
        values = torch.zeros(outputs[0].numel(), len(outputs), more.numel(), dtype=dtype, device=outputs.device)
        return Coordinates(basis, floor.to(dtype), more.to(dtype), values)

    def prior(self, rows: slice) -> Tensor:
        """`D₀ M⁻¹` of some parameters: `[n]`."""
        root = torch.ones_like(self.basis.tall[rows, 0]) if self.basis.root is None else self.basis.root[rows]
        return self.floor * root.square()

    def add(self, gradients: Gradients, rows: slice, columns: slice, examples: slice, budget: int) -> None:
        """Add the gradients of one layer, whose parameters are `rows` of the block."""
        self.values[columns, examples] += project(gradients, self.basis.columns[rows], budget)

    def variance(self) -> Tensor:
        """`Σ_j (D_j − D₀) (u_j·g_kn)²`: `[K, N]`."""
        return self.values.square() @ self.more

    def covariance(self) -> Tensor:
        """Between the outputs of an example: `[N, K, K]`."""
        rows = self.values.transpose(0, 1)
        return (rows * self.more) @ rows.mT

    def joint(self) -> Tensor:
        """Between all outputs of all examples: `[N·K, N·K]`."""
        rows = self.values.transpose(0, 1).flatten(0, 1)
        return (rows * self.more) @ rows.T
