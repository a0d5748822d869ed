"""The window that a convolution slides over its input."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from lapwing import channels_last
from lapwing.matmul import across, times

_MANY = 128  # images, for which it pays to make a matrix of a kernel
_LARGE = 64  # entries of a kernel, of which it does not
_CACHE = 2**22  # bytes that stay close to the processor
_FEW = 2048  # patches, for which it pays neither to make kernels of a matrix nor to unfold rows


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

    @property
    def symmetric(self) -> bool:
        """Whether it pads alike on both sides."""
        return self.before == self.after

    @property
    def unpadded(self) -> Window:
        """The same over images that have their padding already."""
        return replace(self, before=(0,) * self.dimensions, after=(0,) * self.dimensions)

    def matrix(self, w: Tensor, images: torch.Size, groups: int, last: bool) -> Tensor | None:
        """Kernels `w: [C_out, C_in, *kernel]` as the matrix `[C_out·positions, C_in·pixels]` of a linear layer of
        `images: [B, C_in, *space]`, the channels `last` in its rows and columns if so; None where that would be more
        work.
        """
        space = images[2:]
        if groups > 1:
            return None
        if self._sees_all_once(space):
            return channels_last.as_rows(w, last)
        between = _entries_between(self, space) if images[0] >= _MANY else None
        if between is None:
            return None
        kernels = torch.unflatten(
            w.flatten(2) @ between.to(w), 2, (-1, space.numel())
        )  # [C_out, C_in, positions, pixels]
        return kernels.permute(*((2, 0, 3, 1) if last else (0, 2, 1, 3))).flatten(2).flatten(0, 1)

    def weight_gradient(self, x: Tensor, g: Tensor, groups: int) -> Tensor:
        """`Σ_nr g aᵀ` of a convolution with this window, symmetric: `[C_out, C_in/Q, *kernel]`.

        From its images `x: [B, C_in, *space]` and the gradients at its output, `g: [B, C_out, *positions]`.
        """
        space, last = x.shape[2:], channels_last.are_last(x)
        once = groups == 1 and self._sees_all_once(space)
        between = _entries_between(self, space) if groups == 1 and not once and len(x) >= _MANY else None
        if once or between is not None:
            products = across(channels_last.as_rows(g, last), channels_last.as_rows(x, last))
            sizes = (-1, g.shape[1], space.numel(), x.shape[1]) if last else (g.shape[1], -1, x.shape[1], space.numel())
            products = products.reshape(sizes).permute(*((1, 3, 0, 2) if last else (0, 2, 1, 3))).flatten(2)
            products = products if between is None else products @ between.to(g).T
            return products.reshape(g.shape[1], x.shape[1], *self.kernel)
        if x.shape[1] == 1 and self._fits_rows(g):
            return self._weight_gradient_of_one_channel(x, g)
        kernels, zeros = g.new_empty(g.shape[1], x.shape[1] // groups, *self.kernel), (0,) * self.dimensions
        found: Tensor = torch.ops.aten.convolution_backward(
            g, x, kernels, None, self.stride, self.before, self.dilation, False, zeros, groups, (False, True, False)
        )[1]
        return found

    def _fits_rows(self, g: Tensor) -> bool:
        """Whether products with rows are less work, for gradients at its output: many, of kernels with columns."""
        many = g.is_cpu and len(g) * g[0, 0].numel() >= _FEW
        return many and self.dilation[0] == 1 and prod(self.kernel[1:]) > 1

    def _weight_gradient_of_one_channel(self, x: Tensor, g: Tensor) -> Tensor:
        """From products with rows, unfolded along the other dimensions only: of one channel libraries are slow."""
        outputs, height, width, others = g.shape[1], self.kernel[0], prod(self.kernel[1:]), self.dimensions - 1
        total = g.new_zeros(outputs, height * width)
        step = max(1, _CACHE // ((outputs + width) * g[0, 0].numel() * g.element_size()))
        for own, seen in zip(g.split(step), x.split(step), strict=True):
            rows = self.slide(self.pad(seen), first=1)[:, 0]  # [B, rows, *positions, *kernel]
            rows = rows.permute(1, *range(2 + others, 2 + 2 * others), 0, *range(2, 2 + others))
            rows = rows.reshape(len(rows), width, -1).contiguous()
            length = rows.shape[2]
            strides = (self.stride[0] * width * length, length, 1)
            windows = rows.as_strided((own.shape[2], height * width, length), strides)
            total += (own.movedim(2, 0).transpose(1, 2).reshape(len(windows), outputs, -1) @ windows.mT).sum(0)
        return total.reshape(outputs, 1, *self.kernel)

    def _sees_all_once(self, space: torch.Size) -> bool:
        """Whether there is one position, and its kernel is the image."""
        return self.kernel == space and not any(self.before)

    def patches(self, x: Tensor, groups: int) -> Tensor:
        """What each position sees: `[n, k, C, *space]` to `[n, Q, k·positions, I]`."""
        count, others = x.shape[:2]
        x = x.flatten(0, 1).contiguous()  # one of pixels is less than one of patches out of order
        x = self.slide(self.pad(x), first=0)  # [B, C, *positions, *kernel]
        space = range(2, 2 + self.dimensions)
        # [C, *kernel, B, *positions], still a view: in this order one copy is enough.
        x = x.permute(1, *(axis + self.dimensions for axis in space), 0, *space)
        x = x.reshape(groups, -1, count, others, x.shape[2 + self.dimensions :].numel())
        return x.permute(2, 0, 3, 4, 1).flatten(2, 3)

    def positions(self, space: torch.Size) -> tuple[int, ...]:
        """How many positions there are in each dimension of images of this size."""
        spans = [gap * (size - 1) + 1 for size, gap in zip(self.kernel, self.dilation, strict=True)]
        padded = [size + b + a for size, b, a in zip(space, self.before, self.after, strict=True)]
        return tuple((size - span) // step + 1 for size, span, step in zip(padded, spans, self.stride, strict=True))

    def seen(self, space: torch.Size) -> Tensor:
        """Which pixel each kernel entry sees at each position, −1 for padding: `[entries, positions]`."""
        numbers = torch.arange(1, space.numel() + 1, dtype=torch.float64).reshape(1, 1, *space)
        seen = self.slide(self.pad(numbers), first=0)
        return seen.flatten(2 + self.dimensions).flatten(2, 1 + self.dimensions)[0, 0].T.long() - 1

    def pad(self, x: Tensor) -> Tensor:
        """`[B, C, *space]` with zeros around, or cropped."""
        pairs = zip(reversed(self.before), reversed(self.after), strict=True)
        amounts = [amount for pair in pairs for amount in pair]  # last dimension first, as `pad` wants it
        return functional.pad(x, amounts) if any(amounts) else x

    def slide(self, x: Tensor, first: int) -> Tensor:
        """A view of the windows along the spatial dimensions from `first` on: `[B, C, *space, *kernel]`."""
        for dimension in range(first, self.dimensions):
            span = self.dilation[dimension] * (self.kernel[dimension] - 1) + 1
            x = x.unfold(2 + dimension, span, self.stride[dimension])[..., :: self.dilation[dimension]]
        return x


@functools.lru_cache(maxsize=256)
def trimmed(window: Window, space: torch.Size) -> tuple[Window, tuple[slice, ...]]:
    """The window without the kernel entries that see nothing but padding, and which of its entries are left.

    Of a kernel of three rows over a padded image of one row, only the middle row ever sees it.
    """
    edges, parts = [], []
    for axis, (size, positions) in enumerate(zip(space, window.positions(space), strict=True)):
        step, gap, before = window.stride[axis], window.dilation[axis], window.before[axis]
        starts = [entry * gap - before for entry in range(window.kernel[axis])]
        sees = [any(0 <= start + step * place < size for place in range(positions)) for start in starts]
        first, beyond = (sees.index(True), len(sees) - sees[::-1].index(True)) if any(sees) else (0, len(sees))
        span, edge = gap * (beyond - first - 1) + 1, -starts[first]
        if edge < 0 or (size + 2 * edge - span) // step + 1 != positions:
            first, beyond, edge = 0, len(sees), before
        edges.append(edge)
        parts.append(slice(first, beyond))
    kernel, around = tuple(part.stop - part.start for part in parts), tuple(edges)
    return replace(window, kernel=kernel, before=around, after=around), tuple(parts)


@functools.lru_cache(maxsize=256)
def _entries_between(window: Window, space: torch.Size) -> Tensor | None:
    """The kernel entry between each position and each pixel, as zeros and ones `[entries, positions·pixels]`.

    None where some position does not see some pixel, where there are more than twice as many pairs as entries, or where
    the kernel is large itself.
    """
    pairs = prod(window.positions(space)) * space.numel()
    if prod(window.kernel) > _LARGE or pairs > 2 * prod(window.kernel):
        return None
    seen = window.seen(space)
    entry, position = (seen >= 0).nonzero(as_tuple=True)
    if len(entry) < pairs:
        return None
    found = torch.zeros(prod(window.kernel), pairs)
    found[entry, position * space.numel() + seen[entry, position]] = 1
    return found


@dataclass(frozen=True)
class Images:
    """Images `x: [B, C, *space]` under a window, in groups of channels."""

    window: Window
    x: Tensor
    groups: int

    @property
    def patch_sizes(self) -> tuple[int, int, int]:
        """Sizes `[Q, B·positions, I]` of their patches."""
        inputs = self.x.shape[1] // self.groups * prod(self.window.kernel)
        return self.groups, len(self.x) * prod(self.window.positions(self.x.shape[2:])), inputs

    def patches(self) -> Tensor:
        """`[B, Q, positions, I]`; those of an image lie together in memory."""
        window, x = self.window, self.x.contiguous()
        x = window.slide(window.pad(x), first=0)  # [B, C, *positions, *kernel]
        space = range(2, 2 + window.dimensions)
        positions = x.shape[2 : 2 + window.dimensions].numel()
        x = x.permute(0, 1, *(axis + window.dimensions for axis in space), *space)
        return x.reshape(len(x), self.groups, -1, positions).mT

    def times(self, matrix: Tensor) -> Tensor:
        """Patches times a matrix `[Q, I, J]`: `[B, Q, positions, J]`. Many are not formed, but convolved with it."""
        window, x = self.window, self.x.to(matrix.dtype)
        if window.symmetric:
            window, entries = trimmed(window, x.shape[2:])
            matrix = matrix.unflatten(1, (-1, *self.window.kernel))[(slice(None), slice(None), *entries)]
            matrix = matrix.flatten(1, -2)
        else:
            window, x = window.unpadded, window.pad(x)
        groups, _, width = matrix.shape
        if len(x) * prod(window.positions(x.shape[2:])) < _FEW:
            return times(window.patches(x.unsqueeze(1), groups), matrix)
        kernels, zeros = matrix.mT.reshape(-1, x.shape[1] // groups, *window.kernel), (0,) * window.dimensions
        found = torch.convolution(
            x, kernels, None, window.stride, window.before, window.dilation, False, zeros, groups
        )  # fmt: skip
        flat: Tensor = found.flatten(2).unflatten(1, (groups, width))
        return flat.mT
