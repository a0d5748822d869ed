"""Decompositions of the blocks of a curvature, made when first needed and shared by all posteriors
on it: a sweep over prior precision, noise or temperature never decomposes twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.curvature import Block, Curvature
from lapwing.curvature.accumulator import Decomposition
from lapwing.priors import GaussianPrior

_Key = list[tuple[str, Tensor, int]]


@dataclass(frozen=True)
class PriorOfBlock:
    """Prior precision of one block, `λ M` with `M = diag(shape)`, or `M = I` where there is no shape.

    `scale` is 0-d, or in the basis' shape where the basis is the identity.
    """

    scale: Tensor
    shape: Tensor | None


@dataclass
class Spectrum:
    """The decompositions of a curvature, cached for the last shape of the prior."""

    curvature: Curvature
    _plain: dict[int, Decomposition] = field(default_factory=dict, repr=False)
    _shaped: dict[int, tuple[Tensor, Decomposition]] = field(default_factory=dict, repr=False)
    _distances: tuple[_Key, dict[str, Tensor]] | None = field(default=None, repr=False)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.curvature.blocks

    def decompose(self, index: int, shape: Tensor | None) -> Decomposition:
        """Block `index` under a prior of this shape; differentiable in `shape`."""
        accumulator = self.blocks[index].accumulator
        if shape is None:
            if index not in self._plain:
                self._plain[index] = accumulator.decompose(None)
            return self._plain[index]
        if shape.requires_grad:
            return accumulator.decompose(shape)
        if index not in self._shaped or not torch.equal(self._shaped[index][0], shape):
            self._shaped[index] = (shape, accumulator.decompose(shape))
        return self._shaped[index][1]

    def decomposed(self) -> dict[int, Decomposition]:
        """The decompositions under a prior without a shape that were made so far, by block."""
        return dict(self._plain)

    def restore(self, index: int, decomposition: Decomposition) -> None:
        """Take over a decomposition that was made before."""
        self._plain[index] = decomposition

    def squared_distance(self, prior: GaussianPrior, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """`‖θ̃ − μ₀‖²` by parameter, 0-d; kept for the last prior mean, unless a gradient in it is wanted."""
        assert isinstance(prior.mean, Mapping)
        key = [(glob, value, value._version) for glob, value in prior.mean.items() if isinstance(value, Tensor)]
        if self._distances is not None and _same_key(self._distances[0], key):
            return self._distances[1]
        means = prior.means({name: value.shape for name, value in weights.items()})
        found = {
            name: (value.double() - means[name].to(value.device)).square().sum() for name, value in weights.items()
        }
        if not any(mean.requires_grad for mean in means.values()):  # else its graph may be used up
            self._distances = (key, found)
        return found

    def prior_of(self, index: int, precisions: dict[str, Tensor]) -> PriorOfBlock:
        """Write the precisions of a block's parameters as `λ M`."""
        block = self.blocks[index]
        values = [precisions[name] for name in block.parameters]
        if all(value.dim() == 0 for value in values) and all(_same(value, values[0]) for value in values[1:]):
            return PriorOfBlock(values[0], None)
        sizes = {name: size for layer in block.layers for name, size in zip(layer.parameters, layer.sizes, strict=True)}
        elements = block.pack({name: precisions[name].expand(sizes[name]) for name in block.parameters})
        if block.accumulator.elementwise:
            return PriorOfBlock(elements.reshape(self.decompose(index, None).basis.shape), None)
        # Relative to the first element, so that M does not change when all precisions do.
        return PriorOfBlock(elements[0], elements / elements[0])


def _same_key(left: _Key, right: _Key) -> bool:
    """The same tensors under the same names, not changed in place since, and no gradient in them wanted."""
    return len(left) == len(right) and all(
        a[0] == b[0] and a[1] is b[1] and a[2] == b[2] and not b[1].requires_grad
        for a, b in zip(left, right, strict=True)
    )


def _same(left: Tensor, right: Tensor) -> bool:
    if left is right:
        return True
    return not left.requires_grad and not right.requires_grad and bool(left == right)
