"""Convolutions in one, two and three dimensions: a linear layer at every position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.layers.rule import Call, ExampleAxis


class Convolution:
    name = "convolution"
    functions: tuple[Callable[..., Any], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)

    def read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return _bind(*args, **kwargs)

    def shape(self, call: Call) -> tuple[int, int, int]:
        groups = call.options["groups"]
        return groups, call.weight.shape[0] // groups, call.weight[0].numel()

    def example_axes(self, output: Tensor) -> range:
        return range(1)

    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        x = axis.first(call.input, examples)[part]
        count, others = x.shape[:2]
        patches = unfold(x.flatten(0, 1), call)  # [Q, I, n·k, *positions]
        patches = torch.unflatten(patches.flatten(3), 2, (count, others))
        return patches.permute(2, 0, 3, 4, 1).flatten(2, 3)

    def gradients(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        groups, outputs, _ = self.shape(call)
        g = axis.first(g, examples, skip=1).flatten(4).unflatten(3, (groups, outputs))  # [K, N, k, Q, O, R]
        return g.permute(0, 1, 3, 2, 5, 4).flatten(3, 4)


def unfold(x: Tensor, call: Call) -> Tensor:
    """The patches that each position sees: `[B, C, *space]` to `[Q, I, B, *positions]`.

    In this order one copy is enough, and `Σ a aᵀ` over examples and positions is one matrix product.
    """
    kernel = call.weight.shape[2:]
    x = functional.pad(x, _padding(call)).transpose(0, 1)
    sizes = zip(kernel, call.options["stride"], call.options["dilation"], strict=True)
    for dimension, (size, step, gap) in enumerate(sizes, start=2):
        x = x.unfold(dimension, gap * (size - 1) + 1, step)[..., ::gap]
    order = (0, *range(2 + len(kernel), 2 + 2 * len(kernel)), *range(1, 2 + len(kernel)))
    x = x.permute(order)  # [C, *kernel, B, *positions], still a view
    return x.reshape(call.options["groups"], -1, *x.shape[1 + len(kernel) :])


def _padding(call: Call) -> list[int]:
    """Padding as `functional.pad` wants it: last dimension first, before and after."""
    padding = call.options["padding"]
    if padding == "valid":
        pairs = [(0, 0)] * (call.weight.dim() - 2)
    elif padding == "same":
        spans = [gap * (size - 1) for size, gap in zip(call.weight.shape[2:], call.options["dilation"], strict=True)]
        pairs = [(span // 2, span - span // 2) for span in spans]
    else:
        pairs = [(amount, amount) for amount in padding]
    return [amount for pair in reversed(pairs) for amount in pair]


def _bind(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Call:
    dimensions = weight.dim() - 2
    options = {
        "stride": _each(stride, dimensions),
        "padding": padding if isinstance(padding, str) else _each(padding, dimensions),
        "dilation": _each(dilation, dimensions),
        "groups": groups,
    }
    return Call(input, weight, bias, options)


def _each(value: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dimensions
    values = tuple(int(entry) for entry in value)
    return values * dimensions if len(values) == 1 else values
