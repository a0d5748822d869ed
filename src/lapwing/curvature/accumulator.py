"""What every structure's accumulator can do: add up a block of H over the data, then decompose it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from lapwing.basis import Basis, DenseBasis, KroneckerBasis, Scaling, side_marginal
from lapwing.errors import InputError
from lapwing.gradients import Gradients
from lapwing.gradients import Inputs as LayerInputs


@dataclass(frozen=True)
class Decomposition:
    """`Uᵀ H U = diag(eigenvalues)` with `Uᵀ M U = I`; eigenvalues have the basis' shape, in float64.

    `sides`, for Kronecker blocks, are the factors' own eigenvalues per example: those of
    `E[Σ_r a aᵀ]`, `[Q, I]`, and of `E[Σ_r g gᵀ]/R`, `[Q, O]`.
    """

    basis: Basis
    eigenvalues: Tensor
    sides: tuple[Tensor, Tensor] | None = None

    def diagonal(self) -> Tensor:
        """The diagonal of H, decomposed under `M = I`: `[p]`, float64."""
        if not isinstance(self.basis, KroneckerBasis) or self.sides is None:
            return self.basis.to(torch.float64).marginal(self.eigenvalues)
        # The eigenvalues are products of the factors', so that each side can be summed over by itself.
        outputs, inputs = self.eigenvalues.sum(2), self.eigenvalues.sum(1)
        inputs = inputs / inputs.sum(1, keepdim=True).clamp(min=torch.finfo(inputs.dtype).tiny)
        assert not isinstance(self.basis.output, Scaling)
        assert not isinstance(self.basis.input, Scaling)
        left, right = side_marginal(self.basis.output, outputs), side_marginal(self.basis.input, inputs)
        return (left.unsqueeze(2) * right.unsqueeze(1)).flatten()

    def tensors(self) -> dict[str, Tensor] | None:
        """What a file keeps of the decomposition of a Kronecker or dense block; None for others, which are cheap."""
        if isinstance(self.basis, KroneckerBasis) and self.sides is not None:
            found = {"eigenvalues": self.eigenvalues, "input_values": self.sides[0], "output_values": self.sides[1]}
            sides = {"output": self.basis.output, "input": self.basis.input}
            return found | {name: side for name, side in sides.items() if isinstance(side, Tensor)}
        if isinstance(self.basis, DenseBasis) and isinstance(self.basis.vectors, Tensor):
            return {"eigenvalues": self.eigenvalues, "vectors": self.basis.vectors}
        return None

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Decomposition:
        """The inverse of `tensors`."""
        values = tensors["eigenvalues"]
        if "vectors" in tensors:
            return Decomposition(DenseBasis((values.shape[0],), tensors["vectors"]), values)
        groups, outputs, inputs = values.shape
        basis = KroneckerBasis((groups, outputs, inputs), tensors.get("output"), tensors.get("input"))
        return Decomposition(basis, values, (tensors["input_values"], tensors["output_values"]))


class Accumulator(Protocol):
    """A block of the curvature, summed over the data seen so far.

    Where `elementwise`, any diagonal prior is free.
    """

    kind: str

    @property
    def elementwise(self) -> bool:
        """Whether the basis is the identity."""

    def observe(self, inputs: LayerInputs) -> None:
        """See a layer's inputs, once per batch, before its gradients."""

    def update(self, gradients: Gradients) -> None:
        """Add `Σ_kn g_kn g_knᵀ` in the block's structure."""

    def settle(self) -> None:
        """Take in what waits for more of its kind; at the end of a fit."""

    def merge(self, other: Self) -> Self:
        """The sum over both data sets."""

    def scale(self, factor: float) -> Self:
        """H times a factor."""

    def decompose(self, shape: Tensor | None) -> Decomposition:
        """Basis and eigenvalues for a prior of shape `M = diag(shape)`, `[p]`; None is the identity.

        Eigenvalues are differentiable in `shape`; the basis is not.
        """

    def matrix(self) -> Tensor:
        """H itself, dense: `[p, p]`. For inspection and tests of small blocks."""

    def tensors(self) -> dict[str, Tensor]:
        """What a file keeps; `load` is the inverse."""

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave."""

    def to(self, device: torch.device) -> Self:
        """The same on another device."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over data are kept in at least float32."""
    return torch.promote_types(dtype, torch.float32)


def eigh(matrix: Tensor, rank: float = float("inf")) -> tuple[Tensor, Tensor]:
    """Eigenvalues (float64, ascending) and eigenvectors (in the matrix' dtype) of symmetric matrices `[..., d, d]`.

    The decomposition is in float64. The eigenvalues are differentiable, the eigenvectors detached. Where
    at most `rank` eigenvalues are not 0 (a sum of few outer products), only their space is decomposed.
    """
    symmetric = matrix.double()
    symmetric = 0.5 * (symmetric + symmetric.mT)
    spare = rank + 16
    if 2 * spare > matrix.shape[-1]:
        values, vectors = torch.linalg.eigh(symmetric)
    else:
        values, vectors = _eigh_of_low_rank(symmetric, int(spare))
    return values, vectors.detach().to(matrix.dtype)


def _eigh_of_low_rank(symmetric: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The range of a matrix of low rank is that of its product with a few random vectors, exactly."""
    size = symmetric.shape[-1]
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(size, rank, generator=generator, dtype=symmetric.dtype).to(symmetric.device)
    basis = torch.linalg.qr(symmetric.detach() @ probes, mode="complete").Q
    inside, outside = basis[..., :rank], basis[..., rank:]
    values, vectors = torch.linalg.eigh(inside.mT @ symmetric @ inside)
    zeros = values.new_zeros(*values.shape[:-1], size - rank)
    return torch.cat([zeros, values], dim=-1), torch.cat([outside, inside @ vectors], dim=-1)


def need_no_shape(shape: Tensor | None, structure: str) -> None:
    if shape is not None:
        raise InputError(
            f"structure={structure!r} keeps the basis of its fit, so it takes one prior precision per layer, "
            "equal for weight and bias. Use structure='kron', 'block', 'full', 'lowrank' or 'diag' for finer groups."
        )
