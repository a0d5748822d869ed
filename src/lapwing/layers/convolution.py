"""Convolutions in one, two and three dimensions: a linear layer at every position."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.layers.rule import Call, ExampleAxis, Moments, moments_of


class Convolution:
    name = "convolution"
    functions: tuple[Callable[..., Any], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)

    def read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return _bind(*args, **kwargs)

    def shape(self, call: Call) -> tuple[int, int, int]:
        groups = call.options["groups"]
        return groups, call.weight.shape[0] // groups, call.weight[0].numel()

    def example_axes(self, call: Call, output: torch.Size) -> range:
        return range(1 if len(output) == call.weight.dim() else 0)  # none where the input was a single example

    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        x = axis.first(call.input, examples)[part]
        count, others = x.shape[:2]
        patches = unfold(x.flatten(0, 1), call)  # [Q, I, n·k, *positions]
        patches = torch.unflatten(patches.flatten(3), 2, (count, others))
        return patches.permute(2, 0, 3, 4, 1).flatten(2, 3)

    def moments(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Moments:
        if call.weight.shape[2] == 1:
            return moments_of(self.inputs(call, axis, examples, part))
        x = axis.first(call.input, examples)[part].flatten(0, 1)
        return row_moments(x, call)

    def gradients(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        groups, outputs, _ = self.shape(call)
        g = axis.first(g, examples, skip=1).flatten(4).unflatten(3, (groups, outputs))  # [K, N, k, Q, O, R]
        return g.permute(0, 1, 3, 2, 5, 4).flatten(3, 4)


def unfold(x: Tensor, call: Call) -> Tensor:
    """The patches that each position sees: `[B, C, *space]` to `[Q, I, B, *positions]`.

    In this order one copy is enough, and `Σ a aᵀ` over examples and positions is one matrix product.
    """
    kernel = call.weight.shape[2:]
    x = _windows(functional.pad(x, _padding(call)), call, first=0)  # [B, C, *positions, *kernel]
    space = range(2, 2 + len(kernel))
    x = x.permute(1, *(axis + len(kernel) for axis in space), 0, *space)  # [C, *kernel, B, *positions], still a view
    return x.reshape(call.options["groups"], -1, *x.shape[1 + len(kernel) :])


def row_moments(x: Tensor, call: Call) -> Moments:
    """`Σ a aᵀ` from products of rows, each row unfolded along the other dimensions only.

    With `T_u` the patches of row u, one row high, the block of kernel rows i and j is `Σ_y T_{ys+i} T_{ys+j}ᵀ`:
    a sum over u of `T_u T_{u+d}ᵀ` with `d = j − i`, so one product for every (u, d) serves all pairs (i, j).
    That is about k times less work than unfolding k rows, and k times less memory.
    """
    groups, size, step, gap = (
        call.options["groups"], call.weight.shape[2], call.options["stride"][0], call.options["dilation"][0]
    )  # fmt: skip
    x = functional.pad(x, _padding(call))
    positions = (x.shape[2] - gap * (size - 1) - 1) // step + 1
    x = torch.unflatten(_windows(x, call, first=1), 1, (groups, -1))  # [B, Q, C/Q, rows, *positions, *kernel]
    rest = (x.dim() - 4) // 2
    order = (1, 3, 2, *range(4 + rest, 4 + 2 * rest), 0, *range(4, 4 + rest))
    x = x.permute(order)  # [Q, rows, C/Q, *kernel, B, *positions]
    channels, width = x.shape[2], x.shape[3 : 3 + rest].numel()
    rows = x.reshape(*x.shape[:2], channels * width, -1)  # T: [Q, rows, (C/Q)·kernel, B·positions]
    products = rows.new_zeros(groups, channels, size, width, channels, size, width)
    for offset in range(size):
        shift = offset * gap
        between = rows[:, : rows.shape[1] - shift] @ rows[:, shift:].mT  # T_u T_{u+d}ᵀ: [Q, rows − d, ·, ·]
        chosen = _rows_of(size - offset, between.shape[1], positions, step, gap).to(rows)
        blocks = (chosen @ between.flatten(2)).reshape(groups, size - offset, channels, width, channels, width)
        products.diagonal(offset, 2, 5).copy_(blocks.movedim(1, -1))
        products.diagonal(-offset, 2, 5).copy_(blocks.permute(0, 4, 5, 2, 3, 1))
    chosen = _rows_of(size, rows.shape[1], positions, step, gap).to(rows)
    sums = torch.unflatten(chosen @ rows.sum(3), 2, (channels, width)).transpose(1, 2)
    inputs = channels * size * width
    return Moments(products.reshape(groups, inputs, inputs), sums.reshape(groups, inputs), positions * rows.shape[3])


@functools.lru_cache(maxsize=256)
def _rows_of(count: int, rows: int, positions: int, step: int, gap: int) -> Tensor:
    """1 where kernel row i reads row u at some position: `[count, rows]`."""
    kernel_row, row = torch.arange(count).unsqueeze(1) * gap, torch.arange(rows)
    distance = row - kernel_row
    return (distance >= 0) & (distance % step == 0) & (distance < positions * step)


def _windows(x: Tensor, call: Call, first: int) -> Tensor:
    """A view of the windows along the spatial dimensions from `first` on: `[B, C, *space, *kernel]`."""
    kernel, stride, dilation = call.weight.shape[2:], call.options["stride"], call.options["dilation"]
    for dimension in range(first, len(kernel)):
        span = dilation[dimension] * (kernel[dimension] - 1) + 1
        x = x.unfold(2 + dimension, span, stride[dimension])[..., :: dilation[dimension]]
    return x


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
