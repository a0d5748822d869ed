"""Uses of a layer, read by their rules: its inputs, and its per-example gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.gradients import Gradients, Inputs, Layer, Pair, Rows, UseInputs, Uses
from lapwing.layers import Call, ExampleAxis, PairRule, RowRule, TokenRule
from lapwing.layers.window import Images
from lapwing.tokens import TokenPair, Tokens

if TYPE_CHECKING:
    from lapwing.tape import Record


def inputs_of(record: Record, layer: Layer, uses: Sequence[int]) -> Inputs:
    """The inputs of all uses of a layer with a Kronecker form."""
    return Inputs(tuple(_input(record, layer, i) for i in uses), record.examples, len(layer.parameters) == 2)


def gradients_of(
    record: Record,
    layer: Layer,
    uses: Sequence[int],
    gradients: Sequence[Tensor],
    column: int,
    examples: range | None = None,
) -> Gradients:
    """The per-example gradients of a layer from those at the outputs of its uses, `[K, *output]` each.

    Of a single use whose outputs have their examples first, they may be those of some `examples` alone.
    """
    examples = range(record.examples) if examples is None else examples
    if layer.form == "rows":
        own = [rows_of(record, layer, i, g) for i, g in zip(uses, gradients, strict=True)]
        return Rows(own[0] if len(own) == 1 else torch.stack(own).sum(0), column)
    if layer.form == "pair" and all(record.uses[i].call.rows is None for i in uses) and layer.shape is not None:
        whole = [_pair_gradient(record, layer, i, g, len(examples)) for i, g in zip(uses, gradients, strict=True)]
        g = whole[0] if len(whole) == 1 else torch.cat(whole, dim=3)
        return Pair(inputs_of(record, layer, uses).of(examples), g, column, examples.start)
    parts = tuple(_part(record, layer, i, g, column) for i, g in zip(uses, gradients, strict=True))
    assert layer.shape is not None
    return parts[0] if len(parts) == 1 and isinstance(parts[0], TokenPair) else Uses(parts, layer.shape)


def _part(record: Record, layer: Layer, index: int, gradient: Tensor, column: int) -> Pair | TokenPair:
    rule, call, axis = _read(record, index)
    if isinstance(rule, TokenRule):
        assert layer.shape is not None
        g = rule.gradients(call, gradient.to(record.dtype), axis, record.examples)
        return TokenPair(rule.tokens(call, axis, record.examples), g, layer.shape[1], column)
    g = _pair_gradient(record, layer, index, gradient, record.examples)
    return Pair(inputs_of(record, layer, [index]), g, column, groups=_groups(layer, call))


def rows_of(record: Record, layer: Layer, index: int, gradient: Tensor) -> Tensor:
    """`[K, N, p]`, of those of the use's parameters that the layer has."""
    rule, call, axis = _read(record, index)
    assert isinstance(rule, RowRule)
    rows = rule.rows(call, gradient.to(record.dtype), axis, record.examples)
    if call.entries is not None:
        return functional.pad(rows, (call.entries.start, layer.size - call.entries.stop))
    names = tuple(name for name in (call.weight, call.bias) if name is not None)
    if names == layer.parameters:
        return rows
    parts = dict(zip(names, rows.split([record.parameters[name].numel() for name in names], dim=2), strict=True))
    return torch.cat([parts[name] for name in layer.parameters], dim=2)


def _pair_gradient(record: Record, layer: Layer, index: int, gradient: Tensor, examples: int) -> Tensor:
    rule, call, axis = _read(record, index)
    assert isinstance(rule, PairRule)
    assert layer.shape is not None
    g = rule.gradients(call, gradient.to(record.dtype), axis, examples)
    outputs = layer.shape[1]
    if g.shape[4] == outputs:
        return g
    split: Tensor = g.unflatten(4, (-1, outputs)).squeeze(2).transpose(2, 3)  # [K, N, 1, R, q·O] to [K, N, q, R, O]
    return split


def _input(record: Record, layer: Layer, index: int) -> UseInputs | Tokens:
    rule, call, axis = _read(record, index)
    if isinstance(rule, TokenRule):
        return rule.tokens(call, axis, record.examples)
    assert isinstance(rule, PairRule)
    assert layer.shape is not None
    assert call.shape is not None
    examples, copies = record.examples, call.shape[1] // layer.shape[1]
    groups = _groups(layer, call)

    def read(part: slice) -> Tensor:
        a = rule.inputs(call, axis, examples, part)
        return a if copies == 1 else a.expand(-1, copies, -1, -1)

    def images(part: slice) -> Images | None:
        return rule.images(call, axis, examples, part) if copies == 1 else None

    return UseInputs(read, images, groups)


def _groups(layer: Layer, call: Call) -> range | None:
    """Which of the layer's groups a use of some rows of its weight reads."""
    assert layer.shape is not None
    if call.rows is None:
        return None
    return range(call.rows.start // layer.shape[1], call.rows.stop // layer.shape[1])


def _read(record: Record, index: int) -> tuple[object, Call, ExampleAxis]:
    axis = record.axes[index]
    assert axis is not None
    return record.uses[index].rule, record.call(index), axis
