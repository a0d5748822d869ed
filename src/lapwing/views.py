"""Which parameter a tensor is a view of: itself, transposed, some of its rows, or one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class View:
    """Axis d of the tensor is axis `order[d]` of the parameter `name`, of which it has `rows` (None: all).

    A single row, `weight[0]`, has no axis 0. `entries` are the elements of the flat parameter in the rows (None: all).
    """

    name: str
    order: tuple[int, ...]
    rows: range | None = None
    entries: range | None = None

    @property
    def plain(self) -> bool:
        """Whether it is the parameter itself."""
        return self.rows is None and self.in_order

    @property
    def in_order(self) -> bool:
        """Whether its elements come in the order of the parameter's."""
        return list(self.order) == sorted(self.order)


Owner = Callable[[object], View | None]


def owner_of(names: Mapping[int, str]) -> Owner:
    """A function that tells of any object of which parameter it is a view; `names` by the parameters' identity."""

    def owner(value: object) -> View | None:
        if not isinstance(value, Tensor):
            return None
        name = names.get(id(value))
        if name is not None:
            return View(name, tuple(range(value.dim())))
        base = value._base
        name = None if base is None else names.get(id(base))
        return None if name is None or base is None else _read(name, value, base)

    return owner


def _read(name: str, view: Tensor, base: Tensor) -> View | None:
    """Read the geometry of a view: the strides name the axes, the offset the first row."""
    single = view.dim() == base.dim() - 1
    if not base.dim() or view.dim() != base.dim() - single or view.numel() == 0 or view.dtype != base.dtype:
        return None
    order: list[int] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        matches = [
            axis
            for axis in range(int(single), base.dim())
            if axis not in order and base.stride(axis) == stride and (size == base.shape[axis] or axis == 0)
        ]
        if not matches:
            return None
        order.append(next((axis for axis in matches if base.shape[axis] == size), matches[0]))
    first, beyond = divmod(int(view.storage_offset()) - int(base.storage_offset()), max(1, base.stride(0)))
    count = 1 if single else view.shape[order.index(0)]
    if beyond or first + count > base.shape[0]:
        return None
    if count == base.shape[0] and not single:
        return View(name, tuple(order))
    each = base.numel() // base.shape[0]
    return View(name, tuple(order), range(first, first + count), range(first * each, (first + count) * each))
