"""What a kind of layer must say about itself to be read as `(a, g)`."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.layers.window import Images
from lapwing.views import Owner


@dataclass(frozen=True)
class Layout:
    """How a weight reads as `[Q, O, I]`: seen in the shape `view`, its axes in `order`, then flattened."""

    view: tuple[int, ...]
    order: tuple[int, ...]

    def canonical(self, weight: Tensor, lead: int) -> Tensor:
        """`[*lead, *size]` to `[*lead, p]`."""
        axes = (*range(lead), *(lead + axis for axis in self.order))
        return weight.reshape(*weight.shape[:lead], *self.view).permute(axes).flatten(lead)

    def own(self, flat: Tensor) -> Tensor:
        """The inverse of `canonical`, still in the shape `view`: `[*lead, p]` to `[*lead, *view]`."""
        lead = flat.dim() - 1
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        values = flat.unflatten(-1, tuple(self.view[axis] for axis in self.order))
        own: Tensor = values.permute(*range(lead), *(lead + axis for axis in inverse))
        return own


def tolerance(dtype: torch.dtype) -> float:
    """How far two ways to compute a thing may differ, relative to its size.

    Many networks in float64 still compute norms, rotations and positions in float32.
    """
    return max(math.sqrt(torch.finfo(dtype).eps), 1e-5)


@dataclass(frozen=True)
class Call:
    """One use of a Bayesian weight, as its rule read it.

    `shape` is (Q, O, I) of the use without the bias, or None where the weight has no Kronecker form. `rows` are the
    rows of the parameter that this use reads, None for all; `layout` how they read as `[Q, O, I]`, None if in their own
    order. Without a Kronecker form `entries` are the elements that it reads, None for all. `bias` is the name of the
    Bayesian bias added to the result.
    """

    input: Tensor
    weight: str
    bias: str | None
    shape: tuple[int, int, int] | None
    options: dict[str, Any]
    rows: range | None = None
    layout: Layout | None = None
    entries: range | None = None


@dataclass(frozen=True)
class ExampleAxis:
    """Where the examples are in a tensor: along `axis`, of size N·k, as `[N, k]` or (inner) `[k, N]`."""

    axis: int
    inner: bool = False

    def first(self, x: Tensor, examples: int, skip: int = 0) -> Tensor:
        """Move the examples of `[*skip, ..., N·k, ...]` to the front: `[*skip, N, k, ...]`."""
        x = x.movedim(self.axis + skip, skip)
        others = x.shape[skip] // examples
        if self.inner:
            return torch.unflatten(x, skip, (others, examples)).transpose(skip, skip + 1)
        return torch.unflatten(x, skip, (examples, others))

    def spread(self, values: Tensor, size: int) -> Tensor:
        """A value of each example `[N]` for every entry along the axis: `[N·k]`."""
        others = size // len(values)
        if others == 1:
            return values
        return values.repeat(others) if self.inner else values.repeat_interleave(others)


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with their defaults."""
    arguments = _signature(function).bind(*args, **kwargs)
    arguments.apply_defaults()
    return arguments.arguments


class Rule(ABC):
    """How calls of one kind of layer read. Functions of which one argument is a Bayesian weight.

    Q: groups that do not share weights, R: positions that share a weight, I inputs, O outputs.
    """

    name: ClassVar[str]
    functions: ClassVar[tuple[Callable[..., Any], ...]]
    of_images: ClassVar[bool] = False
    """Whether outputs have their channels before their positions."""

    @abstractmethod
    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        """Bind the arguments of the call; None where no Bayesian weight enters it in a way that this rule reads."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of the function, up to rounding, computed with as little work as the rule knows."""
        return function(*args, **kwargs)

    def prepare(self, call: Call) -> Call:
        """Compute, once per batch, what the methods below need."""
        return call

    def broadcast(self, call: Call, output: torch.Size) -> Call | None:
        """The call as if it had computed its output for every entry of the larger shape `output`; None if it can't."""
        return None

    def arrange(self, call: Call, g: Tensor) -> Tensor:
        """Put the dimensions of `[K, *output]` into the order in which `example_axes` counts them."""
        return g

    def bias_align(self, output: Tensor, weight: Tensor) -> tuple[int, ...] | None:
        """The shape of the bias, the third argument, with a size for each dimension of the output; None without one."""
        return None

    @abstractmethod
    def example_axes(self, call: Call, output: torch.Size) -> range | tuple[int, ...]:
        """The dimensions of the (arranged) output that may hold the examples."""


class PairRule(Rule):
    """A rule for weights with a Kronecker form: `Σ_r g_r a_rᵀ`."""

    @abstractmethod
    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        """`a` of the examples in `part`: `[n, Q, R, I]`."""

    def gradients(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        """Gradients at the output `[K, *output]` as `g`: `[K, N, Q, R, O]`."""
        return self.gradients_of_arranged(call, self.arrange(call, g), axis, examples)

    @abstractmethod
    def gradients_of_arranged(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        """The same, the dimensions of `[K, *output]` arranged."""

    def add_total(
        self, call: Call, g: Tensor, axis: ExampleAxis, examples: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        """Add `Σ_nr g aᵀ` to `weight: [Q·O, I]` and `Σ_nr g` to `bias: [Q·O]`, from the (arranged) output gradient."""
        canonical = self.gradients_of_arranged(call, g.unsqueeze(0), axis, examples)[0]
        a = self.inputs(call, axis, examples, slice(0, examples)).to(g.dtype)
        weight += torch.einsum("nqro,nqri->qoi", canonical, a).flatten(0, 1)
        if bias is not None:
            bias += canonical.sum((0, 2)).flatten()

    def images(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Images | None:
        """What `a` are patches of, where they are, so that their moments can be had without them."""
        return None


class RowRule(Rule):
    """A rule for weights without a Kronecker form, whose per-example gradients are as cheap as they are small."""

    @abstractmethod
    def rows(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        """Per-example gradients of weight and bias side by side: `[K, N, p]` from `[K, *output]`."""
