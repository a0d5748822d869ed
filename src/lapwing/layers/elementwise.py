"""Weights that scale or shift activations element by element: `w ∘ x + b`, broadcast.

Their per-example gradients `Σ_r g ∘ x` and `Σ_r g` are no larger than the weights, and have no Kronecker form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.layers.rule import Call, ExampleAxis, RowRule
from lapwing.views import Owner

_CACHE = 2**21  # bytes that stay close to the processor
_FEW = 32  # numbers to sum up, for which a reduction takes longer than a product with ones


class Elementwise(RowRule):
    """Options of a call: `align`, the weight's shape with a size for each dimension of the output; `scales`, whether
    there is a weight on `input`; `shifts`, whether there is a bias. `mean` and `rstd`, where given, standardize the
    input, are constant over positions, and have a size (or 1) for each dimension of the output.
    """

    def example_axes(self, call: Call, output: torch.Size) -> tuple[int, ...]:
        align = call.options["align"]
        return tuple(axis for axis, size in enumerate(align) if size == 1)

    def rows(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        align = [size for i, size in enumerate(call.options["align"]) if i != axis.axis]
        positions = [2 + i for i, size in enumerate([1, *align]) if size == 1]  # dimensions after [K, N]
        g = axis.first(g, examples, skip=1)
        shift = _summed(g, positions)
        found = []
        if call.options["scales"]:
            x = axis.first(call.input, examples)
            moments = [_along(call.options[name], axis, examples) for name in ("mean", "rstd") if name in call.options]
            single = all(x.shape[i - 1] == 1 for i in positions)
            if moments and single:  # as many inputs as sums, and columns share them
                x = (x - moments[0]) * moments[1]
            scale = _products_summed(g, x, positions)
            if moments and not single:
                scale = torch.addcmul(scale, moments[0], shift, value=-1) * moments[1]
            found.append(scale)
        if call.options["shifts"]:
            found.append(shift)
        return torch.cat([value.flatten(2) for value in found], dim=2)


def _products_summed(g: Tensor, x: Tensor, dims: list[int]) -> Tensor:
    """`g ∘ x` of `[K, N, ...]` and `[N, ...]`, summed: of a few examples at a time, so that it takes no memory anew."""
    step = max(1, _CACHE * len(x) // max(1, g.numel() * g.element_size()))
    parts = [_summed(own * seen, dims) for own, seen in zip(g.split(step, dim=1), x.split(step), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _summed(values: Tensor, dims: list[int]) -> Tensor:
    """Summed over some dimensions, which stay with size 1. A few last ones, in memory too, by a product, which is
    faster.
    """
    last = values.dim()
    while last - 1 in dims:
        last -= 1
    count = values.shape[last:].numel()
    if 1 < count <= _FEW and values.stride(-1) == 1:
        sums = values.flatten(last) @ values.new_ones(count)
        values = sums.reshape(*values.shape[:last], *[1] * (values.dim() - last))
    return values.sum(dims, keepdim=True) if any(values.shape[i] != 1 for i in dims) else values


def _along(value: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
    """Statistics with the dimensions of the output, as `[N or 1, k or 1, ...]`."""
    return axis.first(value, examples if value.shape[axis.axis] > 1 else 1)


class Scale(Elementwise):
    """A weight that multiplies an activation, as the gains of many root-mean-square norms and layer scales."""

    name = "scale"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (
        torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__,
    )  # fmt: skip

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        return read_operand(args, kwargs, output, owner, scales=True)


class Shift(Elementwise):
    """A weight that is added to an activation, as position embeddings and lone biases."""

    name = "shift"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (
        torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__,
    )  # fmt: skip

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        return read_operand(args, kwargs, output, owner, scales=False)


class Expansion(Elementwise):
    """A weight that is repeated for every example, as class tokens."""

    name = "expansion"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (Tensor.expand, Tensor.expand_as, Tensor.repeat)

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        weight = owner(args[0]) if args else None
        if weight is None or not weight.in_order:
            return None
        align = _align(args[0], output)
        if any(size not in (1, whole) for size, whole in zip(align, output.shape, strict=True)):
            return None  # repeated along a dimension of its own
        options = {"align": align, "scales": False, "shifts": True}
        return Call(output, weight.name, None, None, options, entries=weight.entries)


def read_operand(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner, scales: bool
) -> Call | None:
    """One of two operands is a Bayesian weight, or some rows of one."""
    if len(args) != 2 or kwargs or not isinstance(output, Tensor):
        return None
    owners = [owner(value) for value in args]
    if (owners[0] is None) == (owners[1] is None):
        return None
    at = 0 if owners[0] is not None else 1
    weight, other = owners[at], args[1 - at]
    if weight is None or not weight.in_order or not isinstance(other, Tensor):
        return None
    if other.shape != output.shape:
        other = other.expand(output.shape)
    options = {"align": _align(args[at], output), "scales": scales, "shifts": not scales}
    return Call(other, weight.name, None, None, options, entries=weight.entries)


def _align(weight: Tensor, output: Tensor) -> tuple[int, ...]:
    return (*[1] * (output.dim() - weight.dim()), *weight.shape)
