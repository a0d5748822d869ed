"""Small batches go through the network together: a pass over many examples takes hardly longer than one over few.

What is summed over the data does not depend on how it is divided, so the tape's batches need not be the loader's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lapwing.batches import Inputs
from lapwing.jvp import REFUSALS
from lapwing.tape import Record, Tape, agree

logger = logging.getLogger("lapwing")
_EXAMPLES = 512  # more of them make an example no cheaper
_SHARE = 64  # parts of the budget, one of which is for the activations of a gathered batch
_FEW = 4


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

    def apart(self, outputs: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The loader's batches again: name, outputs and targets."""
        if len(self.parts) == 1:
            yield self.where, outputs, self.targets
            return
        split = zip(outputs.split(self.sizes), self.targets.split(self.sizes), strict=True)
        for (name, _), (own, targets) in zip(self.parts, split, strict=True):
            yield name, own, targets


class Gathering:
    """The batches of a loader for one network, the small ones together once a first pass has shown how large it is."""

    def __init__(self, tape: Tape) -> None:
        self._tape, self._room, self._agreed = tape, 0, False

    def see(self, record: Record, columns: int) -> None:
        """Learn from a pass how many examples may go together, if so many columns of each do. One, where values or the
        order of a whole batch may decide which way it takes, or where sums over a longer batch lose digits.
        """
        if self._room:
            return
        size = (
            sum(use.output.numel() for use in record.uses) * record.outputs.element_size() / record.examples * columns
        )
        bound = record.decides or record.graph.reorders or record.graph.divided or record.outputs.dtype != record.dtype
        self._room = 1 if bound else max(1, min(_EXAMPLES, int(self._tape.budget / _SHARE / max(1.0, size))))

    def batches(self, read: Iterable[tuple[str, Inputs, Tensor]]) -> Iterator[Batch]:
        """Batches of the loader, neighbors of one form together as far as there is room."""
        waiting: list[Batch] = []
        examples = 0
        for where, inputs, targets in read:
            size = len(targets) if targets.dim() else 1
            batch = Batch(inputs, targets, ((where, size),))
            if waiting and (examples + size > self._room or not _alike(waiting[0], batch)):
                yield from self._together(waiting)
                waiting, examples = [], 0
            waiting.append(batch)
            examples += size
            if examples + size > self._room:  # another such batch does not fit
                yield from self._together(waiting)
                waiting, examples = [], 0
        yield from self._together(waiting)

    def _together(self, batches: list[Batch]) -> Iterable[Batch]:
        if len(batches) < 2:
            return batches
        if not self._agreed and not self._independent(batches[-1], batches[0]):
            self._room = 1
            return batches
        self._agreed = True
        leaves = zip(*(batch.inputs.split(len(batch.targets)).examples() for batch in batches), strict=True)
        inputs = batches[0].inputs.split(len(batches[0].targets)).join([torch.cat(parts) for parts in leaves])
        parts = tuple(part for batch in batches for part in batch.parts)
        return [Batch(inputs, torch.cat([batch.targets for batch in batches]), parts)]

    def _independent(self, one: Batch, other: Batch) -> bool:
        """Whether examples of one batch come out between those of another as they do in their own."""
        split, around = (batch.inputs.split(len(batch.targets)) for batch in (one, other))
        company = zip(split.examples(), around.examples(), strict=True)
        mixed = [torch.cat([theirs[:_FEW], own[:_FEW], theirs[:_FEW]]) for own, theirs in company]
        try:
            with torch.no_grad():
                alone, beside = (self._tape.forward({}, inputs) for inputs in (one.inputs, split.join(mixed)))
        except REFUSALS as failure:
            logger.info("The model fails on batches of another size (%s); they stay as they are", failure)
            return False
        first, count = min(_FEW, len(other.targets)), min(_FEW, len(one.targets))
        same = len(beside) == len(mixed[0]) and agree(beside[first : first + count], alone[:count], alone)
        if not same:
            logger.info("Examples have other outputs in another batch; batches stay as they are")
        return same


def _alike(one: Batch, other: Batch) -> bool:
    form = _form(one)
    return form is not None and form == _form(other)


def _form(batch: Batch) -> Any:
    """What two batches must have in common to be one; None where an input is not divided into examples."""
    count = len(batch.targets) if batch.targets.dim() else 0
    if not count or not batch.inputs.all_batched(count):
        return None
    leaves, spec = tree_flatten((batch.inputs.args, batch.inputs.kwargs))
    if not all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in leaves):
        return None
    forms = [(leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return spec, forms, batch.targets.shape[1:], batch.targets.dtype
