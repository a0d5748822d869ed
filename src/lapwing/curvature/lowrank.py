"""The largest eigenpairs of the GGN of all weights; what remains is left to the prior."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from lapwing.batches import Unpack
from lapwing.curvature.accumulator import Decomposition
from lapwing.curvature.blocks import Block
from lapwing.eigenpairs import top_eigenpairs
from lapwing.errors import ConvergenceWarning, InputError, warn
from lapwing.gradients import Gradients
from lapwing.gradients import Inputs as LayerInputs
from lapwing.likelihoods import Likelihood
from lapwing.products import GGN
from lapwing.reflectors import LowRankBasis
from lapwing.tape import Tape

_ROWS = 2**13  # of V at a time, so that they stay in the cache


@dataclass
class LowRankAccumulator:
    """`H ≈ V diag(s) Vᵀ`: orthonormal `vectors` V `[p, k]` and `values` s `[k]` in float64, descending.

    Where H has fewer than k directions the rest of the values is 0, and their vectors may be.
    """

    vectors: Tensor
    values: Tensor
    kind: str = "lowrank"
    elementwise: bool = False

    @staticmethod
    def zeros(size: int, rank: int, like: Tensor) -> LowRankAccumulator:
        count = min(size, rank)
        if size * count * like.element_size() > 2**34:
            raise InputError(
                f"rank={rank} of {size} weights takes {size} × {count} numbers. Choose a lower rank, or make fewer "
                "weights Bayesian (weights='last_layer' or a glob)."
            )
        return LowRankAccumulator(like.new_zeros(size, count), like.new_zeros(count, dtype=torch.float64))

    def observe(self, inputs: LayerInputs) -> None:
        pass

    def update(self, gradients: Gradients) -> None:
        raise NotImplementedError("A low-rank curvature is made of products with the GGN, not of gradients.")

    def settle(self) -> None:
        pass

    def merge(self, other: Self) -> Self:
        """The best approximation of rank k of both together.

        Exact where the sum has no more than k directions; otherwise what is beyond them is dropped, as at a fit.
        """
        factors = torch.cat([self._factor(), other._factor()], dim=1)
        columns, triangle = torch.linalg.qr(factors)
        outer, lengths, _ = torch.linalg.svd(triangle.double())
        count = self.values.numel()
        vectors = columns @ outer[:, :count].to(columns)
        return replace(self, vectors=vectors, values=lengths[:count].square())

    def scale(self, factor: float) -> Self:
        return replace(self, values=self.values * factor)

    def decompose(self, shape: Tensor | None) -> Decomposition:
        """Under a prior of shape M the eigenvalues are those of the small `S^{1/2} Vᵀ M⁻¹ V S^{1/2}`: Woodbury."""
        size = self.vectors.shape[0]
        if shape is None:
            return Decomposition(LowRankBasis((size,), self.vectors), self._padded(self.values))
        lengths = self.values.sqrt()
        small = lengths.unsqueeze(1) * _gram(self.vectors, 1 / shape) * lengths
        values, rotation = torch.linalg.eigh(0.5 * (small + small.T))
        values, rotation = values.flip(0).clamp(min=0), rotation.detach().flip(1)
        # A value below rounding squared belongs to no direction.
        sizes = values.detach().sqrt()
        known = sizes > torch.finfo(self.vectors.dtype).eps * sizes.amax()
        inverse = torch.where(known, 1 / sizes.clamp(min=1e-300), torch.zeros_like(sizes))
        rotation, root = lengths.unsqueeze(1) * rotation * inverse, shape.detach().rsqrt()
        basis = LowRankBasis((size,), self.vectors, rotation.to(self.vectors), root.to(self.vectors))
        return Decomposition(basis, self._padded(torch.where(known, values, torch.zeros_like(values))))

    def _factor(self) -> Tensor:
        """`V S^{1/2}`: `[p, k]`."""
        return self.vectors * self.values.sqrt().to(self.vectors.dtype)

    def _padded(self, values: Tensor) -> Tensor:
        """All p eigenvalues, ascending."""
        zeros = values.new_zeros(self.vectors.shape[0] - values.numel())
        return torch.cat([zeros, values.flip(0)])

    def matrix(self) -> Tensor:
        factor = self._factor()
        return factor @ factor.T

    def tensors(self) -> dict[str, Tensor]:
        return {"vectors": self.vectors, "values": self.values}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.vectors, self.values = tensors["vectors"], tensors["values"]

    def to(self, device: torch.device) -> Self:
        return replace(self, vectors=self.vectors.to(device), values=self.values.to(device))


class _Gram(torch.autograd.Function):
    """`Vᵀ diag(weights) V` in float64, `[k, k]`, a few rows of V at a time; differentiable in `weights` `[p]`."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(vectors)
        total = weights.new_zeros(vectors.shape[1], vectors.shape[1])
        for rows, weight in zip(vectors.split(_ROWS), weights.split(_ROWS), strict=True):
            exact = rows.double()
            total.addmm_(exact.T, exact * weight.unsqueeze(1))
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, Tensor]:
        (vectors,) = ctx.saved_tensors
        parts = [((rows.double() @ slopes[0]) * rows.double()).sum(1) for rows in vectors.split(_ROWS)]
        return None, torch.cat(parts)


def _gram(vectors: Tensor, weights: Tensor) -> Tensor:
    found: Tensor = _Gram.apply(vectors, weights)  # type: ignore[no-untyped-call]
    return found


def fill(
    block: Block,
    tape: Tape,
    likelihood: Likelihood,
    loader: Iterable[Any],
    unpack: Unpack | None,
    budget: int,
    progress: bool,
) -> Block:
    """The block of all layers with the largest eigenpairs of the GGN. The model must be borrowed (see `guard`)."""
    empty = block.accumulator
    assert isinstance(empty, LowRankAccumulator)
    operator = GGN(tape.model, likelihood, loader, unpack=unpack, output=tape.output, progress=progress,
                   title="fit lowrank, product with the GGN")  # fmt: skip
    if set(operator.parameters) != set(block.parameters):
        raise InputError("The Bayesian parameters changed during the fit.")
    found = top_eigenpairs(operator, empty.values.numel(), empty.vectors.dtype, budget=budget)
    if not found.converged:
        warn(
            f"The largest {empty.values.numel()} eigenpairs of the GGN did not converge in {found.passes} passes over "
            f"the data: H v differs from v θ by {found.residual:.2g} of the largest eigenvalue. Their span is good, "
            "the smallest of them may be too small; choose a lower rank to settle them.",
            ConvergenceWarning,
        )
    vectors = block.pack(operator.unpack(found.vectors.T)).T.contiguous()
    return replace(block, accumulator=replace(empty, vectors=vectors, values=found.values.to(vectors.device)))
