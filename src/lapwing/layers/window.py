"""The window that a convolution slides over its input: patches, and their moments without the patches."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.layers.rule import Moments


@dataclass(frozen=True)
class Window:
    """Kernel sizes, stride, dilation and padding (negative: cropping), one entry per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def dimensions(self) -> int:
        return len(self.kernel)

    def patches(self, x: Tensor, groups: int) -> Tensor:
        """What each position sees: `[n, k, C, *space]` to `[n, Q, k·positions, I]`."""
        count, others = x.shape[:2]
        x = self._slide(self._pad(x.flatten(0, 1)), first=0)  # [B, C, *positions, *kernel]
        space = range(2, 2 + self.dimensions)
        # [C, *kernel, B, *positions], still a view: in this order one copy is enough.
        x = x.permute(1, *(axis + self.dimensions for axis in space), 0, *space)
        x = x.reshape(groups, -1, count, others, x.shape[2 + self.dimensions :].numel())
        return x.permute(2, 0, 3, 4, 1).flatten(2, 3)

    def moments(self, x: Tensor, groups: int) -> Moments:
        """`Σ a aᵀ` from products of rows, each row unfolded along the other dimensions only; `x: [B, C, *space]`.

        With `T_u` the patches of row u, one row high, the block of kernel rows i and j is `Σ_y T_{ys+i} T_{ys+j}ᵀ`:
        a sum over u of `T_u T_{u+d}ᵀ` with `d = j − i`, so one product for every (u, d) serves all pairs (i, j).
        That is about k times less work than unfolding k rows, and k times less memory.
        """
        size, step, gap = self.kernel[0], self.stride[0], self.dilation[0]
        x = self._pad(x)
        positions = (x.shape[2] - gap * (size - 1) - 1) // step + 1
        x = torch.unflatten(self._slide(x, first=1), 1, (groups, -1))  # [B, Q, C/Q, rows, *positions, *kernel]
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
        count = positions * rows.shape[3]
        return Moments(products.reshape(groups, inputs, inputs), sums.reshape(groups, inputs), count)

    def _pad(self, x: Tensor) -> Tensor:
        pairs = zip(reversed(self.before), reversed(self.after), strict=True)
        amounts = [amount for pair in pairs for amount in pair]  # last dimension first, as `pad` wants it
        return functional.pad(x, amounts) if any(amounts) else x

    def _slide(self, x: Tensor, first: int) -> Tensor:
        """A view of the windows along the spatial dimensions from `first` on: `[B, C, *space, *kernel]`."""
        for dimension in range(first, self.dimensions):
            span = self.dilation[dimension] * (self.kernel[dimension] - 1) + 1
            x = x.unfold(2 + dimension, span, self.stride[dimension])[..., :: self.dilation[dimension]]
        return x


@functools.lru_cache(maxsize=256)
def _rows_of(count: int, rows: int, positions: int, step: int, gap: int) -> Tensor:
    """1 where kernel row i reads row u at some position: `[count, rows]`."""
    kernel_row, row = torch.arange(count).unsqueeze(1) * gap, torch.arange(rows)
    distance = row - kernel_row
    return (distance >= 0) & (distance % step == 0) & (distance < positions * step)
