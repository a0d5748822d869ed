"""`Σ a aᵀ` over the patches of a convolution, without the patches.

What is summed over the batches are products between pixels, all or those of near lines, between rows or between shifted
images, whichever is less work; each is computed once, where unfolding computes it for every pair of kernel entries that
see it. The sums become moments of patches when they are read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.channels_last import are_last, as_rows
from lapwing.gram import Gram
from lapwing.layers.window import Images, Window
from lapwing.matmul import add_across, gains_twice

_LARGE = 8  # sums this many times as large as `Σ a aᵀ` itself are not kept from batch to batch
_KEPT = 2**22  # numbers that may be kept all the same
_COPY = 64  # multiplications that take as long as putting a number elsewhere


@dataclass(frozen=True)
class Moments:
    """Sums over examples and positions: `Σ a aᵀ: [Q, I, I]`, `Σ a: [Q, I]` and how many `a` there were."""

    products: Tensor
    sums: Tensor
    count: int


class MomentSum(Protocol):
    """A sum over batches of images of one size from which the moments of their patches follow."""

    @property
    def size(self) -> int:
        """How many numbers it keeps from batch to batch."""

    def add(self, x: Tensor) -> None:
        """Add a batch of images `[B, C, *space]`."""

    def collect(self) -> Moments:
        """The moments of the patches of all images so far."""


def too_many(kept: Iterable[MomentSum], result: int) -> bool:
    """Whether sums are too large to keep from batch to batch, for a `Σ a aᵀ` of so many numbers."""
    return sum(one.size for one in kept) > max(_LARGE * result, _KEPT)


def moment_sum(images: Images) -> MomentSum | None:
    """An empty sum for images like these, by whichever way takes least; None where that is the patches themselves."""
    window, space = images.window, images.x.shape[2:]
    entries, positions = prod(window.kernel), window.positions(space)
    copied = _COPY * images.groups / images.x.shape[1]  # work is counted for each pair of channels
    width, rows = entries // window.kernel[0], (space[0] + window.before[0] + window.after[0]) * prod(positions[1:])
    by_rows = rows * width * (entries + copied)
    by_patches = prod(positions) * entries * (entries + copied)
    if gains_twice(int(by_patches) * images.x.shape[1] ** 2 * len(images.x), images.x) and images.groups == 1:
        by_rows *= 2  # many small products, each of which is too small to gain
    by_pixels = space.numel() ** 2 if space.numel() ** 2 <= 2 * entries**2 else math.inf  # no larger than the result
    by_lines = space.numel() * (_ByLines.reach(window) * prod(space[1:]) + copied)
    by_lines = by_lines if _ByLines.fits(images) else math.inf
    by_shifts = 15 * space.numel() if _ByShifts.fits(images) else math.inf
    ways: list[tuple[float, Callable[[Window, Tensor, int], MomentSum]]] = [
        (by_pixels, _ByPixels), (by_shifts, _ByShifts), (by_lines, _ByLines), (by_rows, _ByRows),
    ]  # fmt: skip
    least, way = min(ways, key=lambda candidate: candidate[0])
    return None if by_patches <= least else way(window, images.x, images.groups)


class _ByPixels:
    """With `P = Σ x xᵀ` between all pixels, the block of kernel entries i and j is the sum of `P_st` over the positions
    at which i sees pixel s and j sees pixel t. For images hardly larger than the kernel.
    """

    def __init__(self, window: Window, images: Tensor, groups: int) -> None:
        self.channels, self.groups, self.images = images.shape[1] // groups, groups, 0
        self.seen = window.seen(images.shape[2:])
        size = images[0].numel() // groups
        self.products, self.first = Gram.zeros(groups, size, True, images), images.new_zeros(groups, size)

    @property
    def size(self) -> int:
        return prod(self.products.shape)

    def add(self, x: Tensor) -> None:
        rows = torch.unflatten(x.flatten(1), 1, (self.groups, -1)).transpose(0, 1)  # [Q, B, C·S]
        self.products.add_rows(rows, slice(None))
        self.first += rows.sum(1)
        self.images += x.shape[0]

    def collect(self) -> Moments:
        entries, positions = self.seen.shape
        products = self.products.sums.unflatten(2, (self.channels, -1)).unflatten(1, (self.channels, -1))
        first = self.first.unflatten(1, (self.channels, -1))
        found = products.new_zeros(self.groups, self.channels, entries, self.channels, entries)
        sums = products.new_zeros(self.groups, self.channels, entries)
        for position in range(positions):
            inside = (self.seen[:, position] >= 0).nonzero().squeeze(1)
            pixels = self.seen[inside, position]
            sums[:, :, inside] += first[:, :, pixels]
            for i, s in zip(inside.tolist(), pixels.tolist(), strict=True):
                found[:, :, i, :, inside] += products[:, :, s, :, pixels]
        inputs = self.channels * entries
        count = self.images * positions
        return Moments(found.reshape(self.groups, inputs, inputs), sums.reshape(self.groups, inputs), count)


class _ByShifts:
    """The block of kernel entries i and j = i + d is `Σ_u x_u x_{u+d}ᵀ` over the pixels u that i sees. Over all pixels
    this depends on d alone: it is the weight gradient of a convolution whose input and whose output gradient are both
    the images. An entry on the edge of the kernel misses one line of pixels at the border. For kernels 3×3, padded by
    one.
    """

    def __init__(self, window: Window, images: Tensor, groups: int) -> None:
        self.groups, self.channels, self.count = groups, images.shape[1] // groups, 0
        each = (groups, self.channels, self.channels)
        self.shifted = images.new_zeros(3, 5, *each)  # by d, of which one half is enough: rows 0 to 2, columns −2 to 2
        self.borders = images.new_zeros(2, 2, 3, *each)  # rows or columns, first or last, by d along the line
        self.corners = images.new_zeros(2, 2, *each)
        self.sums = images.new_zeros(3, 3, groups, self.channels)  # what each kernel entry sees

    @staticmethod
    def fits(images: Images) -> bool:
        """Kernels 3×3, stride 1, padded by one; enough channels to gain. On GPUs convolutions may round to TF32."""
        known = images.window == Window((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
        return known and min(images.x.shape[2:]) > 1 and images.x.shape[1] >= 8 * images.groups and images.x.is_cpu

    @property
    def size(self) -> int:
        return self.shifted.numel() + self.borders.numel() + self.corners.numel() + self.sums.numel()

    def add(self, x: Tensor) -> None:
        self.count += x.shape[0] * x.shape[2:].numel()
        shifts = Window((3, 5), (1, 1), (1, 1), (0, 2), (0, 2))
        shifted = shifts.weight_gradient(functional.pad(x, (0, 0, 0, 2)), x, self.groups)
        self.shifted += torch.unflatten(shifted, 0, (self.groups, -1)).permute(3, 4, 0, 1, 2)
        for axis, end in itertools.product(range(2), range(2)):
            line = x.select(2 + axis, -end).permute(2, 0, 1).flatten(0, 1)  # [length·B, C], pixel after pixel
            line = torch.unflatten(line, 1, (self.groups, -1)).transpose(0, 1)
            for d in range(min(3, x.shape[3 - axis])):
                apart = d * len(x)
                self.borders[axis, end, d] += line[:, : line.shape[1] - apart].mT @ line[:, apart:]
        grouped = torch.unflatten(x, 1, (self.groups, -1)).permute(3, 4, 1, 2, 0)  # [H, W, Q, C, B], a view
        corners = grouped[:: max(1, x.shape[2] - 1), :: max(1, x.shape[3] - 1)].expand(2, 2, -1, -1, -1)
        self.corners += corners @ corners.mT
        seen = functional.pad(_total(x), (1, 1, 1, 1)).unfold(1, x.shape[2], 1).unfold(2, x.shape[3], 1)
        self.sums += seen.sum((3, 4)).permute(1, 2, 0).unflatten(2, (self.groups, -1))

    def collect(self) -> Moments:
        found = self.shifted.new_zeros(self.groups, self.channels, 9, self.channels, 9)
        for i, j in itertools.combinations_with_replacement(range(9), 2):
            block = self._block(divmod(i, 3), divmod(j, 3))
            found[:, :, i, :, j] = block
            found[:, :, j, :, i] = block.mT
        inputs = 9 * self.channels
        sums = self.sums.permute(2, 3, 0, 1).reshape(self.groups, inputs)
        return Moments(found.reshape(self.groups, inputs, inputs), sums, self.count)

    def _block(self, i: tuple[int, int], j: tuple[int, int]) -> Tensor:
        """`Σ x_u x_{u+d}ᵀ` over the pixels that entry i sees, j = i + d not before it."""
        down, right = j[0] - i[0], j[1] - i[1]
        block = self.shifted[down, 2 + right].clone()
        # The first row of the kernel does not see the last of the image (1), and the other way round (0).
        row, column = ({0: 1, 1: None, 2: 0}[entry] for entry in i)
        if down == 0 and row is not None:
            block -= self.borders[0, row, right]
        if right == 0 and column is not None:
            block -= self.borders[1, column, down]
        if down == right == 0 and row is not None and column is not None:
            block += self.corners[row, column]
        return block


class _ByLines:
    """With `P_ud = Σ x_u x_{u+d}ᵀ` between the pixels of lines u and u + d (a line: all pixels with one first index),
    the block of kernel entries in rows i and j is a sum over the lines u that i sees, `d = j − i`, and over the
    positions along a line. For lines hardly longer than a kernel is large.
    """

    def __init__(self, window: Window, images: Tensor, groups: int) -> None:
        self.window, self.space, self.groups, self.images = window, images.shape[2:], groups, 0
        self.channels, lines = images.shape[1] // groups, self.space[0]
        each = self.channels * prod(self.space[1:])
        self.between = images.new_zeros(groups, lines, each, min(self.reach(window), lines) * each)
        self.first = images.new_zeros(images.shape[1:])

    @staticmethod
    def reach(window: Window) -> int:
        """How many lines a kernel spans."""
        return window.dilation[0] * (window.kernel[0] - 1) + 1

    @staticmethod
    def fits(images: Images) -> bool:
        """Whether what is summed is small, and what makes moments of it."""
        pixels, near = images.x[0].numel() // images.groups, _ByLines.reach(images.window)
        summed = near * images.groups * (pixels // images.x.shape[2]) * pixels
        return max(summed, prod(images.x.shape[3:]) ** 2 * prod(images.window.kernel[1:]) ** 2) <= _KEPT

    @property
    def size(self) -> int:
        return self.between.numel()

    def add(self, x: Tensor) -> None:
        groups, lines, each, near = self.between.shape
        rest = range(4, x.dim() + 1)
        # [Q, lines, C/Q, *rest, B]: pixels of a line after another, and lines that are near in one piece.
        pixels = torch.unflatten(x, 1, (groups, -1)).permute(1, 3, 2, *rest, 0).contiguous()
        pixels = pixels.view(groups, lines * each, len(x))
        together = groups == 1 and not gains_twice(len(x) * each * near, pixels)
        inside = lines - near // each + 1 if together else 0  # the others have fewer behind them
        if together:
            windows = pixels.as_strided((inside, near, len(x)), (each * len(x), len(x), 1))
            self.between[0, :inside].baddbmm_(windows[:, :each], windows.mT)
        for line in range(inside, lines):
            seen = pixels[:, line * each : line * each + near]
            sums = self.between[:, line, :, : seen.shape[1]]
            if groups == 1:
                add_across(sums[0], seen[0, :each].T, seen[0].T)
            else:
                sums.baddbmm_(seen[:, :each], seen.mT)
        self.first += _total(x)
        self.images += len(x)

    def collect(self) -> Moments:
        window, size, groups, channels = self.window, self.window.kernel[0], self.groups, self.channels
        lines, width, entries = self.space[0], prod(self.space[1:]), prod(window.kernel[1:])
        down, along = _part(window, slice(0, 1)), _part(window, slice(1, None))
        of_lines = down.seen(self.space[:1])  # [size, positions]
        chosen = _pairs(along.seen(self.space[1:]), width).to(self.between) if len(self.space) > 1 else None
        between = self.between.reshape(groups, lines, channels, width, -1, channels, width)
        found = between.new_zeros(groups, channels, size, entries, channels, size, entries)
        for i, j in itertools.combinations_with_replacement(range(size), 2):
            pairs = (of_lines[i] >= 0) & (of_lines[j] >= 0)
            u, d = of_lines[i][pairs], (j - i) * window.dilation[0]
            if not len(u):
                continue
            block = between.select(4, d)[:, u].sum(1)  # [Q, C, W, C, W]
            if chosen is not None:
                block = block.transpose(2, 3).flatten(3) @ chosen  # [Q, C, C, entries·entries]
                block = block.unflatten(3, (entries, entries)).transpose(2, 3)
            found[:, :, i, :, :, j] = block
            found[:, :, j, :, :, i] = block.permute(0, 3, 4, 1, 2)
        inputs = channels * size * entries
        sums = window.patches(self.first[None, None], groups)[0].sum(1)
        count = self.images * prod(window.positions(self.space))
        return Moments(found.reshape(groups, inputs, inputs), sums, count)


class _ByRows:
    """Each row is unfolded along the other dimensions only. With `T_u` the patches of row u, one row high, the block of
    kernel rows i and j is `Σ_y T_{ys+i} T_{ys+j}ᵀ`: a sum over u of `T_u T_{u+d}ᵀ` with `d = j − i`, so one product for
    every (u, d) serves all pairs (i, j).
    """

    def __init__(self, window: Window, images: Tensor, groups: int) -> None:
        self.window, self.groups, self.channels = window, groups, images.shape[1] // groups
        self.rows = images.shape[2] + window.before[0] + window.after[0]
        self.width = prod(window.kernel[1:])
        size, gap, each = window.kernel[0], window.dilation[0], self.channels * self.width
        self.lead = -(-self.rows // gap)  # rows that a dilated kernel sees together come one after another
        self.between = images.new_zeros(groups * gap * self.lead, each, size * each)
        self.first = images.new_zeros(groups * gap, self.lead, each)
        self.count = 0

    @property
    def size(self) -> int:
        return self.between.numel()

    def add(self, x: Tensor) -> None:
        window, groups = self.window, self.groups
        size, gap = window.kernel[0], window.dilation[0]
        x = torch.unflatten(window.slide(window.pad(x), first=1), 1, (groups, -1))
        rest = (x.dim() - 4) // 2
        # [B, Q, C/Q, rows, *positions, *kernel] to [Q, rows, C/Q, *kernel, B, *positions]
        x = x.permute(1, 3, 2, *range(4 + rest, 4 + 2 * rest), 0, *range(4, 4 + rest))
        each, length = self.between.shape[1], x.shape[3 + rest :].numel()
        rows = x.new_empty(groups, gap, self.lead + size - 1, each, length)
        for phase in range(gap):
            own = x[:, phase::gap]
            rows[:, phase, : own.shape[1]].view(own.shape).copy_(own)
            rows[:, phase, own.shape[1] :] = 0  # zeros follow the last row
        rows = rows.flatten(0, 1)
        windows = rows.as_strided((len(rows), self.lead, size * each, length), (*rows.stride()[:2], length, 1))
        self.between.baddbmm_(rows[:, : self.lead].flatten(0, 1), windows.flatten(0, 1).mT)
        self.first += rows[:, : self.lead].sum(3)
        self.count += length

    def collect(self) -> Moments:
        size, step, gap = self.window.kernel[0], self.window.stride[0], self.window.dilation[0]
        groups, channels, width = self.groups, self.channels, self.width
        positions = (self.rows - gap * (size - 1) - 1) // step + 1
        each = channels * width
        between = self.between.reshape(groups, gap, self.lead, each, size, each).permute(0, 4, 2, 1, 3, 5)
        between = between.reshape(groups, size, self.lead * gap, each * each)[:, :, : self.rows]
        products = between.new_zeros(groups, channels, size, width, channels, size, width)
        for offset in range(size):
            chosen = _rows_of(size - offset, self.rows, positions, step, gap).to(between)
            blocks = (chosen @ between[:, offset]).reshape(groups, size - offset, channels, width, channels, width)
            products.diagonal(offset, 2, 5).copy_(blocks.movedim(1, -1))
            products.diagonal(-offset, 2, 5).copy_(blocks.permute(0, 4, 5, 2, 3, 1))
        chosen = _rows_of(size, self.rows, positions, step, gap).to(between)
        first = self.first.unflatten(0, (groups, gap)).transpose(1, 2).flatten(1, 2)[:, : self.rows]
        sums = torch.unflatten(chosen @ first, 2, (channels, width)).transpose(1, 2)
        inputs = channels * size * width
        found = products.reshape(groups, inputs, inputs)
        return Moments(found, sums.reshape(groups, inputs), positions * self.count)


def _total(x: Tensor) -> Tensor:
    """The sum of images `[B, C, *space]`, in the order in which they lie in memory: others take ten times as long."""
    last = are_last(x)
    flat = as_rows(x, last).sum(0)
    return flat.view(*x.shape[2:], -1).movedim(-1, 0) if last else flat.view(x.shape[1:])


def _part(window: Window, axes: slice) -> Window:
    """The window along some of its dimensions."""
    return Window(*(getattr(window, name)[axes] for name in ("kernel", "stride", "dilation", "before", "after")))


def _pairs(seen: Tensor, pixels: int) -> Tensor:
    """1 where two kernel entries see two pixels at a common position, counted: `[pixels·pixels, entries·entries]`, from
    what they see `[entries, positions]`.
    """
    sees = functional.one_hot(seen + 1, pixels + 1)[..., 1:].double()  # [entries, positions, pixels]
    return torch.einsum("ixp,jxq->pqij", sees, sees).flatten(2).flatten(0, 1)


@functools.lru_cache(maxsize=256)
def _rows_of(count: int, rows: int, positions: int, step: int, gap: int) -> Tensor:
    """1 where kernel row i reads row u at some position: `[count, rows]`."""
    kernel_row, row = torch.arange(count).unsqueeze(1) * gap, torch.arange(rows)
    distance = row - kernel_row
    return (distance >= 0) & (distance % step == 0) & (distance < positions * step)
