"""The diagonal of H in a fixed basis: the weights' own (diag), or Kronecker eigenvectors (ekfac)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lapwing.basis import Basis, DenseBasis, KroneckerBasis
from lapwing.curvature.accumulator import Decomposition, need_no_shape
from lapwing.errors import InputError
from lapwing.gradients import Gradients
from lapwing.gradients import Inputs as LayerInputs


@dataclass
class DiagonalAccumulator:
    """`s = Σ_kn (Uᵀ g_kn)²`, summing positions and uses before the square: `[*basis.shape]`."""

    basis: Basis
    sums: Tensor
    budget: int
    kind: str = "diag"

    @property
    def elementwise(self) -> bool:
        return self.kind == "diag"

    def observe(self, inputs: LayerInputs) -> None:
        pass

    def update(self, gradients: Gradients) -> None:
        self.sums += self.basis.squares(gradients, self.budget)

    def settle(self) -> None:
        pass

    def merge(self, other: Self) -> Self:
        if not _same_basis(self.basis, other.basis):
            raise InputError(
                "Two ekfac curvatures merge only on a shared basis: merge their kron curvatures first, and "
                "accumulate both second passes in the merged basis."
            )
        return replace(self, sums=self.sums + other.sums)

    def scale(self, factor: float) -> Self:
        return replace(self, sums=self.sums * factor)

    def decompose(self, shape: Tensor | None) -> Decomposition:
        need_no_shape(shape, self.kind)
        return Decomposition(self.basis, self.sums.double())

    def matrix(self) -> Tensor:
        size = self.sums.numel()
        vectors = self.basis.expand(torch.eye(size, dtype=self.sums.dtype).unflatten(1, self.basis.shape))
        return vectors.T @ (self.sums.flatten().unsqueeze(1) * vectors)

    def tensors(self) -> dict[str, Tensor]:
        if not isinstance(self.basis, KroneckerBasis):
            return {"sums": self.sums}
        sides = {"output": self.basis.output, "input": self.basis.input}
        return {"sums": self.sums} | {name: side for name, side in sides.items() if isinstance(side, Tensor)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.sums = tensors["sums"]
        if isinstance(self.basis, KroneckerBasis):
            self.basis = replace(self.basis, output=tensors.get("output"), input=tensors.get("input"))

    def to(self, device: torch.device) -> Self:
        basis = self.basis
        if isinstance(basis, KroneckerBasis):
            output, inner = (
                side.to(device) if isinstance(side, Tensor) else side for side in (basis.output, basis.input)
            )
            basis = replace(basis, output=output, input=inner)
        return replace(self, basis=basis, sums=self.sums.to(device))


def _same_basis(left: Basis, right: Basis) -> bool:
    if isinstance(left, KroneckerBasis) and isinstance(right, KroneckerBasis):
        sides = ((left.output, right.output), (left.input, right.input))
        return all(
            (a is None and b is None) or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
            for a, b in sides
        )
    return isinstance(left, DenseBasis) and isinstance(right, DenseBasis) and left.vectors is right.vectors is None
