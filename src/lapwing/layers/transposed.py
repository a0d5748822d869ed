"""Transposed convolutions: a convolution of the input with zeros between its entries, the kernel turned around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.layers.convolution import channels_of, each, positions_of
from lapwing.layers.rule import Call, ExampleAxis, Layout, PairRule
from lapwing.layers.window import Window
from lapwing.views import Owner


class TransposedConvolution(PairRule):
    name = "transposed convolution"
    of_images = True
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (
        functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d,
    )  # fmt: skip

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        x, w, b, options = _bind(*args, **kwargs)
        weight, bias = owner(w), owner(b)
        if weight is None or not weight.plain:
            return None
        groups = options["groups"]
        inputs, outputs, kernel = w.shape[0] // groups, w.shape[1], tuple(w.shape[2:])
        layout = Layout((groups, inputs, outputs, *kernel), (0, 2, 1, *range(3, 3 + len(kernel))))
        shape = (groups, outputs, w.numel() // (groups * outputs))
        name = bias.name if bias is not None and bias.plain else None
        return Call(x, weight.name, name, shape, options, None, layout)

    def prepare(self, call: Call) -> Call:
        """Put `stride − 1` zeros between the entries of the input `[*lead, C, *space]`."""
        x, steps = call.input, call.options["steps"]
        space = x.shape[x.dim() - len(steps) :]
        sizes = [(size - 1) * step + 1 for size, step in zip(space, steps, strict=True)]
        stuffed = x.new_zeros(*x.shape[: x.dim() - len(steps)], *sizes)
        entries: tuple[Any, ...] = (..., *(slice(None, None, step) for step in steps))
        stuffed[entries] = x
        return replace(call, input=stuffed)

    def bias_align(self, output: Tensor, weight: Tensor) -> tuple[int, ...] | None:
        return channels_of(output, weight.dim() - 2)

    def example_axes(self, call: Call, output: torch.Size) -> range:
        return range(1 if len(output) == call.options["window"].dimensions + 2 else 0)

    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        window: Window = call.options["window"]
        groups = call.options["groups"]
        patches = window.patches(axis.first(call.input, examples)[part], groups)
        turned: Tensor = patches.unflatten(-1, (-1, *window.kernel)).flip(tuple(range(-window.dimensions, 0)))
        return turned.flatten(3)

    def gradients_of_arranged(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        return positions_of(g, call, axis, examples)


def _bind(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    kernel = tuple(weight.shape[2:])
    steps, cut, extra, gaps = (each(value, len(kernel)) for value in (stride, padding, output_padding, dilation))
    before = tuple(gap * (size - 1) - c for size, gap, c in zip(kernel, gaps, cut, strict=True))
    after = tuple(amount + e for amount, e in zip(before, extra, strict=True))
    window = Window(kernel, (1,) * len(kernel), gaps, before, after)
    return input, weight, bias, {"window": window, "groups": groups, "steps": steps}
