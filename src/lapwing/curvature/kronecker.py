"""Kronecker factors of a layer: `H ≈ G ⊗ A`, one pair per group of a grouped convolution.

expand: `A = Σ_nr a aᵀ / (N R)`, `G = Σ_knr g gᵀ`; reduce: with `ā = mean_r a` and `ḡ = Σ_r g`.
An embedding `[V, D]` has its inputs on the side of its rows: `Σ a aᵀ` counts the tokens and is diagonal as it is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from lapwing.basis import KroneckerBasis, Scaling, Side
from lapwing.curvature.accumulator import Decomposition, eigh
from lapwing.errors import InputError
from lapwing.gradients import Gradients, Pair, UseInputs, Uses
from lapwing.gradients import Inputs as LayerInputs
from lapwing.gram import Gram
from lapwing.layers.moments import MomentSum, moment_sum, too_many
from lapwing.layers.window import Images
from lapwing.tokens import TokenPair, Tokens
from lapwing.zero_rows import nonzero_rows


@dataclass
class KroneckerAccumulator:
    """Sums `Σ a aᵀ: [Q, I, I]` and `Σ g gᵀ: [Q, O, O]` with their counts; divided once, at the end.

    A side above `max_factor` keeps only its diagonal, `[Q, I]` or `[Q, O]`. `positions: [Q]` counts the inputs. Where
    `turned`, the layer is an embedding: the outputs' side holds its inputs (tokens), the inputs' side `Σ g gᵀ`.
    """

    shape: tuple[int, int, int]
    input_sum: Gram
    output_sum: Gram
    reduce: bool
    budget: int
    positions: Tensor
    examples: float = 0.0
    terms: tuple[int, int] = (0, 0)
    """How many outer products each sum has: bounds on the ranks of the input and output side."""
    turned: bool = False
    kind: str = "kron"
    elementwise: bool = False
    _of_images: bool = field(default=False, init=False, repr=False)
    """Whether gradients are those of images, so that there is no use in looking for rows of 0."""
    _pending: dict[Hashable, tuple[slice, bool, MomentSum]] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def zeros(
        shape: tuple[int, int, int], reduce: bool, max_factor: int, budget: int, like: Tensor, turned: bool = False
    ) -> KroneckerAccumulator:
        groups, outputs, inputs = shape
        input_sum = Gram.zeros(groups, inputs, inputs <= max_factor, like)
        output_sum = Gram.zeros(groups, outputs, outputs <= max_factor and not turned, like)
        counts = torch.zeros(groups, dtype=torch.float64, device=like.device)
        return KroneckerAccumulator(shape, input_sum, output_sum, reduce, budget, counts, turned=turned)

    @property
    def inputs(self) -> Tensor:
        """`Σ a aᵀ: [Q, I, I]`, or its diagonal `[Q, I]`."""
        self._collect()
        return self.input_sum.sums

    @property
    def outputs(self) -> Tensor:
        """`Σ g gᵀ: [Q, O, O]`, or its diagonal `[Q, O]`."""
        return self.output_sum.sums

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
        one = use.read_images(slice(0, 1))
        self._of_images = one is not None
        sizes = one.patch_sizes if one is not None else use.read(slice(0, 1)).shape[1:]  # of one example
        step = max(1, math.floor(self.budget / (4 * math.prod(sizes) * self.input_sum.dtype.itemsize)))
        for start in range(0, examples, step):
            part = slice(start, min(start + step, examples))
            images = use.read_images(part) if self.input_sum.dense and not self.reduce else None
            if images is not None and self._observe_images(images, groups, bias):
                continue
            a = use.read(part)
            a = a.mean(2, keepdim=True) if self.reduce else a
            self.input_sum.add_rows(a.transpose(0, 1).flatten(1, 2), groups, bias)
        count = examples * (1 if self.reduce else sizes[1])
        self.positions[groups] += count
        self.terms = (self.terms[0] + count, self.terms[1])

    def _observe_images(self, images: Images, groups: slice, bias: bool) -> bool:
        """Add the moments of patches without them; False where that is no less work."""
        key = (images.window, images.x.shape[1:], groups.start, groups.stop)
        total = self._pending[key][2] if key in self._pending else moment_sum(images)
        if total is None:
            return False
        self._pending[key] = groups, bias, total
        total.add(images.x.to(self.input_sum.dtype))
        if too_many((kept for _, _, kept in self._pending.values()), math.prod(self.input_sum.shape)):
            self._collect()
        return True

    def _collect(self) -> None:
        """Add what was summed over images since the last time."""
        while self._pending:
            groups, bias, total = self._pending.popitem()[1]
            found = total.collect()
            if self.input_sum.empty and not bias and found.products.shape == self.input_sum.shape:
                self.input_sum = Gram.of(found.products)  # large, and nobody else's
                continue
            self.input_sum.add_products(found.products, found.sums, found.count, groups, bias)

    def _observe_tokens(self, tokens: Tokens) -> None:
        self.output_sum.add_squares(tokens.squares(self.shape[1], self.output_sum.dtype))
        self.positions += tokens.count
        self.terms = (self.terms[0], self.terms[1] + tokens.count)

    def update(self, gradients: Gradients) -> None:
        for part in gradients.parts if isinstance(gradients, Uses) else (gradients,):
            if isinstance(part, TokenPair):
                g = part.present().flatten(0, 1)
                self.terms = (self.terms[0] + len(g), self.terms[1])
                self.input_sum.add_rows(g.unsqueeze(0), slice(None))
            else:
                assert isinstance(part, Pair)
                self._update(part)

    def _update(self, pair: Pair) -> None:
        groups = slice(None) if pair.groups is None else slice(pair.groups.start, pair.groups.stop)
        g = pair.g.sum(3, keepdim=True) if self.reduce else pair.g
        self.terms = (self.terms[0], self.terms[1] + g.shape[0] * g.shape[1] * g.shape[3])
        g = g.to(self.output_sum.dtype).permute(2, 0, 1, 3, 4)  # [Q, K, N, R, O]
        in_rows = g.stride(4) == 1 or g.shape[4] == 1
        if self.output_sum.dense and g.shape[4] <= g.shape[3] > 1 and not in_rows:
            # A small product per example is cheaper than a copy in another order.
            products = (g.mT @ g).sum((1, 2))
            self.output_sum.add_products(products, products[:, 0], 0, groups, bias=False)
        else:
            rows = g.flatten(1, 3)
            padded = len(rows) == 1 and g.shape[3] > 1 and not self._of_images  # as sequences may be
            kept = nonzero_rows(rows[0]) if padded else None
            self.output_sum.add_kept_rows(rows if kept is None else rows.index_select(1, kept), groups)

    def add_output_factor(self, factor: Tensor) -> None:
        """Add a whole `Σ g gᵀ` `[O, O]` that was not made of columns."""
        if self.output_sum.dense:
            self.output_sum.add_products(factor.unsqueeze(0), factor[:1], 0, slice(None), bias=False)
        else:
            self.output_sum.add_squares(factor.diagonal())
        self.terms = (self.terms[0], self.terms[1] + len(factor))

    def settle(self) -> None:
        self.input_sum.settle()
        self.output_sum.settle()

    def merge(self, other: Self) -> Self:
        if self.reduce != other.reduce:
            raise InputError("A kron='expand' and a kron='reduce' curvature do not merge.")
        return replace(
            self,
            input_sum=Gram.of(self.inputs + other.inputs),
            output_sum=Gram.of(self.outputs + other.outputs),
            positions=self.positions + other.positions,
            examples=self.examples + other.examples,
            terms=(self.terms[0] + other.terms[0], self.terms[1] + other.terms[1]),
        )

    def scale(self, factor: float) -> Self:
        return replace(
            self,
            input_sum=Gram.of(self.inputs * factor),
            output_sum=Gram.of(self.outputs * factor),
            positions=self.positions * factor,
            examples=self.examples * factor,
        )

    def decompose(self, shape: Tensor | None) -> Decomposition:
        output_shape, input_shape = self._separate(shape)
        count = self.positions.clamp(min=1).unsqueeze(1)
        inputs = self.inputs / (count if self.inputs.dim() == 2 else count.unsqueeze(2)).to(self.inputs.dtype)
        input_values, input_side = _decompose_side(inputs, input_shape, self.terms[0])
        output_values, output_side = _decompose_side(self.outputs, output_shape, self.terms[1])
        orthonormal = (output_shape is None, input_shape is None)
        basis = KroneckerBasis(self.shape, output_side, input_side, orthonormal)
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
        over_outputs, over_inputs = bool((values == values[:1, :1]).all()), bool((values == values[..., :1]).all())
        if over_outputs and over_inputs and shape.requires_grad:  # nothing tells along which side it will change
            logs = tensor.log()
            inputs = logs.mean((0, 1))
            return (logs - inputs).mean(2).exp(), inputs.exp()
        if over_outputs:
            return None, tensor[0, 0]
        if over_inputs:
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
        self.input_sum, self.output_sum = Gram.of(tensors["inputs"]), Gram.of(tensors["outputs"])
        self.positions = tensors["positions"]
        self.examples, *terms = tensors["counts"].tolist()
        self.terms = (int(terms[0]), int(terms[1]))

    def to(self, device: torch.device) -> Self:
        return replace(
            self,
            input_sum=Gram.of(self.inputs.to(device)),
            output_sum=Gram.of(self.outputs.to(device)),
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
