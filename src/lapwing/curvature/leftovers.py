"""Single examples that batches leave over, each with a vector of its own: kept until they fill a batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.batches import Inputs
from lapwing.columns import given
from lapwing.curvature.blocks import Block, deliver, update
from lapwing.errors import InputError
from lapwing.tape import Record, Tape, agree


@dataclass(frozen=True)
class _Kept:
    """Examples `[M]` of a batch, the outputs that they had there, and their vectors."""

    inputs: Inputs
    outputs: Tensor
    vectors: Tensor


@dataclass
class Leftovers:
    """Adds `Σ_n J_nᵀ v_n v_nᵀ J_n` to blocks, over examples of different batches together.

    The first of a form are run at once, and tell whether examples may be run without the batch that they come from.
    """

    _alone: set[Hashable] = field(default_factory=set, init=False)
    _kept: list[_Kept] = field(default_factory=list, init=False)
    _form: Hashable = field(default=None, init=False)

    def add(self, record: Record, examples: Tensor, vectors: Tensor, blocks: tuple[Block, ...]) -> bool:
        """Add examples of a pass, each as often as it is named, `[M]` indices, and their vectors `[M, *output]`.

        False if they do not come out as they do there.
        """
        if not len(examples):
            return True
        graph, form = record.graph, record.inputs.form(record.examples)
        waits = form in self._alone and not (record.decides or graph.reorders or graph.divided)
        for start in range(0, len(examples), record.examples):
            part = slice(start, start + record.examples)
            if waits:
                self._keep(record, form, examples[part], vectors[part], blocks)
                continue
            alone = record.of(examples[part])
            if alone is None:
                return False
            deliver(alone, given(vectors[part].unsqueeze(0)), blocks, update)
        if form is not None:
            self._alone.add(form)
        return True

    def _keep(
        self, record: Record, form: Hashable, examples: Tensor, vectors: Tensor, blocks: tuple[Block, ...]
    ) -> None:
        count = sum(len(kept.vectors) for kept in self._kept)
        if form != self._form or count + len(examples) > record.examples:
            self.flush(record.tape, blocks)
        inputs = record.inputs.split(record.examples).pick(examples)
        self._kept.append(_Kept(inputs, record.outputs.detach()[examples], vectors))
        self._form = form

    def flush(self, tape: Tape, blocks: tuple[Block, ...]) -> None:
        """Run what is kept."""
        if not self._kept:
            return
        first, *others = (kept.inputs.split(len(kept.vectors)) for kept in self._kept)
        outputs = torch.cat([kept.outputs for kept in self._kept])
        vectors = torch.cat([kept.vectors for kept in self._kept])
        self._kept = []
        record = tape.record(first.beside(others))
        if not agree(record.outputs, outputs, outputs):
            raise InputError(
                "Some examples give other outputs together with those of other batches than with their own, so they "
                "interact. Examples must be independent in eval mode."
            )
        deliver(record, given(vectors.unsqueeze(0)), blocks, update)
