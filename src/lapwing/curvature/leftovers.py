"""Single examples that batches leave over, each with a vector of its own: kept until they fill a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lapwing.batches import Inputs
from lapwing.columns import Columns, given
from lapwing.errors import InputError
from lapwing.tape import Record, Tape, agree

logger = logging.getLogger("lapwing")
_SHARE = 16  # parts of the budget, one of which is for the batches that are kept


@dataclass(frozen=True)
class _Kept:
    """What a batch leaves over: `examples: [M]` and their `vectors: [M, *output]`, and the batch itself."""

    batch: Inputs
    outputs: Tensor
    examples: Tensor
    vectors: Tensor

    def inputs(self) -> Inputs:
        """Those of the examples."""
        return self.batch.split(len(self.outputs)).pick(self.examples)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.batch.tensors(), self.outputs))


@dataclass
class Leftovers:
    """Backpropagates vectors `v_n` of single examples, those of different batches together, by `backpropagate`.

    They are kept until they fill a batch. Where examples turn out not to come out of it as they did of their own, these
    batches are run once more, with the vectors in their places, and those of later batches of that form at once.
    """

    backpropagate: Callable[[Record, Columns], None]
    _apart: set[Hashable] = field(default_factory=lambda: {None}, init=False)
    _kept: list[_Kept] = field(default_factory=list, init=False)
    _form: Hashable = field(default=None, init=False)

    def add(self, record: Record, examples: Tensor, vectors: Tensor) -> None:
        """Add examples of a pass, each as often as it is named, `[M]` indices, and their vectors `[M, *output]`."""
        form = _form(record)
        for start in range(0, len(examples), record.examples):
            chosen, own = examples[start : start + record.examples], vectors[start : start + record.examples]
            if form in self._apart:
                alone = record.of(_at_least_two(chosen))
                whole = _in_place(record.outputs, chosen, own) if alone is None else _first(own, alone)
                self.backpropagate(record if alone is None else alone, whole)
            else:
                self._keep(record, form, chosen, own)

    def _keep(self, record: Record, form: Hashable, examples: Tensor, vectors: Tensor) -> None:
        new = _Kept(record.inputs.copy(), record.outputs.detach(), examples, vectors)
        count = sum(len(kept.vectors) for kept in (*self._kept, new))
        size = sum(kept.size for kept in (*self._kept, new))
        if form != self._form or count > record.examples or size > record.tape.budget // _SHARE:
            self.flush(record.tape)
        self._kept.append(new)
        self._form = form

    def flush(self, tape: Tape) -> None:
        """Run what is kept."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        together = _together(tape, kept)
        if together is not None:
            self.backpropagate(together, _first(torch.cat([one.vectors for one in kept]), together))
            return
        self._apart.add(self._form)
        for one in kept:
            record = tape.record(one.batch)
            if not agree(record.outputs, one.outputs, one.outputs):
                raise InputError(
                    "A batch that is run once more gives other outputs than before. The model must be a function of "
                    "its inputs in eval mode."
                )
            self.backpropagate(record, _in_place(one.outputs, one.examples, one.vectors))


def _form(record: Record) -> Hashable:
    """What passes must have in common for their examples to make one batch; None where they do not."""
    form = record.inputs.form(record.examples)
    return None if form is None else (form, record.outputs.shape[1:], record.outputs.dtype)


def _at_least_two(examples: Tensor) -> Tensor:
    """A single example is run twice: shapes of one do not tell that it is one, so that they would be probed anew."""
    return examples if len(examples) > 1 else examples.repeat(2)


def _first(vectors: Tensor, record: Record) -> Columns:
    """A column with the vectors of the first examples of a pass, and zeros for the others."""
    missing = record.examples - len(vectors)
    return given(torch.cat([vectors, vectors.new_zeros(missing, *vectors.shape[1:])]).unsqueeze(0))


def _in_place(outputs: Tensor, examples: Tensor, vectors: Tensor) -> Columns:
    """Vectors in the places of their examples in a batch: one column, or several where an example is named often."""
    again = (examples.unsqueeze(1) == examples).tril(-1).sum(1)
    columns = vectors.new_zeros(int(again.amax()) + 1, *outputs.shape)
    columns[again, examples] = vectors
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
    return record if all(agree(part, one.outputs[one.examples], one.outputs) for part, one in parts) else None
