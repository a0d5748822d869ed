"""The largest number of every window of an image: torch's own kernel goes from number to number, and takes as long as
the convolution before it. Here whole arrays are compared, shifted against each other, first along the rows of an image
and then along its columns, so that of equal numbers the first one counts, as in torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.layers.window import Window
from lapwing.matmul import is_plain

_SMALL = 2**14  # numbers, below which a few more calls cost more than they gain
_LARGE = 5  # size of a window, above which so many comparisons do


def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """What `torch.nn.functional.max_pool2d` returns of images `[N, C, H, W]`; None where torch is the one to ask."""
    usual = input.dim() == 4 and not ceil_mode and not return_indices and is_plain(input) and input.is_contiguous()
    usual = usual and input.dtype in (torch.float32, torch.float64)
    absent = stride is None or (isinstance(stride, tuple | list) and not stride)
    given = (kernel_size, kernel_size if absent else stride, dilation, padding)
    kernel, step, gaps, edges = (_two(value) for value in given)
    if not usual or input.numel() < _SMALL or kernel is None or step is None or gaps is None or edges is None:
        return None
    window = Window(kernel, step, gaps, edges, edges)
    if not _fits(window, input.shape[2:]):
        return None
    pooled: Tensor = MaxPool2DWithIndices.apply(input, window)  # type: ignore[no-untyped-call]
    # Of numbers that are not, or padding where there is nothing larger, torch knows which one counts.
    return pooled if bool(pooled.detach().sum().isfinite()) else None


class MaxPool2DWithIndices(torch.autograd.Function):
    """Autograd's graph has it by torch's name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        pooled, indices = _largest(x, window)
        ctx.save_for_backward(x, indices)
        ctx.window = window
        return pooled

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, indices = ctx.saved_tensors
        window = ctx.window
        found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            g, x, window.kernel, window.stride, window.before, window.dilation, False, indices
        )
        return found, None


def _two(value: object) -> tuple[int, int] | None:
    """The value along each dimension, where it is given by whole numbers; torch knows what else it takes."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    values = values * 2 if len(values) == 1 else values
    return values if len(values) == 2 and all(type(entry) is int for entry in values) else None


def _fits(window: Window, space: torch.Size) -> bool:
    """Whether torch would take this window, and whether it is small."""
    legal = all(0 <= 2 * edge <= size for edge, size in zip(window.before, window.kernel, strict=True))
    legal = legal and min(*window.kernel, *window.stride, *window.dilation) > 0
    return legal and 1 < max(window.kernel) <= _LARGE and min(window.positions(space)) > 0


def _largest(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """The largest numbers `[N, C, *positions]`, and which of the `H·W` pixels they are."""
    height, width = window.positions(x.shape[2:])
    pairs = zip(reversed(window.before), reversed(window.after), strict=True)
    amounts = [amount for pair in pairs for amount in pair]
    padded = functional.pad(x, amounts, value=-torch.inf) if any(amounts) else x
    best, *others = _shifted(padded, 1, window, width)
    column = best.new_zeros((), dtype=torch.int8).expand(best.shape)
    for entry, other in enumerate(others, 1):
        column = _latest(column, (other > best).view(torch.int8), entry)
        best = torch.maximum(best, other)
    best, *others = _shifted(best, 0, window, height)
    column, *columns = _shifted(column, 0, window, height)
    row = column.new_zeros(()).expand(column.shape)
    for entry, (other, own) in enumerate(zip(others, columns, strict=True), 1):
        greater = (other > best).view(torch.int8)
        row = _latest(row, greater, entry)
        column = (own ^ column).bitwise_and_(-greater).bitwise_xor_(column)  # its own where it is greater
        best = torch.maximum(best, other)
    # A view of the images themselves is not to be changed in place.
    best = best.clone(memory_format=torch.contiguous_format) if best._is_view() else best.contiguous()
    return best, _pixels(row, column, window, x.shape[3])


def _latest(before: Tensor, greater: Tensor, entry: int) -> Tensor:
    """The largest entry so far at which a number was greater than all before: 1 for the first that is asked."""
    return greater if entry == 1 else torch.maximum(before, greater * entry)


def _shifted(x: Tensor, axis: int, window: Window, count: int) -> Iterator[Tensor]:
    """For each entry of the window along a spatial axis what it sees at each position."""
    gap, step = window.dilation[axis], window.stride[axis]
    for entry in range(window.kernel[axis]):
        seen = x.narrow(2 + axis, entry * gap, step * (count - 1) + 1)
        yield seen[:, :, ::step] if axis == 0 else seen[..., ::step]


def _pixels(row: Tensor, column: Tensor, window: Window, width: int) -> Tensor:
    """The number of the pixel that an entry of the window sees, by its row and column at each position."""
    small = torch.int16 if window.kernel[0] * window.dilation[0] * width < 2**14 else torch.int64
    within = column.to(small) * window.dilation[1]
    within = within.add_(row.to(small), alpha=window.dilation[0] * width).long()
    down, right = (
        torch.arange(size, device=row.device) * step - edge
        for size, step, edge in zip(row.shape[2:], window.stride, window.before, strict=True)
    )
    return within.add_((down * width).unsqueeze(1) + right)
