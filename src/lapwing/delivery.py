"""Backward passes of a few columns, and each layer's gradients handed on as soon as they exist."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.channels_last import are_last
from lapwing.gradients import Gradients, Layer, Rows
from lapwing.reading import gradients_of
from lapwing.slope import Slope

if TYPE_CHECKING:
    from lapwing.tape import Record

Consume = Callable[[Layer, Gradients], None]
"""Takes the gradients of a layer for some columns; in parts, several times for the same columns, for the examples from
the gradients' `start` on.
"""
_SMALL = 2**19  # bytes of a gradient up to which it waits for the other columns
_CLOSE = 2**23  # bytes of gradients that stay close to the processor


def waits(size: int) -> bool:
    """Whether a gradient of so many bytes waits for those of the other columns."""
    return size <= _SMALL


@dataclass
class Delivery:
    """Collects the gradients of a few columns at the uses of each layer, and hands them on as pairs."""

    record: Record
    layers: list[Layer]
    consume: Consume | None
    first: int
    columns: int
    together: bool
    in_parts: bool
    slope: Slope | None = None
    arrived: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    uses: dict[str, list[int]] = field(init=False)
    owners: dict[str, list[Layer]] = field(init=False)
    handed: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.owners, self.uses = {}, {}
        for layer in self.layers:
            indices = self.record.uses_of(layer)
            if indices:
                weight = self.record.uses[indices[0]].weight
                self.owners.setdefault(weight, []).append(layer)
                self.uses[weight] = indices
        self.handed = dict.fromkeys(self.owners, 0)

    def at_once(self, columns: Tensor) -> None:
        """All columns in one batched backward pass."""
        wanted = [i for indices in self.uses.values() for i in indices]
        delivered = self.record.grad([self.record.uses[i].edge for i in wanted], columns, batched=True)
        gradients = dict(zip(wanted, delivered, strict=True))
        for name, indices in self.uses.items():
            self._hand_on(name, [gradients.pop(i) for i in indices])

    def one_by_one(self, columns: Tensor) -> None:
        """One backward pass per column.

        Hooks deliver large gradients as they exist, to be used and freed. Small ones are kept until all
        columns are there, as a call for each would cost more than the work.
        """
        waiting = {name: indices for name, indices in self.uses.items() if self._is_small(name)}
        frontier = self.record.graph.frontier
        edges = [*frontier, *(i for indices in waiting.values() for i in indices if i not in frontier)]
        kept: dict[int, list[Tensor]] = {i: [] for indices in waiting.values() for i in indices}
        self.record.mailbox.listener = lambda index, gradient: self._listen(index, gradient, kept)
        try:
            for column in columns:
                found = list(self.record.grad([self.record.uses[i].edge for i in edges], column, batched=False))
                for i in reversed(edges):  # popped, so that none outlives its use
                    gradient = found.pop()
                    if i in kept:  # an operation may hand no gradient on
                        kept[i].append(column.new_zeros(self.record.uses[i].output) if gradient is None else gradient)
                    del gradient
        finally:
            self.record.mailbox.listener = None
        for name, indices in waiting.items():
            self._hand_on(name, [self._stacked(i, kept.pop(i)) for i in indices])

    def _is_small(self, name: str) -> bool:
        size = self.record.outputs.element_size()
        return all(waits(self.record.uses[i].output.numel() * size) for i in self.uses[name])

    def _listen(self, index: int, gradient: Tensor, kept: Collection[int]) -> None:
        name = self.record.uses[index].weight
        if index in kept or index not in self.uses.get(name, ()):
            return
        found = self.arrived.setdefault(name, {i: [] for i in self.uses[name]})
        found[index].append(gradient if self.record.create_graph else gradient.detach())
        if {len(values) for values in found.values()} == {self.columns if self.together else 1}:
            del self.arrived[name]
            if self.together and self.in_parts and len(found) == 1 and self._comes_in_parts(name, index):
                self._hand_on_in_parts(name, index, found[index])
            else:
                self._hand_on(name, [self._stacked(i, values) for i, values in found.items()])

    def _hand_on(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        delivered = [gradient for gradient in gradients if gradient is not None]
        assert len(delivered) == len(self.uses[name])
        self._add_slope(name, [gradient[0] for gradient in delivered])
        self._consume(name, delivered, range(self.record.examples))
        self.handed[name] += delivered[0].shape[0]

    def _hand_on_in_parts(self, name: str, index: int, columns: Sequence[Tensor]) -> None:
        """Columns at one use, a few examples at a time: side by side they stay close until they are used."""
        self._add_slope(name, [columns[0]])
        each = len(columns) * columns[0][0].numel() * columns[0].element_size()
        step = max(1, _CLOSE // each)
        for start in range(0, self.record.examples, step):
            part = range(start, min(start + step, self.record.examples))
            few = self._stacked(index, [column[part.start : part.stop] for column in columns])
            self._consume(name, [few], part)
        self.handed[name] += len(columns)

    def _add_slope(self, name: str, first: Sequence[Tensor]) -> None:
        """Make the slope of gradients that are those of the first column; that of rows is made of the rows."""
        for layer in self.owners[name]:
            if self.slope is not None and self._column(name) == 0 and (layer.form != "rows" or self.consume is None):
                self.slope.add(self.record, layer, self.uses[name], first)

    def _consume(self, name: str, gradients: Sequence[Tensor], examples: range) -> None:
        """Hand on the gradients `[K, *output]` of some examples to the layers that have the weight."""
        if self.consume is None:
            return
        column = self._column(name)
        for layer in self.owners[name]:
            own = gradients_of(self.record, layer, self.uses[name], gradients, column, examples)
            if self.slope is not None and column == 0 and isinstance(own, Rows):
                self.slope.add_rows(layer, own.values[0], examples.start)
            self.consume(layer, own)

    def _column(self, name: str) -> int:
        """The number of the column that comes next."""
        return self.first + self.handed[name]

    def _is_image(self, index: int) -> bool:
        """Whether the output of a use is images, an example each."""
        use = self.record.uses[index]
        return use.rule.of_images and use.output[0] == self.record.examples

    def _comes_in_parts(self, name: str, index: int) -> bool:
        """Whether the gradients at a use can be handed on a few examples at a time."""
        return self._is_image(index) and all(layer.form == "pair" for layer in self.owners[name])

    def _stacked(self, index: int, gradients: list[Tensor]) -> Tensor:
        """`[K, *output]`; of images the columns of an example, or of a pixel, side by side in memory."""
        first = gradients[0]
        if len(gradients) == 1:
            return first.unsqueeze(0)
        if self._is_image(index):
            if are_last(first):
                return torch.stack([one.movedim(1, -1) for one in gradients], dim=3).permute(3, 0, 4, 1, 2)
            return torch.stack(gradients, dim=1).transpose(0, 1)
        return torch.stack(gradients)
