"""One forward pass that records the input of every use of a Bayesian weight, and backward passes
that deliver the gradient at that use's output.

Weights are recognized by identity at the level of functions, so it does not matter which module
holds them or how often they are used. What no rule reads takes the exact fallback.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lapwing import probe
from lapwing.batches import Inputs, ReadOutput, outputs_of
from lapwing.columns import Columns
from lapwing.delivery import Consume, Delivery, waits
from lapwing.either_order import same_in_either_order
from lapwing.errors import InputError
from lapwing.gradients import Inputs as LayerInputs
from lapwing.gradients import Layer, Rows, dense
from lapwing.graph import Graph, walk
from lapwing.guard import twice_differentiable
from lapwing.layers import Call, ExampleAxis
from lapwing.layers.per_example import PerExample
from lapwing.probe import agree
from lapwing.reading import inputs_of
from lapwing.recorder import Mailbox, Recorder, Use
from lapwing.slope import Slope

logger = logging.getLogger("lapwing")
_PROBED = 4  # examples that tell as much of a network as a whole batch, where all its inputs are batched
_FORMS = 8  # of inputs, up to which each is compared in both orders in memory
_LARGE = 16  # parts of the budget, above one of which half as many must do


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
    seen: Inputs | None = None
    """The inputs on which the layers were found."""
    footprints: dict[tuple[torch.Size, ...], int] = field(default_factory=dict, repr=False)
    """Bytes of the activations of one example, by the shapes of its inputs."""
    _known: dict[Any, list[_Reading]] = field(default_factory=dict, repr=False)
    _fallbacks: dict[frozenset[str], PerExample] = field(default_factory=dict, repr=False)
    _rearranges: dict[Hashable, bool] = field(default_factory=dict, repr=False)

    def record(self, inputs: Inputs, create_graph: bool = False) -> Record:
        """Run the model under the recorder. The model must be borrowed (see `guard`)."""
        record = self.run(inputs, create_graph)
        known = self._reading(record)
        record.axes, record.counts, record.lost = known.axes, known.counts, known.lost
        return record

    def run(self, inputs: Inputs, create_graph: bool = False) -> Record:
        """Run the model under the recorder, without a look at how its uses are read."""
        return self._run(inputs, create_graph, not create_graph and self._may_rearrange(inputs))

    def _run(self, inputs: Inputs, create_graph: bool, may_rearrange: bool) -> Record:
        parameters: dict[str, Tensor] = dict(self.parameters)
        if create_graph:  # aliases, so that a backward pass of the user's through the result ends here
            parameters = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        names = {id(parameter): name for name, parameter in parameters.items()}
        recorder = Recorder(names, Mailbox(), may_rearrange)
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
        return Record(
            self, inputs, outputs, parameters, tuple(recorder.uses), recorder.mailbox, create_graph, recorder.decides,
            recorder.computed, recorder.rearranged,
        )  # fmt: skip

    def _may_rearrange(self, inputs: Inputs) -> bool:
        """Whether images may lie in memory as convolutions want them: where a model has some, of more than one example,
        and is the same function of inputs of this form then. Where there are many forms that costs more than it gains.
        """
        if not any(len(tensor) > 1 for tensor in inputs.tensors() if tensor.dim() == 4):
            return False
        form = inputs.form(inputs.examples()) or tuple((tensor.shape[1:], tensor.dtype) for tensor in inputs.tensors())
        if form not in self._rearranges and len(self._rearranges) < _FORMS:
            convolves = any(isinstance(module, nn.Conv2d) for module in self.model.modules())
            self._rearranges[form] = convolves and same_in_either_order(
                lambda few, may: self._run(few, create_graph=False, may_rearrange=may), inputs
            )
        return self._rearranges.get(form, False)

    def singles(self, inputs: Inputs, outputs: Tensor, create_graph: bool = False) -> Iterator[Record]:
        """One record per example, for batches that mix them: alone, everything belongs to the one example."""
        split = inputs.split(outputs.shape[0])
        for n in range(outputs.shape[0]):
            record = self.record(split.part(n, n + 1), create_graph)
            if not agree(record.outputs, outputs[n : n + 1], outputs):
                raise InputError(
                    "The examples of this batch interact: alone they have other outputs. Examples must be independent "
                    "in eval mode, and each batched input needs its examples along dimension 0."
                )
            yield record

    def _reading(self, record: Record) -> _Reading:
        """How the uses are read: probed once per shape, the batch size apart.

        Where examples may be reordered by the data, or a gradient was 0 and told nothing, every batch is.
        """
        alike = self._known.setdefault(self._signature(record), [])
        known = next((reading for reading in alike if reading.fits(record)), None)
        if known is not None and self.layers is not None:
            return known
        few = self._few(record)
        found = probe.examine(few or record, independent=few is not None)
        if few is not None and not (found.decided and self._reached(record) <= found.reached):
            found = probe.examine(record, independent=True)  # what had no gradient there may have one here
        if self.layers is None:
            self.layers = found.layers
            self.seen = (few or record).inputs.copy()
        sizes = tuple(use.output.numel() for use in record.uses)
        reading = _Reading(found.axes, found.counts, _lost(self.layers, found, record), sizes, record.examples)
        if not record.graph.reorders and found.decided:
            alike.append(reading)  # else the next batch may differ
        return reading

    def _reached(self, record: Record) -> frozenset[str]:
        """The parameters that the outputs depend on."""
        return frozenset(name for name, value in record.parameters.items() if id(value) in record.graph.leaves)

    def _few(self, record: Record) -> Record | None:
        """A pass over a few examples, which tell as much as the batch if they come out as they do in it."""
        size = sum(use.output.numel() for use in record.uses) * record.outputs.element_size() * _PROBED
        count = _PROBED if size <= record.examples * self.budget / _LARGE else _PROBED // 2
        if record.examples < 4 * count or not record.inputs.all_batched(record.examples):
            return None
        try:
            few = self.run(record.inputs.split(record.examples).part(0, count), record.create_graph)
        except Exception as failure:  # whatever it is, the whole batch may do without
            logger.info("The model fails on a part of a batch (%s); the layers are found from the whole", failure)
            return None
        same = agree(few.outputs, record.outputs[:count], record.outputs)
        alike = [(use.weight, len(use.output)) for use in few.uses] == [(u.weight, len(u.output)) for u in record.uses]
        return few if same and alike and few.graph.reached == record.graph.reached else None

    def _signature(self, record: Record) -> Any:
        examples = record.examples
        shapes = tuple(
            (None, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == examples > 1 else tuple(tensor.shape)
            for tensor in record.inputs.tensors()
        )
        weights = tuple(use.weight for use in record.uses)
        often = tuple(record.graph.leaves.get(id(value), 0) for value in record.parameters.values())
        return shapes, weights, often, record.graph.reached, record.graph.divided

    def fallback(self, lost: frozenset[str] = frozenset()) -> PerExample:
        """The per-example gradients of all parameters that no rule reads, and of the layers `lost`."""
        if lost not in self._fallbacks:
            layers = [layer for layer in self.layers or () if layer.path == "fallback" or layer.name in lost]
            names = [name for layer in layers for name in layer.parameters]
            self._fallbacks[lost] = PerExample(self.forward, tuple(names))
        return self._fallbacks[lost]

    def kernels(self, create_graph: bool) -> AbstractContextManager[None]:
        """Operations that can be differentiated once, or twice where a graph of the gradients is wanted."""
        return twice_differentiable(self.model) if create_graph else nullcontext()

    def forward(self, parameters: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """The outputs `[N, ...]` of the model with some parameters replaced."""
        return outputs_of(self.model, inputs, self.output, parameters)


@dataclass
class Record:
    """One recorded forward pass; alive as long as its graph is needed."""

    tape: Tape
    inputs: Inputs
    outputs: Tensor
    parameters: dict[str, Tensor]
    uses: tuple[Use, ...]
    mailbox: Mailbox
    create_graph: bool
    decides: bool = False
    """Whether values of tensors may have decided which way the pass went."""
    computed: int = 0
    """How many numbers the pass computed on its way."""
    rearranged: bool = False
    """Whether images were put into another order in memory."""
    axes: tuple[ExampleAxis | None, ...] = ()
    counts: tuple[bool, ...] = ()
    lost: frozenset[str] = frozenset()
    """Layers that a rule reads elsewhere, but not in this pass."""
    _graph: Graph | None = None
    _calls: dict[int, Call] = field(default_factory=dict, repr=False)

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

    def of(self, examples: Tensor) -> Record | None:
        """A pass over some examples of this one, each as often as it is named, `[M]` indices; None if they do not
        come out as they do here (an input without example axis is as long as the batch, or examples interact).
        """
        try:
            record = self.tape.record(self.inputs.split(self.examples).pick(examples), self.create_graph)
        except Exception as failure:  # whatever it is, the whole batch may do without
            logger.info("The model fails on some examples of a batch: %s", failure)
            return None
        return record if agree(record.outputs, self.outputs[examples], self.outputs) else None

    def uses_of(self, layer: Layer) -> list[int]:
        """The uses of a layer's weight that the outputs depend on."""
        first = layer.parameters[0]
        return [
            i
            for i, use in enumerate(self.uses)
            if (use.weight == first or (layer.form == "rows" and use.bias == first))
            and self.counts[i]
            and self.graph.reached[i]
            and use.output.numel()
        ]

    def call(self, index: int) -> Call:
        """The call of a use, detached unless a graph is wanted, and prepared by its rule once."""
        if index not in self._calls:
            use = self.uses[index]
            seen = use.call.input if self.create_graph else use.call.input.detach()
            seen = seen.to(self.dtype) if seen.is_floating_point() else seen
            with torch.set_grad_enabled(self.create_graph):
                options = use.call.options if self.create_graph else _detached(use.call.options)
                self._calls[index] = use.rule.prepare(replace(use.call, input=seen, options=options))
        return self._calls[index]

    def layer_inputs(self, layer: Layer) -> LayerInputs | None:
        """`a` of a layer with a Kronecker form; None if it has none or this pass did not reach it."""
        uses = self.uses_of(layer)
        return None if layer.shape is None or not uses else inputs_of(self, layer, uses)

    def sweep(
        self,
        columns: Columns,
        consume: Consume | None,
        at_once: int | None,
        wanted: Collection[str],
        slope: Slope | None = None,
        in_parts: bool = False,
    ) -> None:
        """Backpropagate `columns` and hand the per-example gradients of the `wanted` layers to `consume`, if any.

        Layers that are read as a pair come in chunks of columns, and each gradient is freed once used; with `at_once`
        so many columns of a layer come together, `in_parts` those of large images a few examples at a time. Rows come
        in ranges of examples, and of columns where all do not fit. `slope` is made of the first column.
        """
        layers = [layer for layer in self.tape.layers or () if layer.name in wanted]
        pairs = [layer for layer in layers if layer.path != "fallback" and layer.name not in self.lost]
        step = min(columns.count, self._columns_at_once() if at_once is None else at_once)
        if pairs:
            for start in range(0, columns.count, step):
                part = columns.part(start, min(start + step, columns.count))
                delivery = Delivery(self, pairs, consume, start, part.shape[0], at_once is not None, in_parts, slope)
                if not delivery.owners:  # the pass reached none of these layers
                    break
                if self.graph.batchable and part.shape[0] > 1:
                    delivery.at_once(part)
                else:
                    delivery.one_by_one(part)
        rows = [
            layer
            for layer in layers
            if layer not in pairs and any(id(self.parameters[name]) in self.graph.leaves for name in layer.parameters)
        ]
        if rows:
            self._rows(columns, rows, consume, at_once, slope)

    def _columns_at_once(self) -> int:
        """As many columns as may wait for each other. In one batched pass if every use is a matrix product."""
        batchable, each = self.graph.batchable, self.outputs.element_size()
        sizes = [use.output.numel() * each for use in self.uses]
        size = sum(own for own in sizes if batchable or waits(own))
        return max(1, min(10 if batchable else 64, self.tape.budget // max(1, 2 * size)))

    def grad(self, edges: list[GradientEdge], vectors: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            self.outputs, edges, vectors, retain_graph=True, create_graph=self.create_graph, allow_unused=True,
            is_grads_batched=batched,
        )  # fmt: skip

    def _rows(
        self, columns: Columns, layers: list[Layer], consume: Consume | None, at_once: int | None, slope: Slope | None
    ) -> None:
        fallback = self.tape.fallback(self.lost)
        size = sum(self.parameters[name].numel() for name in fallback.names) * self.outputs.element_size()
        step = max(1, self.tape.budget // max(1, size)) if at_once is None else at_once
        activations = sum(use.output.numel() for use in self.uses) * self.outputs.element_size() // self.examples
        for start in range(0, columns.count, step):
            part = columns.part(start, min(start + step, columns.count))
            # An example holds, for every column, its gradients and those of the activations on the way.
            examples = max(1, self.tape.budget // (part.shape[0] * (size + activations)))
            with self.tape.kernels(self.create_graph):
                for example, gradients in fallback.rows(
                    self.inputs, self.outputs, self.parameters, part, examples, self.create_graph
                ):
                    for layer in layers:
                        packed = layer.pack(gradients).to(self.dtype)
                        if slope is not None and start == 0:
                            slope.add_rows(layer, packed[0], example)
                        if consume is not None:
                            consume(layer, Rows(packed, start, example))

    def gradient(self, vectors: Tensor) -> dict[str, Tensor]:
        """Plain autograd gradient of `Σ_n v_n · f_n` by parameter, `vectors: [N, *output]`."""
        tensors = list(self.parameters.values())
        gradients = torch.autograd.grad(self.outputs, tensors, vectors, retain_graph=True, allow_unused=True)
        return {
            name: torch.zeros_like(tensor) if gradient is None else dense(gradient)
            for name, tensor, gradient in zip(self.parameters, tensors, gradients, strict=True)
        }


@dataclass(frozen=True)
class _Reading:
    """How the uses of a pass are read: see `Record`."""

    axes: tuple[ExampleAxis | None, ...]
    counts: tuple[bool, ...]
    lost: frozenset[str]
    sizes: tuple[int, ...]
    """Elements of the outputs of the uses, in a pass over this many `examples`."""
    examples: int

    def fits(self, record: Record) -> bool:
        """Whether outputs of another pass have in proportion as many elements, or just as many without examples."""
        return all(
            use.output.numel() * self.examples == size * record.examples
            or (axis is None and use.output.numel() == size)
            for use, axis, size in zip(record.uses, self.axes, self.sizes, strict=True)
        )


def _detached(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in options.items()}


def _lost(known: tuple[Layer, ...], found: probe.Examined, record: Record) -> frozenset[str]:
    """Layers that were read by a rule before and are not here, though the outputs depend on them."""
    read = {(name, layer.shape) for layer in found.layers if layer.path != "fallback" for name in layer.parameters}
    lost = [
        layer
        for layer in known
        if layer.path != "fallback"
        and found.reached.intersection(layer.parameters)
        and any((name, layer.shape) not in read for name in layer.parameters)
    ]
    paired = [layer.name for layer in lost if layer.form != "rows"]
    if paired:
        raise MixedExamplesError(
            f"Layer {paired[0]!r} was read as (input, gradient) on an earlier batch, but this one uses it in another "
            "way, or couples or reorders its examples. Show a batch like this, of two or more examples, first.",
            record.outputs,
        )
    return frozenset(layer.name for layer in lost)
