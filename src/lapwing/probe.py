"""Which axis holds the examples, and whether `(a, g)` reproduces autograd: measured, not guessed.

Shapes do not tell: `[L, N, D]`, `[N·windows, D]` and `[1, L, D]` look alike. So a random vector v is
backpropagated, and v scaled by a number α_n of each example's own: where the second gradient is α_n
times the first along an axis, that axis holds the examples. Where rounding moves a gradient by more than is allowed, as
where attention is nearly even, v scaled by one number for all tells by how much; that is asked only where outputs of
some examples alone have shown that they do not interact.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.gradients import Layer, dense, total
from lapwing.layers import Call, ExampleAxis, RowRule, TokenRule
from lapwing.layers.rule import tolerance
from lapwing.reading import gradients_of
from lapwing.slope import Slope

if TYPE_CHECKING:
    from lapwing.recorder import Use
    from lapwing.tape import Record

logger = logging.getLogger("lapwing")


_GROUPS = 16  # most groups that the rows of one matrix are divided into
_PADDING = 16  # times as many elements as a use reads that its gradients are filled up to
_CONSTANT = 1.37  # no power of two, so that what it scales is rounded anew
_SUMMED = 16  # units of rounding that a sum of many numbers may be off by, of the sum of their sizes
_NOISIEST = 0.1  # a larger error is not put down to rounding
Axes = tuple[ExampleAxis | None, ...]


@dataclass(frozen=True)
class Examined:
    """What a probe found: the example axis of each use (None where the examples are coupled or absent), which uses
    count (of those recorded twice one does), the layers, the parameters with a gradient, and whether the gradients
    told all of it (a gradient that is 0 tells nothing).
    """

    axes: Axes
    counts: tuple[bool, ...]
    layers: tuple[Layer, ...]
    reached: frozenset[str]
    decided: bool


def examine(record: Record, independent: bool) -> Examined:
    """Backpropagate a vector, and the same scaled by a number of each example's own.

    `independent`: the outputs of some examples are known to be the same without the others.
    """
    vector, scale = _random(record)
    edges: list[Tensor | GradientEdge] = [use.edge for use in record.uses]
    both = _backward(record, [*edges, *record.parameters.values()], vector)
    plain, truth = both[: len(edges)], dict(zip(record.parameters, both[len(edges) :], strict=True))
    sizes = {name: 0.0 if gradient is None else _largest(gradient) for name, gradient in truth.items()}
    moved = frozenset(name for name, size in sizes.items() if size != 0)
    check = _Check(record, plain, truth, sizes)
    if not edges:
        return Examined((), (), _layers(check), moved, True)
    scaled = _backward(record, edges, vector * scale.view(-1, *[1] * (vector.dim() - 1)))
    best = [_find(use, first, second, scale) for use, first, second in zip(record.uses, plain, scaled, strict=True)]
    allowed = [tolerance(vector.dtype)] * len(best)
    if independent and any(allowed[0] < error <= _NOISIEST for _, error in best):
        constant = _backward(record, edges, vector * _CONSTANT)
        allowed = [
            max(allowed[0], min(4 * _noise(first, third), _NOISIEST))
            for first, third in zip(plain, constant, strict=True)
        ]
    record.axes = tuple(axis if error <= most else None for (axis, error), most in zip(best, allowed, strict=True))
    record.counts = _counts(record.uses, record.axes)
    reached = [gradient for gradient, found in zip(plain, record.graph.reached, strict=True) if found]
    decided = all(gradient is not None and _tells(gradient) for gradient in reached)
    return Examined(record.axes, record.counts, _layers(check), moved, decided)


def _counts(uses: tuple[Use, ...], axes: Axes) -> tuple[bool, ...]:
    """A use whose output was repeated counts as it was if it had examples of its own, else as repeated."""
    repeated = {use.instead_of for use in uses if use.instead_of is not None}
    return tuple(
        axes[i] is not None or i not in repeated if use.instead_of is None else axes[use.instead_of] is None
        for i, use in enumerate(uses)
    )


def _layers(check: _Check) -> tuple[Layer, ...]:
    """Read by rules where the self-check against autograd holds; every other parameter takes the fallback."""
    record, parameters = check.record, check.record.parameters
    found: list[Layer] = []
    covered: set[str] = set()
    by_weight: dict[str, list[int]] = {}
    for i, use in enumerate(record.uses):
        if use.output.numel() and record.counts[i]:  # an expert that no example went to was not used
            by_weight.setdefault(use.weight, []).append(i)
    biases = [record.uses[uses[0]].bias for uses in by_weight.values()]
    axes = record.axes
    for weight, indices in by_weight.items():
        uses = [record.uses[i] for i in indices]
        layer = None if any(axes[i] is None for i in indices) else read_layer(weight, uses, parameters)
        bias = uses[0].bias
        if layer is None or (bias is not None and (biases.count(bias) > 1 or bias in by_weight)):
            logger.info("%s: coupled or unequal uses; exact fallback", weight)
        elif not check.holds(layer, indices):
            logger.info("%s: (a, g) does not reproduce autograd's gradient; exact fallback", weight)
        else:
            found.append(layer)
            covered.update(layer.parameters)
    return _in_order([*found, *_rest(parameters, covered, {layer.name for layer in found})], parameters)


def read_layer(weight: str, uses: list[Use], parameters: dict[str, Tensor]) -> Layer | None:
    """The layer of a weight, if all its uses read alike, or as embedding and head, or as rows of one matrix."""
    calls, rules = [use.call for use in uses], [use.rule for use in uses]
    if len({call.bias for call in calls}) > 1:
        return None
    bias = calls[0].bias
    names = (weight,) if bias is None else (weight, bias)
    sizes = tuple(parameters[name].shape for name in names)
    paths = " and ".join(dict.fromkeys(rule.name for rule in rules))
    if all(isinstance(rule, RowRule) for rule in rules):
        if any(call.entries is not None and _PADDING * len(call.entries) < sizes[0].numel() for call in calls):
            return None  # gradients of all its elements would mostly be zeros
        return Layer(_layer_name(weight), names, sizes, None, paths, None, "rows")
    tokens = {isinstance(rule, TokenRule) for rule in rules}
    shape, layouts = calls[0].shape, {call.layout for call in calls}
    if shape is None or any(call.shape is None for call in calls) or len(layouts) > 1:
        return None
    if any(call.rows is not None for call in calls):
        shape = _common_groups(calls, parameters[weight].shape)
    elif len({call.shape for call in calls}) > 1:
        shape = None
    if shape is None or (bias is not None and parameters[bias].numel() != shape[0] * shape[1]):
        return None
    form = "pair" if tokens == {False} else "tokens" if tokens == {True} else "tied"
    full = (shape[0], shape[1], shape[2] + (bias is not None))
    return Layer(_layer_name(weight), names, sizes, full, paths, calls[0].layout, form)


def _common_groups(calls: list[Call], size: torch.Size) -> tuple[int, int, int] | None:
    """Where uses read some rows of a matrix, as the projections packed into one: groups of as many rows as all are
    made of.
    """
    if any(call.shape is None or call.shape[0] != 1 or call.layout is not None for call in calls):
        return None
    edges = [edge for call in calls if call.rows is not None for edge in (call.rows.start, call.rows.stop)]
    rows = math.gcd(*edges, size[0])
    if rows < size[0] // _GROUPS:
        return None  # each group has factors of its own
    return size[0] // rows, rows, size[1:].numel()


def _random(record: Record) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = record.outputs.detach()
    vector = torch.randn(outputs.shape, generator=generator).to(outputs)
    # Numbers as far apart as can be, in random order, so that few bits tell one example from another.
    order = torch.randperm(record.examples, generator=generator)
    return vector, torch.linspace(0.5, 1.5, record.examples)[order].to(outputs)


def _backward(record: Record, inputs: Sequence[Tensor | GradientEdge], vector: Tensor) -> list[Tensor | None]:
    return list(
        torch.autograd.grad(record.outputs, inputs, vector, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
    )


def _largest(values: Tensor) -> float:
    """The largest size of an entry; NaN where there is one."""
    if not values.numel():
        return 0.0
    values = dense(values.detach())
    lowest, highest = (values.abs() if values.is_complex() else values).aminmax()
    return float(torch.maximum(-lowest, highest))


def _tells(gradient: Tensor) -> bool:
    """A gradient that is 0, or so small that it has lost its digits, says nothing about its examples."""
    limits = torch.finfo(gradient.dtype)
    return _largest(gradient) > limits.tiny / limits.eps


def _noise(plain: Tensor | None, constant: Tensor | None) -> float:
    """The largest relative error by rounding, from the gradients of a vector and of `_CONSTANT` times the vector."""
    if plain is None or constant is None or not _tells(plain):
        return 0.0
    largest = plain.abs().amax()
    return _error(plain / largest, constant / largest, plain / largest * _CONSTANT)


def _error(first: Tensor, second: Tensor, expected: Tensor) -> float:
    """How far the second gradient is from what is expected of it, relative to the first, at most."""
    size = first.abs() + first.square().mean().sqrt()
    return float(((second - expected).abs() / size.clamp(min=torch.finfo(size.dtype).tiny)).amax())


def _find(use: Use, plain: Tensor | None, scaled: Tensor | None, scale: Tensor) -> tuple[ExampleAxis | None, float]:
    """The axis along which the second gradient is closest to α_n times the first, and how far it is from that."""
    examples = scale.shape[0]

    def arrange(gradient: Tensor) -> Tensor:
        return use.rule.arrange(use.call, gradient.unsqueeze(0))[0]

    shape = arrange(torch.empty(use.output, device="meta")).shape
    candidates = [
        ExampleAxis(dimension, inner)
        for dimension in use.rule.example_axes(use.call, use.output)
        if shape[dimension] > 0 and shape[dimension] % examples == 0
        for inner in ((False, True) if shape[dimension] > examples else (False,))
    ]
    if plain is not None and plain.is_complex():
        return None, math.inf
    if plain is None or scaled is None or examples == 1 or not _tells(plain):
        return (candidates[0], 0.0) if candidates else (None, math.inf)
    plain, scaled = arrange(plain), arrange(scaled)
    largest = plain.abs().amax()
    plain, scaled = plain / largest, scaled / largest  # so that no square underflows
    best, smallest = None, math.inf
    for axis in candidates:
        first, second = axis.first(plain, examples), axis.first(scaled, examples)
        expected = first * scale.to(first.dtype).view(-1, *[1] * (first.dim() - 1))
        error = _error(first, second, expected)
        if error < smallest:
            best, smallest = axis, error
    return best, smallest


@dataclass(frozen=True)
class _Check:
    """The gradients `plain` at the outputs of the uses, and autograd's own of the parameters with their sizes."""

    record: Record
    plain: Sequence[Tensor | None]
    truth: dict[str, Tensor | None]
    sizes: dict[str, float]

    def holds(self, layer: Layer, indices: list[int]) -> bool:
        """Whether a layer's gradient from its inputs and those at its outputs is autograd's, in both ways to sum it."""
        record = self.record
        reached = [(i, gradient.unsqueeze(0)) for i in indices if (gradient := self.plain[i]) is not None]
        if not reached:
            return self._close(layer, torch.zeros(layer.size, dtype=record.dtype, device=record.outputs.device))
        uses, found, slope = [i for i, _ in reached], [gradient for _, gradient in reached], Slope({})
        slope.add(record, layer, uses, [gradient[0] for gradient in found])
        rounding = functools.cache(lambda: self._rounding(layer, uses, found))
        return self._close(layer, slope.sums[layer.name], rounding) and self._close(
            layer, total(gradients_of(record, layer, uses, found, 0), record.tape.budget)[0], rounding
        )

    def _rounding(self, layer: Layer, uses: list[int], gradients: list[Tensor]) -> float:
        """What rounding may make of the sum of a bias: nothing else is left of one that does not change the outputs, as
        that of the keys of an attention.
        """
        if layer.form != "pair" or len(layer.parameters) == 1:
            return 0.0
        sizes = Slope({})
        sizes.add(self.record, layer, uses, [gradient[0].abs() for gradient in gradients])
        largest = _largest(layer.unpack(sizes.sums[layer.name])[layer.parameters[1]])
        return _SUMMED * torch.finfo(self.record.dtype).eps * largest

    def _close(self, layer: Layer, assembled: Tensor, rounding: Callable[[], float] = lambda: 0.0) -> bool:
        """Whether a gradient in the layer's layout is autograd's, but for `rounding` of its bias; it is overwritten."""
        for name, value in layer.unpack(assembled.detach()).items():
            expected = self.truth[name]
            if expected is not None:
                value.sub_(dense(expected).to(value.dtype))
            dtypes = (self.record.outputs.dtype, self.record.parameters[name].dtype)
            gap, allowed = _largest(value), max(map(tolerance, dtypes)) * self.sizes[name]
            if gap > allowed and (name != layer.parameters[-1] or gap > allowed + rounding()):
                return False
        return True


def _rest(parameters: dict[str, Tensor], covered: set[str], taken: set[str]) -> list[Layer]:
    """The parameters that no rule covers, those of one module together."""
    modules: dict[str, list[str]] = {}
    for name in parameters:
        if name not in covered:
            modules.setdefault(_module_of(name), []).append(name)
    return [
        Layer(
            "+".join(names) if module in taken else module,
            tuple(names),
            tuple(parameters[name].shape for name in names),
            None,
            "fallback",
            None,
            "rows",
        )
        for module, names in modules.items()
    ]


def agree(found: Tensor, expected: Tensor, whole: Tensor) -> bool:
    """Whether outputs are those expected, up to rounding of the `whole` batch."""
    if found.shape != expected.shape:
        return False
    allowed = 10 * tolerance(whole.dtype) * whole.detach().abs().amax()
    return not bool(((found - expected).detach().abs() > allowed).any())


def _in_order(layers: list[Layer], parameters: dict[str, Tensor]) -> tuple[Layer, ...]:
    order = {name: i for i, name in enumerate(parameters)}
    return tuple(sorted(layers, key=lambda layer: min(order[name] for name in layer.parameters)))


def _layer_name(weight: str) -> str:
    module, _, attribute = weight.rpartition(".")
    return module if module and attribute == "weight" else weight


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name
