"""Kronecker factors of a layer: `H ≈ G ⊗ A`, one pair per group of a grouped convolution.

expand: `A = Σ_nr a aᵀ / (N R)`, `G = Σ_knr g gᵀ`; reduce: with `ā = mean_r a` and `ḡ = Σ_r g`.
An embedding `[V, D]` has its inputs on the side of its rows: `Σ a aᵀ` counts the tokens and is diagonal as it is.
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
from lapwing.gradients import Gradients, Pair, UseInputs, Uses
from lapwing.gradients import Inputs as LayerInputs
from lapwing.layers.rule import Moments, moments_of
from lapwing.tokens import TokenPair, Tokens


@dataclass
class KroneckerAccumulator:
    """Sums `Σ a aᵀ: [Q, I, I]` and `Σ g gᵀ: [Q, O, O]` with their counts; divided once, at the end.

    A side above `max_factor` keeps only its diagonal, `[Q, I]` or `[Q, O]`. `positions: [Q]` counts the inputs. Where
    `turned`, the layer is an embedding: the outputs' side holds its inputs (tokens), the inputs' side `Σ g gᵀ`.
    """

    shape: tuple[int, int, int]
    inputs: Tensor
    outputs: Tensor
    reduce: bool
    budget: int
    positions: Tensor
    examples: float = 0.0
    terms: tuple[int, int] = (0, 0)
    """How many outer products each sum has: bounds on the ranks of the input and output side."""
    turned: bool = False
    kind: str = "kron"
    elementwise: bool = False

    @staticmethod
    def zeros(
        shape: tuple[int, int, int], reduce: bool, max_factor: int, budget: int, like: Tensor, turned: bool = False
    ) -> KroneckerAccumulator:
        groups, outputs, inputs = shape
        largest = (max_factor, -1 if turned else max_factor)
        sides = [
            like.new_zeros((groups, size, size) if size <= most else (groups, size))
            for size, most in zip((inputs, outputs), largest, strict=True)
        ]
        counts = torch.zeros(groups, dtype=torch.float64, device=like.device)
        return KroneckerAccumulator(shape, sides[0], sides[1], reduce, budget, counts, turned=turned)

    def observe(self, inputs: LayerInputs) -> None:
        self.examples += inputs.examples
        uses = inputs.uses
        if self.reduce and len(uses) > 1 and all(isinstance(use, UseInputs) and use.groups is None for use in uses):
            uses = (inputs.together(),)  # one mean over the positions of all uses
        for use in uses:
            if isinstance(use, Tokens):
                self._observe_tokens(use)
            else:
                self._observe(use, inputs.examples, inputs.bias)

    def _observe(self, use: UseInputs, examples: int, bias: bool) -> None:
        groups = slice(None) if use.groups is None else slice(use.groups.start, use.groups.stop)
        first = use.read(slice(0, 1))  # says how much memory one example takes
        step = max(1, math.floor(self.budget / (4 * first.numel() * first.element_size())))
        dense = self.inputs.dim() == 3
        for start in range(0, examples, step):
            part = slice(start, min(start + step, examples))
            if dense and not self.reduce:
                self._add(use.read_moments(part), bias, groups)
                continue
            a = use.read(part)
            a = a.mean(2, keepdim=True) if self.reduce else a
            if dense:
                self._add(moments_of(a), bias, groups)
            else:
                self._add_squares(a, groups)
        count = examples * (1 if self.reduce else first.shape[2])
        self.positions[groups] += count
        self.terms = (self.terms[0] + count, self.terms[1])

    def _observe_tokens(self, tokens: Tokens) -> None:
        self.outputs += tokens.squares(self.shape[1], self.outputs.dtype)
        self.positions += tokens.count
        self.terms = (self.terms[0], self.terms[1] + tokens.count)

    def _add(self, moments: Moments, bias: bool, groups: slice) -> None:
        width = moments.sums.shape[1]
        sums = self.inputs[groups]
        sums[:, :width, :width] += moments.products
        if bias:
            sums[:, width, :width] += moments.sums
            sums[:, :width, width] += moments.sums
            sums[:, width, width] += moments.count

    def _add_squares(self, a: Tensor, groups: slice) -> None:
        width = a.shape[3]
        sums = self.inputs[groups]
        sums[:, :width] += a.square().sum((0, 2))
        sums[:, width:] += a.shape[0] * a.shape[2]  # the bias, where there is one

    def update(self, gradients: Gradients) -> None:
        for part in gradients.parts if isinstance(gradients, Uses) else (gradients,):
            if isinstance(part, TokenPair):
                self._update_tokens(part)
            else:
                assert isinstance(part, Pair)
                self._update(part)

    def _update(self, pair: Pair) -> None:
        groups = slice(None) if pair.groups is None else slice(pair.groups.start, pair.groups.stop)
        g = pair.g.sum(3, keepdim=True) if self.reduce else pair.g
        self.terms = (self.terms[0], self.terms[1] + g.shape[0] * g.shape[1] * g.shape[3])
        g = g.to(self.outputs.dtype).permute(2, 0, 1, 3, 4)  # [Q, K, N, R, O]
        sums = self.outputs[groups]
        if sums.dim() == 2:
            sums += g.square().sum((1, 2, 3))
        elif g.shape[4] < g.shape[3]:  # a small product per example is cheaper than a copy in another order
            sums += (g.mT @ g).sum((1, 2))
        else:
            flat = g.flatten(1, 3)
            sums.baddbmm_(flat.mT, flat)

    def _update_tokens(self, pair: TokenPair) -> None:
        g = pair.present().to(self.inputs.dtype).flatten(0, 1)
        self.terms = (self.terms[0] + len(g), self.terms[1])
        if self.inputs.dim() == 2:
            self.inputs += g.square().sum(0)
        else:
            self.inputs[0].addmm_(g.T, g)

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
        count = self.positions.clamp(min=1).unsqueeze(1)
        inputs = self.inputs / (count if self.inputs.dim() == 2 else count.unsqueeze(2)).to(self.inputs.dtype)
        input_values, input_side = _decompose_side(inputs, input_shape, self.terms[0])
        output_values, output_side = _decompose_side(self.outputs, output_shape, self.terms[1])
        basis = KroneckerBasis(self.shape, output_side, input_side, orthonormal=output_shape is None)
        eigenvalues = output_values.unsqueeze(2) * input_values.unsqueeze(1)
        per_example = count / max(self.examples, 1)
        if self.turned:  # the gradients are on the side of the inputs
            return Decomposition(basis, eigenvalues, (input_values, output_values / max(self.examples, 1)))
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
        counts = self.positions.clamp(min=1).to(self.inputs.dtype)
        blocks = [torch.kron(g, a / count) for g, a, count in zip(*dense, counts, strict=True)]
        dense_blocks: Tensor = torch.block_diag(*blocks)
        return dense_blocks

    def tensors(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.examples, *self.terms], dtype=torch.float64)
        return {"inputs": self.inputs, "outputs": self.outputs, "positions": self.positions, "counts": counts}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.inputs, self.outputs, self.positions = tensors["inputs"], tensors["outputs"], tensors["positions"]
        self.examples, *terms = tensors["counts"].tolist()
        self.terms = (int(terms[0]), int(terms[1]))

    def to(self, device: torch.device) -> Self:
        return replace(
            self,
            inputs=self.inputs.to(device),
            outputs=self.outputs.to(device),
            positions=self.positions.to(device),
        )


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
