"""The gradient `Σ_n J_nᵀ ∇_f log p` from one column: its own, or one of the curvature's that has its direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.gradients import Layer
from lapwing.layers import PairRule, RowRule, TokenRule
from lapwing.reading import rows_of

if TYPE_CHECKING:
    from lapwing.tape import Record


@dataclass
class Slope:
    """`Σ_n s_n J_nᵀ v_n` by layer, with `v` the first column and `scale` s `[N]`, 1 unless given; `sums` are in the
    layers' layout.
    """

    sums: dict[str, Tensor]
    scale: Tensor | None = None

    @staticmethod
    def of(sums: dict[str, Tensor], scale: Tensor) -> Slope:
        """With a `scale` that may be 1 for all examples, so that there is nothing to multiply."""
        return Slope(sums, None if bool((scale == 1).all()) else scale)

    def add(self, record: Record, layer: Layer, uses: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Add a layer, from the gradients of the first column at the outputs of its uses, `[*output]` each."""
        into = self._into(layer, record.dtype, record.outputs.device)
        with torch.no_grad():
            for index, gradient in zip(uses, gradients, strict=True):
                add_total(record, layer, index, _scaled(record, index, gradient, self.scale), into)

    def add_rows(self, layer: Layer, rows: Tensor, start: int) -> None:
        """Add the gradients themselves of some examples, `[n, p]`."""
        into = self._into(layer, rows.dtype, rows.device)
        scale = rows.new_ones(len(rows)) if self.scale is None else self.scale[start : start + len(rows)].to(rows.dtype)
        into += scale @ rows.detach()

    def _into(self, layer: Layer, dtype: torch.dtype, device: torch.device) -> Tensor:
        if layer.name not in self.sums:
            self.sums[layer.name] = torch.zeros(layer.size, dtype=dtype, device=device)
        return self.sums[layer.name]


def _scaled(record: Record, index: int, gradient: Tensor, scale: Tensor | None) -> Tensor:
    """A gradient at a use, `[*output]`, times a number of each example's own, its dimensions arranged."""
    axis = record.axes[index]
    assert axis is not None
    arranged = record.uses[index].rule.arrange(record.uses[index].call, gradient.unsqueeze(0))[0]
    if scale is None:
        return arranged.to(record.dtype)
    spread = axis.spread(scale.to(record.dtype), arranged.shape[axis.axis])
    return arranged.to(record.dtype) * spread.view([-1 if i == axis.axis else 1 for i in range(arranged.dim())])


def add_total(record: Record, layer: Layer, index: int, arranged: Tensor, into: Tensor) -> None:
    """Add the gradient of a layer through one use, summed over the examples, from that at its output to `[p]`."""
    use, axis = record.uses[index], record.axes[index]
    assert axis is not None
    rule, call, examples = use.rule, record.call(index), record.examples
    if isinstance(rule, RowRule):
        into += rows_of(record, layer, index, arranged.unsqueeze(0))[0].sum(0)
        return
    assert layer.shape is not None
    if isinstance(rule, TokenRule):
        rule.add_total(call, arranged, axis, examples, into.view(layer.shape[1:]))
        return
    assert isinstance(rule, PairRule)
    matrix = into.view(layer.shape[0] * layer.shape[1], -1)
    matrix = matrix if call.rows is None else matrix[call.rows.start : call.rows.stop]
    biased = len(layer.parameters) == 2
    weight, bias = (matrix[:, :-1], matrix[:, -1]) if biased else (matrix, None)
    rule.add_total(call, arranged, axis, examples, weight, bias)
