"""One forward pass that records the input of every use of a Bayesian weight, and backward passes
that deliver the gradient at that use's output.

Weights are recognized by identity at the level of functions, so it does not matter which module
holds them or how often they are used. What no rule reads takes the exact fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lapwing import probe
from lapwing.batches import Inputs, ReadOutput, read_output
from lapwing.columns import Columns
from lapwing.delivery import Consume, Delivery
from lapwing.errors import InputError
from lapwing.gradients import Inputs as LayerInputs
from lapwing.gradients import Layer, Rows
from lapwing.graph import Graph, walk
from lapwing.guard import twice_differentiable
from lapwing.layers import RULES, Call, ExampleAxis, Rule
from lapwing.layers.per_example import PerExample
from lapwing.layers.rule import Moments, tolerance


@dataclass(frozen=True)
class Use:
    """One use of a Bayesian weight: the rule that reads it, its input, and the edge of its output."""

    rule: Rule
    call: Call
    weight: str
    bias: str | None
    edge: GradientEdge
    output: torch.Size


@dataclass
class _Mailbox:
    """Where gradients arrive during a backward pass. It must not refer to the graph that refers to it."""

    listener: Callable[[int, Tensor], None] | None = None

    def deliver(self, index: int, gradient: Tensor) -> None:
        if self.listener is not None:
            self.listener(index, gradient)


class _Recorder(TorchFunctionMode):
    def __init__(self, names: dict[int, str], mailbox: _Mailbox) -> None:
        super().__init__()
        self.names, self.mailbox, self.uses = names, mailbox, list[Use]()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is None:
            return output
        call = rule.read(func, args, kwargs)
        weight = self.names.get(id(call.weight))
        if weight is None or not output.requires_grad:
            return output
        bias = None if call.bias is None else self.names.get(id(call.bias))
        index, mailbox = len(self.uses), self.mailbox
        self.uses.append(Use(rule, call, weight, bias, get_gradient_edge(output), output.shape))
        # A hook set now sees the gradient of the value as it is now, whatever happens to it in place.
        output.register_hook(lambda gradient: mailbox.deliver(index, gradient))
        return output


class MixedExamplesError(InputError):
    """A batch in which a layer mixes the examples that earlier batches kept apart; `outputs` are the batch's."""

    def __init__(self, message: str, outputs: Tensor) -> None:
        super().__init__(message)
        self.outputs = outputs.detach()


@dataclass
class Tape:
    """Records forward passes of one model; the layers are found on the first batch and then fixed."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    output: ReadOutput | None = None
    budget: int = 2**30
    layers: tuple[Layer, ...] | None = None
    _axes: dict[Any, tuple[ExampleAxis | None, ...]] = field(default_factory=dict, repr=False)
    _fallback: PerExample | None = field(default=None, repr=False)

    def record(self, inputs: Inputs, create_graph: bool = False) -> Record:
        """Run the model under the recorder. The model must be borrowed (see `guard`)."""
        mailbox = _Mailbox()
        parameters: dict[str, Tensor] = dict(self.parameters)
        if create_graph:  # aliases, so that a backward pass of the user's through the result ends here
            parameters = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        recorder = _Recorder({id(parameter): name for name, parameter in parameters.items()}, mailbox)
        with recorder, self.kernels(create_graph):
            try:
                outputs = self.forward(parameters if create_graph else {}, inputs)
            except RuntimeError as failure:
                inputs.explain(failure, next(iter(self.parameters.values())).dtype)
                raise
        if outputs.shape[0] == 0:
            raise InputError("The batch is empty: the model's outputs hold no example.")
        if outputs.grad_fn is None:
            raise InputError(
                "The model's output does not depend on any Bayesian parameter through autograd. Remove "
                "torch.no_grad(), .detach() or torch.jit.script from its forward pass, or choose other weights."
            )
        record = Record(self, inputs, outputs, parameters, tuple(recorder.uses), mailbox, create_graph)
        record.axes = self._example_axes(record)
        return record

    def singles(self, inputs: Inputs, outputs: Tensor, create_graph: bool = False) -> Iterator[Record]:
        """One record per example, for batches that mix them: alone, everything belongs to the one example."""
        split = inputs.split(outputs.shape[0])
        largest = outputs.abs().amax()
        for n in range(outputs.shape[0]):
            record = self.record(split.part(n, n + 1), create_graph)
            found, expected = record.outputs.detach(), outputs[n : n + 1]
            if found.shape != expected.shape or bool(
                ((found - expected).abs() > 10 * tolerance(outputs.dtype) * largest).any()
            ):
                raise InputError(
                    "The examples of this batch interact: alone they have other outputs. Examples must be independent "
                    "in eval mode, and each batched input needs its examples along dimension 0."
                )
            yield record

    def _example_axes(self, record: Record) -> tuple[ExampleAxis | None, ...]:
        """The example axis of every use: probed once per shape, the batch size apart.

        Where examples may be reordered by the data, or a gradient was 0 and told nothing, every batch is.
        """
        key = self._signature(record)
        if key not in self._axes or self.layers is None:
            axes, layers, decided = probe.examine(record)
            if self.layers is None:
                self.layers = layers
            else:
                _check_same(self.layers, layers, record)
            if record.graph.reorders or not decided:
                return axes  # the next batch may differ
            self._axes[key] = axes
        return self._axes[key]

    def _signature(self, record: Record) -> Any:
        examples = record.examples
        shapes = tuple(
            (None, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == examples > 1 else tuple(tensor.shape)
            for tensor in record.inputs.tensors()
        )
        uses = tuple((use.weight, use.output.numel() / examples) for use in record.uses)
        return shapes, uses, record.graph.reached

    def fallback(self) -> PerExample:
        """The per-example gradients of all parameters that are not read as a pair."""
        if self._fallback is None:
            assert self.layers is not None
            names = [name for layer in self.layers if layer.shape is None for name in layer.parameters]
            self._fallback = PerExample(self.forward, tuple(names))
        return self._fallback

    def kernels(self, create_graph: bool) -> AbstractContextManager[None]:
        """Operations that can be differentiated once, or twice where a graph of the gradients is wanted."""
        return twice_differentiable(self.model) if create_graph else nullcontext()

    def forward(self, parameters: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """The outputs `[N, ...]` of the model with some parameters replaced."""
        if not parameters:
            return read_output(self.model(*inputs.args, **inputs.kwargs), self.output)
        returned = torch.func.functional_call(self.model, parameters, inputs.args, inputs.kwargs)
        return read_output(returned, self.output)


@dataclass
class Record:
    """One recorded forward pass; alive as long as its graph is needed."""

    tape: Tape
    inputs: Inputs
    outputs: Tensor
    parameters: dict[str, Tensor]
    uses: tuple[Use, ...]
    mailbox: _Mailbox
    create_graph: bool
    axes: tuple[ExampleAxis | None, ...] = ()
    _graph: Graph | None = None

    @property
    def examples(self) -> int:
        return self.outputs.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `a` and `g`: the model's, but at least float32."""
        return torch.promote_types(self.outputs.dtype, torch.float32)

    @property
    def graph(self) -> Graph:
        if self._graph is None:
            self._graph = walk(self.outputs, [use.edge for use in self.uses])
        return self._graph

    def uses_of(self, layer: Layer) -> list[int]:
        """The uses of a layer's weight that the outputs depend on."""
        weight = layer.parameters[0]
        return [
            i
            for i, use in enumerate(self.uses)
            if use.weight == weight and self.graph.reached[i] and use.output.numel()
        ]

    def layer_inputs(self, layer: Layer) -> LayerInputs | None:
        """`a` of a layer that is read as a pair; None if this pass did not reach it."""
        uses = self.uses_of(layer)
        if layer.shape is None or not uses:
            return None
        readers, moments = zip(*(self._readers(i) for i in uses), strict=True)
        return LayerInputs(readers, moments, self.examples, len(layer.parameters) == 2)

    def _readers(self, index: int) -> tuple[Callable[[slice], Tensor], Callable[[slice], Moments]]:
        use, axis, examples = self.uses[index], self.axes[index], self.examples
        assert axis is not None
        seen = use.call.input if self.create_graph else use.call.input.detach()
        call = replace(use.call, input=seen.to(self.dtype))
        return (
            lambda part: use.rule.inputs(call, axis, examples, part),
            lambda part: use.rule.moments(call, axis, examples, part),
        )

    def sweep(self, columns: Columns, consume: Consume, together: bool, wanted: Collection[str]) -> None:
        """Backpropagate `columns` and hand the per-example gradients of the `wanted` layers to `consume`.

        Layers that are read as a pair come in chunks of columns, and each gradient is freed once used;
        with `together` all columns of a layer come at once. Rows come in ranges of examples, and of columns
        where all do not fit.
        """
        layers = [layer for layer in self.tape.layers or () if layer.name in wanted]
        pairs = {layer.parameters[0]: layer for layer in layers if layer.shape is not None}
        step = columns.count if together else min(columns.count, self._columns_at_once())
        if pairs:
            for start in range(0, columns.count, step):
                part = columns.part(start, min(start + step, columns.count))
                delivery = Delivery(self, pairs, consume, start, part.shape[0], together)
                if self.graph.batchable and part.shape[0] > 1:
                    delivery.at_once(part)
                else:
                    delivery.one_by_one(part)
        rows = [
            layer
            for layer in layers
            if layer.shape is None and any(id(self.parameters[name]) in self.graph.leaves for name in layer.parameters)
        ]
        if rows:
            self._rows(columns, rows, consume, together)

    def _columns_at_once(self) -> int:
        """As many columns as may wait for each other. In one batched pass if every use is a matrix product."""
        if not self.graph.batchable:
            return 64
        size = sum(use.output.numel() for use in self.uses) * self.outputs.element_size()
        return max(1, min(10, self.tape.budget // max(1, 2 * size)))

    def grad(self, edges: list[GradientEdge], vectors: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            self.outputs, edges, vectors, retain_graph=True, create_graph=self.create_graph, allow_unused=True,
            is_grads_batched=batched,
        )  # fmt: skip

    def _rows(self, columns: Columns, layers: list[Layer], consume: Consume, together: bool) -> None:
        fallback = self.tape.fallback()
        size = sum(self.parameters[name].numel() for name in fallback.names) * self.outputs.element_size()
        step = columns.count if together else max(1, self.tape.budget // max(1, size))
        activations = sum(use.output.numel() for use in self.uses) * self.outputs.element_size() // self.examples
        for start in range(0, columns.count, step):
            part = columns.part(start, min(start + step, columns.count))
            # An example holds, for every column, its gradients and those of the activations on the way.
            at_once = max(1, self.tape.budget // (part.shape[0] * (size + activations)))
            with self.tape.kernels(self.create_graph):
                for example, gradients in fallback.rows(
                    self.inputs, self.outputs, self.parameters, part, at_once, self.create_graph
                ):
                    for layer in layers:
                        consume(layer, Rows(layer.pack(gradients).to(self.dtype), start, example))

    def gradient(self, scalar: Tensor) -> dict[str, Tensor]:
        """Plain autograd gradient of a scalar function of the outputs, by parameter."""
        tensors = list(self.parameters.values())
        gradients = torch.autograd.grad(scalar, tensors, retain_graph=True, allow_unused=True)
        return {
            name: torch.zeros_like(tensor) if gradient is None else gradient
            for name, tensor, gradient in zip(self.parameters, tensors, gradients, strict=True)
        }


def _check_same(known: tuple[Layer, ...], found: tuple[Layer, ...], record: Record) -> None:
    """A layer that was read as a pair before, and is used in this pass, must be one here too."""
    used = {use.weight for use in record.uses if use.output.numel()}
    pairs = {(layer.parameters, layer.shape) for layer in found if layer.shape is not None}
    before = [layer for layer in known if layer.shape is not None and layer.parameters[0] in used]
    lost = [layer.name for layer in before if (layer.parameters, layer.shape) not in pairs]
    if lost:
        raise MixedExamplesError(
            f"Layer {lost[0]!r} was read as (input, gradient) on an earlier batch, but couples or reorders the "
            "examples of this one. Show a batch like this, of two or more examples, first.",
            record.outputs,
        )
