"""Linear layers: `x Wᵀ + b` with any number of leading dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.layers.rule import Call, ExampleAxis, Moments, moments_of


class Linear:
    name = "linear"
    functions: tuple[Callable[..., Any], ...] = (functional.linear,)

    def read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return _bind(*args, **kwargs)

    def shape(self, call: Call) -> tuple[int, int, int]:
        outputs, inputs = call.weight.shape
        return 1, outputs, inputs

    def example_axes(self, call: Call, output: torch.Size) -> range:
        return range(len(output) - 1)

    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        return axis.first(call.input, examples)[part].flatten(1, -2).unsqueeze(1)

    def moments(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Moments:
        return moments_of(self.inputs(call, axis, examples, part))

    def gradients(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        return axis.first(g, examples, skip=1).flatten(2, -2).unsqueeze(2)


def _bind(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    return Call(input, weight, bias, {})
