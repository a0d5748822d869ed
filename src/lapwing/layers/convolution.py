"""Convolutions in one, two and three dimensions: a linear layer at every position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from lapwing import channels_last
from lapwing.layers.rule import Call, ExampleAxis, PairRule
from lapwing.layers.window import Images, Window, trimmed
from lapwing.matmul import linear
from lapwing.views import Owner


class Convolution(PairRule):
    name = "convolution"
    of_images = True
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (functional.conv1d, functional.conv2d, functional.conv3d)

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        x, w, b, options = _bind(*args, **kwargs)
        weight, bias = owner(w), owner(b)
        if weight is None or not weight.plain:
            return None
        groups = options["groups"]
        shape = (groups, w.shape[0] // groups, w[0].numel())
        return Call(
            x,
            weight.name,
            bias.name if bias is not None and bias.plain else None,
            shape,
            options,
        )

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, w, b, options = _bind(*args, **kwargs)
        window, groups = options["window"], options["groups"]
        by_name = isinstance(kwargs.get("padding", args[4] if len(args) > 4 else 0), str)
        if by_name or not _usual(x, w, b, window, groups):
            return function(*args, **kwargs)
        last = channels_last.are_last(x)
        fewer, entries = trimmed(window, x.shape[2:])
        kernels = w if fewer == window else w[(slice(None), slice(None), *entries)]
        matrix = fewer.matrix(kernels, x.shape, groups, last)
        if matrix is not None:
            return _of_one_product(x, matrix, b, fewer.positions(x.shape[2:]), last)
        kernels = channels_last.put_last(kernels) if last else kernels
        return function(x, kernels, b, window.stride, fewer.before, window.dilation, groups)

    def bias_align(self, output: Tensor, weight: Tensor) -> tuple[int, ...] | None:
        return channels_of(output, weight.dim() - 2)

    def example_axes(self, call: Call, output: torch.Size) -> range:
        return range(1 if len(output) == call.options["window"].dimensions + 2 else 0)  # none for a single example

    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        window: Window = call.options["window"]
        return window.patches(axis.first(call.input, examples)[part], call.options["groups"])

    def add_total(
        self, call: Call, g: Tensor, axis: ExampleAxis, examples: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        window: Window = call.options["window"]
        assert call.shape is not None
        groups, _, inputs = call.shape
        kernels = weight.unflatten(1, (inputs // prod(window.kernel), *window.kernel))
        x = call.input.to(g.dtype)
        x = channels_last.put_last(x) if channels_last.are_last(g) else x
        if window.symmetric:
            window, entries = trimmed(window, x.shape[x.dim() - window.dimensions :])
            kernels = kernels[(slice(None), slice(None), *entries)]
        else:
            x, window = window.pad(x), window.unpadded
        kernels += window.weight_gradient(x, g, groups)
        if bias is not None:
            bias += g.sum([i for i in range(g.dim()) if i != 1])

    def images(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Images | None:
        window: Window = call.options["window"]
        if window.kernel[0] == 1:
            return None
        return Images(window, axis.first(call.input, examples)[part].flatten(0, 1), call.options["groups"])

    def gradients_of_arranged(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        return positions_of(g, call, axis, examples)


def _of_one_product(x: Tensor, matrix: Tensor, b: Tensor | None, positions: tuple[int, ...], last: bool) -> Tensor:
    """A convolution as a linear layer of all pixels; its result is no view, so that it can be changed in place."""
    count = prod(positions)
    if b is not None:
        b = b.repeat(count) if last else b.repeat_interleave(count)
    flat = linear(channels_last.as_rows(x, last), matrix.contiguous(), b)
    channels = flat.shape[1] // count
    if not last or count == 1:
        images: Tensor = torch.ops.aten._unsafe_view(flat, [len(x), channels, *positions])
        return images
    return torch.unflatten(flat, 1, (*positions, channels)).permute(0, 3, 1, 2).clone()


def channels_of(output: Tensor, dimensions: int) -> tuple[int, ...]:
    """Sizes of 1 but for the channels: `[..., C, *space]`."""
    axis = output.dim() - 1 - dimensions
    return tuple(size if i == axis else 1 for i, size in enumerate(output.shape))


def positions_of(g: Tensor, call: Call, axis: ExampleAxis, examples: int) -> Tensor:
    """Gradients at the outputs of a convolution `[K, N·k, C, *space]` as `[K, N, Q, R, O]`."""
    assert call.shape is not None
    groups, outputs, _ = call.shape
    g = axis.first(g, examples, skip=1).flatten(4).unflatten(3, (groups, outputs))  # [K, N, k, Q, O, R]
    return g.permute(0, 1, 3, 2, 5, 4).flatten(3, 4)


def _usual(x: Tensor, w: Tensor, b: Tensor | None, window: Window, groups: int) -> bool:
    """Whether a convolution is of images `[B, C, *space]`, padded alike on both sides, and its sizes fit."""
    return (
        x.dim() == w.dim()
        and x.shape[1] == w.shape[1] * groups
        and (b is None or b.shape == w.shape[:1])
        and window.symmetric
        and x.shape[2:].numel() > 0
        and all(count > 0 for count in window.positions(x.shape[2:]))
    )


def _bind(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    dimensions = weight.dim() - 2
    window = Window(tuple(weight.shape[2:]), each(stride, dimensions), each(dilation, dimensions), (), ())
    before, after = _padding(padding, window)
    window = Window(window.kernel, window.stride, window.dilation, before, after)
    return input, weight, bias, {"window": window, "groups": groups}


def _padding(padding: int | str | Sequence[int], window: Window) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding before and after, by dimension."""
    if padding == "same":
        spans = [gap * (size - 1) for size, gap in zip(window.kernel, window.dilation, strict=True)]
        return tuple(span // 2 for span in spans), tuple(span - span // 2 for span in spans)
    amounts = (0,) * window.dimensions if isinstance(padding, str) else each(padding, window.dimensions)
    return amounts, amounts


def each(value: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    """One value per dimension."""
    if isinstance(value, int):
        return (value,) * dimensions
    values = tuple(int(entry) for entry in value)
    return values * dimensions if len(values) == 1 else values
