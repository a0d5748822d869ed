"""Symmetric sums of outer products, each product computed once."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.matmul import gains_twice, in_whole_blocks, matmul, moments

_WAIT = 2**18  # numbers that are added at once where they come in few: each time the whole sum is read and written
_BLOCK = 128  # rows of a block, twice as many where there are few vectors: smaller ones lose more than symmetry gains


class Gram:
    """`Σ x xᵀ: [Q, d, d]`, or only its diagonal `[Q, d]`.

    Of a large matrix only the blocks on and above the diagonal are summed; those below are copied when it is read.
    Memory is taken when there is something to add.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self.shape, self._like, self._half = shape, like.new_empty(0), False
        self._whole: Tensor | None = None
        self._waiting: list[Tensor] = []

    @staticmethod
    def of(sums: Tensor) -> Gram:
        """A sum that exists already."""
        found = Gram(tuple(sums.shape), sums)
        found._whole = sums
        return found

    @staticmethod
    def zeros(groups: int, size: int, dense: bool, like: Tensor) -> Gram:
        return Gram((groups, size, size) if dense else (groups, size), like)

    @property
    def dense(self) -> bool:
        return len(self.shape) == 3

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def empty(self) -> bool:
        """Whether nothing was added yet."""
        return self._whole is None and not self._waiting

    @property
    def _sums(self) -> Tensor:
        if self._whole is None:
            self._whole = self._like.new_zeros(self.shape)
        return self._whole

    @property
    def sums(self) -> Tensor:
        """The sum so far, whole."""
        self.settle()
        if self._half:
            for start in range(0, self._sums.shape[2], _BLOCK):
                stop = start + _BLOCK
                self._sums[:, stop:, start:stop] = self._sums[:, start:stop, stop:].mT
            self._half = False
        return self._sums

    def add_rows(self, rows: Tensor, groups: slice, bias: bool = False) -> None:
        """Add `Σ x xᵀ` over `rows: [Q, n, d]` of some groups; with `bias` every x has a 1 as last entry, not given."""
        rows = rows.to(self.dtype)
        width = rows.shape[2]
        if not self.dense:
            self._sums[groups, :width] += rows.square().sum(1)
            if bias:
                self._sums[groups, width] += rows.shape[1]
            return
        self._add(rows, groups, bias)

    def add_kept_rows(self, rows: Tensor, groups: slice) -> None:
        """The same of rows that nobody changes: where they are few they wait for others, or for `settle`."""
        if not self.dense or self.shape[0] > 1 or rows.numel() >= _WAIT:
            self.add_rows(rows, groups)
            return
        alone = rows.untyped_storage().nbytes() <= 2 * rows.numel() * rows.element_size()
        self._waiting.append(rows.to(self.dtype) if alone else rows.to(self.dtype, copy=True))
        if sum(waiting.numel() for waiting in self._waiting) >= _WAIT:
            self.settle()

    def settle(self) -> None:
        """Add the rows that wait."""
        if self._waiting:
            rows, self._waiting = self._waiting, []
            self._add(rows[0] if len(rows) == 1 else torch.cat(rows, dim=1), slice(None), bias=False)

    def _add(self, rows: Tensor, groups: slice, bias: bool) -> None:
        sums, width = self._sums[groups], rows.shape[2]
        found = moments(rows[0]) if len(rows) == 1 else None
        if found is not None:
            sums[0, :width, :width] += found
        else:
            self._add_blocks(sums, rows)
        if bias:
            self._add_bias(sums, rows.sum(1), rows.shape[1])

    def _add_blocks(self, sums: Tensor, rows: Tensor) -> None:
        """Add the products of blocks on and above the diagonal."""
        count, width = rows.shape[1:]
        fast = len(rows) == 1 and gains_twice(count * width * _BLOCK, rows)
        step = _BLOCK if count >= _BLOCK and not (fast and width >= 8 * _BLOCK) else 2 * _BLOCK
        step = step if width >= 2 * step else width
        whole = in_whole_blocks(count) if fast else 0
        columns, rest = rows[0, :whole].T.contiguous(), rows[:, whole:]
        for start in range(0, width, step):
            stop = min(start + step, width)
            into = sums[:, start:stop, start:width]
            if whole:
                into[0] += matmul(columns[start:stop], columns[start:].T)
            if whole < count:
                into.baddbmm_(rest[:, :, start:stop].mT, rest[:, :, start:])
        self._half |= step < width

    def add_products(self, products: Tensor, first: Tensor, count: int, groups: slice, bias: bool) -> None:
        """Add `Σ x xᵀ` `[Q, d, d]` of `count` vectors whose sum is `first` `[Q, d]`."""
        width = products.shape[2]
        sums = self._sums[groups]
        sums[:, :width, :width] += products
        if bias:
            self._add_bias(sums, first, count)

    def _add_bias(self, sums: Tensor, first: Tensor, count: int) -> None:
        width = first.shape[1]
        sums[:, width, :width] += first
        sums[:, :width, width] += first
        sums[:, width, width] += count

    def add_squares(self, squares: Tensor) -> None:
        """Add to the diagonal: `[Q, d]` or `[d]`."""
        (self._sums.diagonal(dim1=1, dim2=2) if self.dense else self._sums).add_(squares)
