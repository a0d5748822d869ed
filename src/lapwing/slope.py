"""The gradient `Σ_n J_nᵀ ∇_f log p`, from a column that is backpropagated anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.gradients import Layer
from lapwing.layers import PairRule, RowRule, TokenRule

if TYPE_CHECKING:
    from lapwing.tape import Record


@dataclass
class Slope:
    """`Σ_n s_n J_nᵀ v_n` by layer, with `v` the first column and `scale` s `[N]`; `sums` are in the layers' layout."""

    scale: Tensor
    sums: dict[str, Tensor]

    def add(self, record: Record, layer: Layer, uses: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Add a layer, from the gradients of the first column at the outputs of its uses, `[*output]` each."""
        for index, gradient in zip(uses, gradients, strict=True):
            self._add(layer, total_of(record, layer, index, _scaled(record, index, gradient, self.scale)))

    def add_rows(self, layer: Layer, rows: Tensor, start: int) -> None:
        """Add the gradients themselves of some examples, `[n, p]`."""
        self._add(layer, self.scale[start : start + len(rows)].to(rows.dtype) @ rows)

    def _add(self, layer: Layer, values: Tensor) -> None:
        known = self.sums.get(layer.name)
        self.sums[layer.name] = values if known is None else known.add_(values)


def _scaled(record: Record, index: int, gradient: Tensor, scale: Tensor) -> Tensor:
    """A gradient at a use, `[*output]`, times a number of each example's own, its dimensions arranged."""
    axis = record.axes[index]
    assert axis is not None
    arranged = record.uses[index].rule.arrange(record.uses[index].call, gradient.unsqueeze(0))[0]
    spread = axis.spread(scale.to(record.dtype), arranged.shape[axis.axis])
    return arranged.to(record.dtype) * spread.view([-1 if i == axis.axis else 1 for i in range(arranged.dim())])


def total_of(record: Record, layer: Layer, index: int, arranged: Tensor) -> Tensor:
    """The gradient of a layer through one use, summed over the examples: `[p]`, from the gradient at its output."""
    use, axis = record.uses[index], record.axes[index]
    assert axis is not None
    rule, call, examples = use.rule, record.call(index), record.examples
    if isinstance(rule, RowRule):
        rows = rule.rows(call, arranged.unsqueeze(0), axis, examples)[0].sum(0)
        names = [name for name in (call.weight, call.bias) if name is not None]
        if call.rows is not None:
            return functional.pad(rows, (call.rows.start, layer.size - call.rows.stop))
        parts = dict(zip(names, rows.split([record.parameters[name].numel() for name in names]), strict=True))
        return torch.cat([parts[name] for name in layer.parameters])
    assert layer.shape is not None
    if isinstance(rule, TokenRule):
        return rule.total(call, arranged, axis, examples, layer.shape[1])
    assert isinstance(rule, PairRule)
    weight, bias = rule.total(call, arranged, axis, examples)  # [Q·O, I], [Q·O]
    whole = weight if len(layer.parameters) == 1 else torch.cat([weight, bias.unsqueeze(1)], dim=1)
    if call.rows is not None:
        rows_in_all = layer.shape[0] * layer.shape[1]
        whole = functional.pad(whole, (0, 0, call.rows.start, rows_in_all - call.rows.stop))
    return whole.flatten()
