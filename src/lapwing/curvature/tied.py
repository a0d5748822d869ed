"""Kronecker factors of a weight that is embedding and output head at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lapwing.curvature.accumulator import Decomposition
from lapwing.curvature.kronecker import KroneckerAccumulator
from lapwing.gradients import Gradients, Uses
from lapwing.gradients import Inputs as LayerInputs
from lapwing.gram import Gram
from lapwing.tokens import TokenPair, Tokens


@dataclass
class TiedAccumulator:
    """Factors `G_u ⊗ A_u` of each kind of use, both in the weight's own layout `[V, D]`.

    One Kronecker product stands for their sum: the factors, each scaled to trace 1, are added in the proportion of
    the traces `t_u = tr G_u tr A_u`, and the product has the trace `Σ_u t_u`.
    """

    head: KroneckerAccumulator
    embedding: KroneckerAccumulator
    kind: str = "kron"
    elementwise: bool = False

    def observe(self, inputs: LayerInputs) -> None:
        for use in inputs.uses:
            part = self.embedding if isinstance(use, Tokens) else self.head
            part.observe(replace(inputs, uses=(use,)))

    def update(self, gradients: Gradients) -> None:
        for part in gradients.parts if isinstance(gradients, Uses) else (gradients,):
            (self.embedding if isinstance(part, TokenPair) else self.head).update(part)

    def settle(self) -> None:
        self.head.settle()
        self.embedding.settle()

    def merge(self, other: Self) -> Self:
        return replace(self, head=self.head.merge(other.head), embedding=self.embedding.merge(other.embedding))

    def scale(self, factor: float) -> Self:
        return replace(self, head=self.head.scale(factor), embedding=self.embedding.scale(factor))

    def together(self) -> KroneckerAccumulator:
        """The one product, as if accumulated from a single use."""
        uses = (self.head, self.embedding)
        inputs = [use.inputs.double() / use.positions.clamp(min=1) for use in uses]
        outputs = [use.outputs.double() for use in uses]
        sizes = [(_trace(a), _trace(g)) for a, g in zip(inputs, outputs, strict=True)]
        traces = [a * g for a, g in sizes]
        total = sum(traces, torch.zeros_like(traces[0]))
        like = self.head.inputs
        if not bool(total > 0):
            return replace(self.head, positions=torch.ones_like(self.head.positions))
        left = _add([g * (t / size[1].clamp(min=1e-300)) for g, t, size in zip(outputs, traces, sizes, strict=True)])
        right = _add(
            [a * (t / total / size[0].clamp(min=1e-300)) for a, t, size in zip(inputs, traces, sizes, strict=True)]
        )
        terms = tuple(a + b for a, b in zip(self.head.terms, self.embedding.terms, strict=True))
        return replace(
            self.head,
            input_sum=Gram.of(right.to(like.dtype)),
            output_sum=Gram.of(left.to(like.dtype)),
            positions=torch.ones_like(self.head.positions),
            terms=(terms[0], terms[1]),
        )

    def decompose(self, shape: Tensor | None) -> Decomposition:
        return self.together().decompose(shape)

    def matrix(self) -> Tensor:
        return self.together().matrix()

    def tensors(self) -> dict[str, Tensor]:
        parts = {"head": self.head, "embedding": self.embedding}
        return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.tensors().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, part in (("head", self.head), ("embedding", self.embedding)):
            prefix = f"{name}."
            part.load({key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)})

    def to(self, device: torch.device) -> Self:
        return replace(self, head=self.head.to(device), embedding=self.embedding.to(device))


def _trace(side: Tensor) -> Tensor:
    """Of `[1, d, d]` or a diagonal `[1, d]`."""
    return (side if side.dim() == 2 else side.diagonal(dim1=1, dim2=2)).sum()


def _add(sides: list[Tensor]) -> Tensor:
    """Dense and diagonal sides together are dense."""
    if len({side.dim() for side in sides}) == 1:
        return torch.stack(sides).sum(0)
    return torch.stack([side if side.dim() == 3 else torch.diag_embed(side) for side in sides]).sum(0)
