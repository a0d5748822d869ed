"""Backward passes of a few columns, and each layer's gradients handed on as soon as they exist."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.gradients import Gradients, Layer, Pair

if TYPE_CHECKING:
    from lapwing.tape import Record

Consume = Callable[[Layer, Gradients], None]
_SMALL = 2**18  # bytes of a gradient below which it waits for the other columns


@dataclass
class Delivery:
    """Collects the gradients of a few columns at the uses of each layer, and hands them on as pairs."""

    record: Record
    layers: dict[str, Layer]
    consume: Consume
    first: int
    columns: int
    together: bool
    arrived: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    uses: dict[str, list[int]] = field(init=False)
    handed: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.uses = {name: self.record.uses_of(layer) for name, layer in self.layers.items()}
        self.handed = dict.fromkeys(self.layers, 0)

    def at_once(self, columns: Tensor) -> None:
        """All columns in one batched backward pass."""
        wanted = [i for indices in self.uses.values() for i in indices]
        delivered = self.record.grad([self.record.uses[i].edge for i in wanted], columns, batched=True)
        gradients = dict(zip(wanted, delivered, strict=True))
        for name, indices in self.uses.items():
            if indices:
                self._hand_on(name, [gradients.pop(i) for i in indices])

    def one_by_one(self, columns: Tensor) -> None:
        """One backward pass per column.

        Hooks deliver large gradients as they exist, to be used and freed. Small ones are kept until all
        columns are there, as a call for each would cost more than the work.
        """
        waiting = {name: self.uses[name] for name in self.layers if self.uses[name] and self._is_small(name)}
        frontier = self.record.graph.frontier
        edges = [*frontier, *(i for indices in waiting.values() for i in indices if i not in frontier)]
        kept: dict[int, list[Tensor]] = {i: [] for indices in waiting.values() for i in indices}
        self.record.mailbox.listener = lambda index, gradient: self._listen(index, gradient, kept)
        try:
            for column in columns:
                found = list(self.record.grad([self.record.uses[i].edge for i in edges], column, batched=False))
                for i in reversed(edges):  # popped, so that none outlives its use
                    gradient = found.pop()
                    if i in kept and gradient is not None:
                        kept[i].append(gradient)
                    del gradient
        finally:
            self.record.mailbox.listener = None
        for name, indices in waiting.items():
            self._hand_on(name, [_stack(kept.pop(i)) for i in indices])

    def _is_small(self, name: str) -> bool:
        size = self.record.outputs.element_size()
        return all(self.record.uses[i].output.numel() * size <= _SMALL for i in self.uses[name])

    def _listen(self, index: int, gradient: Tensor, kept: Collection[int]) -> None:
        name = self.record.uses[index].weight
        if index in kept or name not in self.layers or index not in self.uses[name]:
            return
        found = self.arrived.setdefault(name, {i: [] for i in self.uses[name]})
        found[index].append(gradient if self.record.create_graph else gradient.detach())
        if {len(values) for values in found.values()} == {self.columns if self.together else 1}:
            del self.arrived[name]
            self._hand_on(name, [_stack(values) for values in found.values()])

    def _hand_on(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        record, layer, parts = self.record, self.layers[name], []
        for i, gradient in zip(self.uses[name], gradients, strict=True):
            use, axis = record.uses[i], record.axes[i]
            assert axis is not None
            assert gradient is not None
            parts.append(use.rule.gradients(use.call, gradient.to(record.dtype), axis, record.examples))
        inputs = record.layer_inputs(layer)
        assert inputs is not None
        g = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
        self.consume(layer, Pair(inputs, g, self.first + self.handed[name]))
        self.handed[name] += g.shape[0]


def _stack(gradients: list[Tensor]) -> Tensor:
    return gradients[0].unsqueeze(0) if len(gradients) == 1 else torch.stack(gradients)
