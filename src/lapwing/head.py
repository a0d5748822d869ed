"""A last layer whose output is the model's own: its gradients are what one would backpropagate, so nothing is."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.gradients import Layer
from lapwing.layers import ExampleAxis, PairRule
from lapwing.tape import Record


def head_inputs(record: Record, layer: Layer) -> Tensor | None:
    """`a: [N, I]`, with the 1 of the bias, if the layer's output is the model's `[N, C]`; else None."""
    uses = record.uses_of(layer)
    if len(uses) != 1 or layer.form != "pair" or layer.shape is None or record.outputs.dim() != 2:
        return None
    (index,) = uses
    use = record.uses[index]
    if not isinstance(use.rule, PairRule) or use.edge.node is not record.outputs.grad_fn:
        return None
    if record.axes[index] != ExampleAxis(0) or layer.shape[:2] != (1, record.outputs.shape[1]):
        return None
    a = use.rule.inputs(record.call(index), ExampleAxis(0), record.examples, slice(0, record.examples))[:, 0, 0]
    return a if len(layer.parameters) == 1 else torch.cat([a, a.new_ones(len(a), 1)], dim=1)
