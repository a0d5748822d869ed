"""Single examples that batches leave over, each with vectors of its own: kept until they fill a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lapwing.batches import Inputs
from lapwing.columns import Columns, given
from lapwing.errors import InputError
from lapwing.probe import agree
from lapwing.tape import Record, Tape

logger = logging.getLogger("lapwing")
_SHARE = 16  # parts of the budget, one of which is for the batches that are kept
_CALLS = 3 * 2**20  # numbers that a pass computes in the time that its calls take


@dataclass(frozen=True, eq=False)
class _Batch:
    """A batch that some wait for, and its outputs."""

    inputs: Inputs
    outputs: Tensor

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.inputs.tensors(), self.outputs))


@dataclass(frozen=True)
class _Kept:
    """Examples of a batch, `[M]` indices, and their vectors `[K, M, *output]`."""

    batch: _Batch
    examples: Tensor
    vectors: Tensor

    def inputs(self) -> Inputs:
        """Those of the examples."""
        return self.batch.inputs.split(len(self.batch.outputs)).pick(self.examples)


@dataclass
class Leftovers:
    """Backpropagates vectors of single examples, those of different batches together, by `backpropagate`.

    They are kept until examples with as many vectors each fill a batch. Where they turn out not to come out of it as
    they did of their own, these batches are run once more, with the vectors in their places, and those of later batches
    of that form at once.
    """

    backpropagate: Callable[[Record, Columns], None]
    _apart: set[Hashable] = field(default_factory=lambda: {None}, init=False)
    _waiting: dict[int, list[_Kept]] = field(default_factory=dict, init=False)
    _form: Hashable = field(default=None, init=False)
    _room: int = field(default=0, init=False)
    _spared: float = field(default=0.0, init=False)
    """Examples that a backward pass takes as long for as for its calls."""

    def add(self, record: Record, examples: Tensor, vectors: Tensor, counts: Tensor) -> None:
        """Add examples of a pass, `[M]` indices, and `vectors: [K, M, *output]`, of each the first `counts: [M]`."""
        form = _form(record)
        if form in self._apart and len(examples):
            alone = record.of(_at_least_two(examples))
            whole = _in_place(record.outputs, [(examples, vectors)]) if alone is None else _first(vectors, alone)
            self.backpropagate(record if alone is None else alone, whole)
        elif len(examples):
            if form != self._form:
                self.flush(record.tape)
                self._room = 0
            self._form, self._room = form, max(self._room, record.examples)
            self._spared = _CALLS * record.examples / max(1, record.computed)
            batch = _Batch(record.inputs.copy(), record.outputs.detach())
            for count in counts.unique().tolist():
                own = (counts == count).nonzero().squeeze(1)
                self._keep(record.tape, count, _Kept(batch, examples[own], vectors[:count, own]))

    def _keep(self, tape: Tape, count: int, new: _Kept) -> None:
        if _examples([*self._waiting.get(count, ()), new]) > self._room:
            self._run(tape, self._waiting.pop(count, []))
        self._waiting.setdefault(count, []).append(new)
        batches = {kept.batch for level in self._waiting.values() for kept in level}
        if sum(batch.size for batch in batches) > tape.budget // _SHARE:
            self.flush(tape)

    def flush(self, tape: Tape) -> None:
        """Run what is kept."""
        levels = _levels(self._waiting, self._room, self._spared)
        self._waiting.clear()
        while levels:
            kept = levels.pop()
            if self._form in self._apart:  # every batch once, with all that it left over
                kept, levels = [one for level in (kept, *levels) for one in level], []
            self._run(tape, kept)

    def _run(self, tape: Tape, kept: list[_Kept]) -> None:
        together = None if self._form in self._apart else _together(tape, kept)
        if together is not None:
            self.backpropagate(together, _first(_beside([one.vectors for one in kept]), together))
            return
        self._apart.add(self._form)
        for batch in dict.fromkeys(one.batch for one in kept):
            record = tape.record(batch.inputs)
            if not agree(record.outputs, batch.outputs, batch.outputs):
                raise InputError(
                    "A batch that is run once more gives other outputs than before. The model must be a function of "
                    "its inputs in eval mode."
                )
            own = [(one.examples, one.vectors) for one in kept if one.batch is batch]
            self.backpropagate(record, _in_place(batch.outputs, own))


def _examples(kept: Sequence[_Kept]) -> int:
    return sum(len(one.examples) for one in kept)


def _levels(waiting: dict[int, list[_Kept]], room: int, spared: float) -> list[list[_Kept]]:
    """What goes together of examples with so many vectors each, no more than there is `room` for.

    K backward passes of n examples cost K·(n + spared), whoever has fewer than K vectors; of all ways to divide the
    examples, sorted by how many they have, the one that costs least.
    """
    counts = sorted(waiting, reverse=True)
    sizes = [_examples(waiting[count]) for count in counts]
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first levels: the least cost, and where the last group begins
    for stop in range(1, len(counts) + 1):
        together, found = 0, []
        for start in reversed(range(stop)):
            together += sizes[start]
            if together > room and start + 1 < stop:
                break
            found.append((best[start][0] + counts[start] * (together + spared), start))
        best.append(min(found))
    groups: list[list[_Kept]] = []
    stop = len(counts)
    while stop:
        start = best[stop][1]
        groups.append([kept for count in counts[start:stop] for kept in waiting[count]])
        stop = start
    return groups[::-1]  # those with most first


def _form(record: Record) -> Hashable:
    """What passes must have in common for their examples to make one batch; None where they do not."""
    form = record.inputs.form(record.examples)
    return None if form is None else (form, record.outputs.shape[1:], record.outputs.dtype)


def _at_least_two(examples: Tensor) -> Tensor:
    """A single example is run twice: shapes of one do not tell that it is one, so that they would be probed anew."""
    return examples if len(examples) > 1 else examples.repeat(2)


def _beside(vectors: Sequence[Tensor]) -> Tensor:
    """Those of several, `[K, M, *output]` each, in one; 0 where one has fewer."""
    most = max(len(own) for own in vectors)
    return torch.cat([_lengthened(own, 0, most) for own in vectors], dim=1)


def _lengthened(values: Tensor, dim: int, size: int) -> Tensor:
    """With zeros at the end of a dimension."""
    missing = [size - have if i == dim else have for i, have in enumerate(values.shape)]
    return values if values.shape[dim] == size else torch.cat([values, values.new_zeros(missing)], dim=dim)


def _first(vectors: Tensor, record: Record) -> Columns:
    """Columns with the vectors `[K, M, *output]` of the first examples of a pass, and zeros for the others."""
    return given(_lengthened(vectors, 1, record.examples))


def _in_place(outputs: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Columns:
    """Vectors in the places of their examples in a batch, from indices `[M]` and vectors `[K, M, *output]`."""
    columns = outputs.new_zeros(max(len(vectors) for _, vectors in parts), *outputs.shape)
    for examples, vectors in parts:
        columns[: len(vectors), examples] = vectors
    return given(columns)


def _together(tape: Tape, kept: list[_Kept]) -> Record | None:
    """One pass over the examples of several batches; None if they do not come out as they did there."""
    if len(kept) == 1:
        kept = [replace(kept[0], examples=_at_least_two(kept[0].examples))]
    first, *others = (one.inputs().split(len(one.examples)) for one in kept)
    try:
        record = tape.record(first.beside(others))
    except Exception as failure:  # whatever it is, the batches themselves may do without
        logger.info("The model fails on examples of several batches: %s", failure)
        return None
    sizes = [len(one.examples) for one in kept]
    if record.examples != sum(sizes):
        return None
    parts = zip(record.outputs.split(sizes), kept, strict=True)
    return (
        record if all(agree(part, one.batch.outputs[one.examples], one.batch.outputs) for part, one in parts) else None
    )
