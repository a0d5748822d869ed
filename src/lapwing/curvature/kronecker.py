"""Kronecker factors of a layer: `H ≈ G ⊗ A`, one pair per group of a grouped convolution.

expand: `A = Σ_nr a aᵀ / (N R)`, `G = Σ_knr g gᵀ`; reduce: with `ā = mean_r a` and `ḡ = Σ_r g`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lapwing.basis import KroneckerBasis, Scaling, Side
from lapwing.curvature.accumulator import Decomposition, eigh
from lapwing.errors import InputError
from lapwing.gradients import Gradients, Pair
from lapwing.gradients import Inputs as LayerInputs
from lapwing.layers.rule import Moments, moments_of


@dataclass
class KroneckerAccumulator:
    """Sums `Σ a aᵀ: [Q, I, I]` and `Σ g gᵀ: [Q, O, O]` with their counts; divided once, at the end.

    A side above `max_factor` keeps only its diagonal, `[Q, I]` or `[Q, O]`.
    """

    shape: tuple[int, int, int]
    inputs: Tensor
    outputs: Tensor
    reduce: bool
    budget: int
    positions: float = 0.0
    examples: float = 0.0
    terms: tuple[int, int] = (0, 0)
    """How many outer products each sum has: bounds on the ranks of the input and output side."""
    kind: str = "kron"
    elementwise: bool = False

    @staticmethod
    def zeros(
        shape: tuple[int, int, int], reduce: bool, max_factor: int, budget: int, like: Tensor
    ) -> KroneckerAccumulator:
        groups, outputs, inputs = shape
        sides = [
            like.new_zeros((groups, size, size) if size <= max_factor else (groups, size)) for size in (inputs, outputs)
        ]
        return KroneckerAccumulator(shape, sides[0], sides[1], reduce, budget)

    def observe(self, inputs: LayerInputs) -> None:
        first = inputs.part(0, 1)  # says how much memory one example takes
        step = max(1, math.floor(self.budget / (4 * first.numel() * first.element_size())))
        dense = self.inputs.dim() == 3
        for start in range(0, inputs.examples, step):
            stop = min(start + step, inputs.examples)
            if dense and not self.reduce:
                for moments in inputs.moments(start, stop):
                    self._add(moments, inputs.bias)
            else:
                a = inputs.part(start, stop)
                a = a.mean(2, keepdim=True) if self.reduce else a
                if dense:
                    self._add(moments_of(a), inputs.bias)
                else:
                    self._add_squares(a)
        count = inputs.examples * (1 if self.reduce else first.shape[2])
        self.positions += count
        self.examples += inputs.examples
        self.terms = (self.terms[0] + count, self.terms[1])

    def _add(self, moments: Moments, bias: bool) -> None:
        width = moments.sums.shape[1]
        self.inputs[:, :width, :width] += moments.products
        if bias:
            self.inputs[:, width, :width] += moments.sums
            self.inputs[:, :width, width] += moments.sums
            self.inputs[:, width, width] += moments.count

    def _add_squares(self, a: Tensor) -> None:
        width = a.shape[3]
        self.inputs[:, :width] += a.square().sum((0, 2))
        self.inputs[:, width:] += a.shape[0] * a.shape[2]  # the bias, where there is one

    def update(self, gradients: Gradients) -> None:
        assert isinstance(gradients, Pair)
        g = gradients.g.sum(3, keepdim=True) if self.reduce else gradients.g
        self.terms = (self.terms[0], self.terms[1] + g.shape[0] * g.shape[1] * g.shape[3])
        g = g.to(self.outputs.dtype).permute(2, 0, 1, 3, 4)  # [Q, K, N, R, O]
        if self.outputs.dim() == 2:
            self.outputs += g.square().sum((1, 2, 3))
        elif g.shape[4] < g.shape[3]:  # a small product per example is cheaper than a copy in another order
            self.outputs += (g.mT @ g).sum((1, 2))
        else:
            flat = g.flatten(1, 3)
            self.outputs.baddbmm_(flat.mT, flat)

    def add_output_factor(self, factor: Tensor) -> None:
        """Add to the output side a matrix `[O, O]` that was not made of gradients, of whatever rank."""
        self.outputs += factor if self.outputs.dim() == 3 else factor.diagonal()
        self.terms = (self.terms[0], self.terms[1] + factor.shape[0])

    def merge(self, other: Self) -> Self:
        if self.reduce != other.reduce:
            raise InputError("A kron='expand' and a kron='reduce' curvature do not merge.")
        return replace(
            self,
            inputs=self.inputs + other.inputs,
            outputs=self.outputs + other.outputs,
            positions=self.positions + other.positions,
            examples=self.examples + other.examples,
            terms=(self.terms[0] + other.terms[0], self.terms[1] + other.terms[1]),
        )

    def scale(self, factor: float) -> Self:
        return replace(
            self,
            inputs=self.inputs * factor,
            outputs=self.outputs * factor,
            positions=self.positions * factor,
            examples=self.examples * factor,
        )

    def decompose(self, shape: Tensor | None) -> Decomposition:
        output_shape, input_shape = self._separate(shape)
        count = max(self.positions, 1)
        input_values, input_side = _decompose_side(self.inputs / count, input_shape, self.terms[0])
        output_values, output_side = _decompose_side(self.outputs, output_shape, self.terms[1])
        basis = KroneckerBasis(self.shape, output_side, input_side, orthonormal=output_shape is None)
        eigenvalues = output_values.unsqueeze(2) * input_values.unsqueeze(1)
        per_example = count / max(self.examples, 1)
        return Decomposition(basis, eigenvalues, (input_values * per_example, output_values / count))

    def _separate(self, shape: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Write `M = diag(shape)` as `M_G ⊗ M_A`: constant over outputs, or constant over inputs."""
        if shape is None:
            return None, None
        tensor = shape.unflatten(0, self.shape)
        values = tensor.detach()
        if bool((values == values[:1, :1]).all()):
            return None, tensor[0, 0]
        if bool((values == values[..., :1]).all()):
            return tensor[..., 0], None
        raise InputError(
            "structure='kron' takes prior precisions that are equal for all outputs of a layer (one for the "
            "weight, one for the bias, or one per input) or equal for all its inputs. Use structure='diag', "
            "'block' or 'full' for one precision per parameter."
        )

    def matrix(self) -> Tensor:
        dense = [side if side.dim() == 3 else torch.diag_embed(side) for side in (self.outputs, self.inputs)]
        blocks = [torch.kron(g, a / max(self.positions, 1)) for g, a in zip(*dense, strict=True)]
        dense_blocks: Tensor = torch.block_diag(*blocks)
        return dense_blocks

    def tensors(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.positions, self.examples, *self.terms], dtype=torch.float64)
        return {"inputs": self.inputs, "outputs": self.outputs, "counts": counts}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.inputs, self.outputs = tensors["inputs"], tensors["outputs"]
        self.positions, self.examples, *terms = tensors["counts"].tolist()
        self.terms = (int(terms[0]), int(terms[1]))

    def to(self, device: torch.device) -> Self:
        return replace(self, inputs=self.inputs.to(device), outputs=self.outputs.to(device))


def _decompose_side(factor: Tensor, shape: Tensor | None, rank: int) -> tuple[Tensor, Side]:
    """Eigenvalues `[Q, d]` (clamped at 0) and basis of one factor under `M = diag(shape)`."""
    root = None if shape is None else shape.rsqrt().expand(factor.shape[0], -1)
    if factor.dim() == 2:
        values = factor.double() if root is None else factor.double() * root.square()
        return values, None if root is None else Scaling(root.detach().to(factor.dtype))
    if root is None:
        values, vectors = eigh(factor, rank)
        return values.clamp(min=0), vectors
    values, vectors = eigh(root.unsqueeze(2) * factor * root.unsqueeze(1), rank)
    return values.clamp(min=0), (root.detach().unsqueeze(2) * vectors).to(factor.dtype)
