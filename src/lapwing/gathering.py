"""Passes over a loader, its small batches together: many examples at once take hardly longer than few.

What is summed over the data does not depend on how it is divided, so the tape's batches need not be the loader's.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lapwing.batches import Inputs, check_targets
from lapwing.probe import agree
from lapwing.tape import MixedExamplesError, Record, Tape

logger = logging.getLogger("lapwing")
_EXAMPLES = 1024  # more of them make an example no cheaper
_SHARE = 32  # parts of the budget, one of which is for what a gathered batch computes on its way


@dataclass(frozen=True)
class Batch:
    """Examples that go through the network together, and the loader's batches that they are: name and size of each."""

    inputs: Inputs
    targets: Tensor
    parts: tuple[tuple[str, int], ...]

    @property
    def where(self) -> str:
        """A name for errors."""
        first, last = self.parts[0][0], self.parts[-1][0]
        return first if first == last else f"{first} to {last.lower()}"

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.parts]

    def split(self, values: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The loader's batches again, of values `[N, ...]`: name, values and targets."""
        if len(self.parts) == 1:
            yield self.where, values, self.targets
            return
        pieces = zip(values.split(self.sizes), self.targets.split(self.sizes), strict=True)
        for (name, _), (own, targets) in zip(self.parts, pieces, strict=True):
            yield name, own, targets


@dataclass
class Gathering:
    """Records of one network over a loader. Batches of one form go together once a first one has shown how many may,
    as far as the outputs of the first to do so are the same as alone.

    `columns`: as many gradients as there are outputs come together. `ranked`: the columns of all are sorted at once.
    """

    tape: Tape
    create_graph: bool = False
    columns: bool = False
    ranked: bool = False
    enabled: bool = True
    _room: dict[Hashable, int] = field(default_factory=dict, init=False)
    _checked: set[Hashable] = field(default_factory=set, init=False)

    def records(self, read: Iterable[tuple[str, Inputs, Tensor]]) -> Iterator[tuple[Record, Batch]]:
        """The batches of the loader, neighbors of one form together as far as there is room.

        Some of them are read ahead, and kept as copies, as a loader may write the next one into the same memory.
        """
        waiting: list[Batch] = []
        form: Hashable = None
        for where, inputs, targets in read:
            batch = Batch(inputs, targets, ((where, len(targets) if targets.dim() else 1),))
            size, before, form = batch.sizes[0], form, _form(batch)
            room = self._room.get(form, 0) if form is not None and self.enabled else 0
            count = sum(one.sizes[0] for one in waiting)
            if waiting and (form != before or count + size > room):
                yield from self._recorded(waiting, before)
                waiting, count = [], 0
            waiting.append(batch)
            if form is None or count + 2 * size > room:  # another such batch does not fit
                yield from self._recorded(waiting, form)
                waiting = []
            else:
                waiting[-1] = replace(batch, inputs=inputs.copy(), targets=targets.clone())
        yield from self._recorded(waiting, form)

    def _recorded(self, batches: list[Batch], form: Hashable) -> Iterator[tuple[Record, Batch]]:
        if len(batches) > 1:
            batch = _joined(batches)
            if form in self._checked:
                yield from self._one(batch)
                return
            record = self._tried(batch, batches)
            if record is not None:
                self._checked.add(form)
                yield record, batch
                return
            self._room[form] = 0
        for one in batches:
            for record, own in self._one(one):
                if form is not None and form not in self._room:
                    self._room[form] = self._examples(record)
                yield record, own
                del record  # nobody needs it any more, and it is large

    def _tried(self, batch: Batch, parts: list[Batch]) -> Record | None:
        """A pass over a gathered batch; None if its first or last part comes out differently than alone."""
        try:
            with torch.no_grad():
                first, last = (self.tape.forward({}, part.inputs.copy()) for part in (parts[0], parts[-1]))
            record = self.tape.record(batch.inputs, self.create_graph)
        except Exception as failure:  # whatever it is, batches as they are may do without
            logger.info("The network does not take %s together (%s); batches stay as they are", batch.where, failure)
            return None
        outputs = record.outputs
        if len(outputs) == len(batch.targets):
            pairs = (outputs[: len(first)], first), (outputs[-len(last) :], last)
            if all(agree(found, alone, alone) for found, alone in pairs):
                return record
        logger.info("Examples have other outputs in another batch; batches stay as they are")
        return None

    def _one(self, batch: Batch) -> Iterator[tuple[Record, Batch]]:
        """The batch as one record, or one record per example where it mixes them."""
        try:
            record = self.tape.record(batch.inputs, self.create_graph)
        except MixedExamplesError as mixed:
            check_targets(batch.where, mixed.outputs, batch.targets)
            records = self.tape.singles(batch.inputs, mixed.outputs, self.create_graph)
            for record, targets in zip(records, batch.targets.split(1), strict=True):
                yield record, Batch(record.inputs, targets, ((batch.where, 1),))
                del record
        else:
            check_targets(batch.where, record.outputs, batch.targets)
            yield record, batch

    def _examples(self, record: Record) -> int:
        """How many examples like these may go together. None, where values or the order of a whole batch may decide
        which way it takes, or where sums over a longer batch lose digits.
        """
        if record.decides or record.graph.reorders or record.graph.divided or record.outputs.dtype != record.dtype:
            return 0
        outputs = record.outputs[0].numel()
        numbers = record.computed + sum(tensor.numel() for tensor in record.inputs.tensors())
        each = numbers / record.examples * (outputs if self.columns else 1) * record.outputs.element_size()
        if self.ranked:  # a matrix in float64, and what becomes of it
            each = max(each, 32 * outputs**2)
        return min(_EXAMPLES, int(self.tape.budget / _SHARE / each))


def _joined(batches: list[Batch]) -> Batch:
    first, *others = (batch.inputs.split(len(batch.targets)) for batch in batches)
    targets = torch.cat([batch.targets for batch in batches])
    return Batch(first.beside(others), targets, tuple(part for batch in batches for part in batch.parts))


def _form(batch: Batch) -> Hashable:
    """What batches must have in common to be one; None where an input is not divided into examples."""
    targets = batch.targets
    form = batch.inputs.form(len(targets)) if targets.dim() and len(targets) else None
    return None if form is None else (form, targets.shape[1:], targets.dtype)
