"""The one pass over the data (two for ekfac)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.batches import Inputs, Unpack, unpack
from lapwing.curvature.accumulator import sum_dtype
from lapwing.curvature.blocks import Block, deliver
from lapwing.curvature.curvature import Curvature
from lapwing.curvature.diagonal import DiagonalAccumulator
from lapwing.curvature.hessian import add_hessian
from lapwing.curvature.kinds import columns
from lapwing.curvature.kronecker import KroneckerAccumulator
from lapwing.curvature.structures import StructureOptions, arrange, build, group
from lapwing.errors import InputError
from lapwing.likelihoods import Likelihood, Statistics
from lapwing.progress import bar
from lapwing.tape import MixedExamplesError, Record, Tape


@dataclass(frozen=True)
class Fit:
    """What to accumulate. `max_columns` bounds the backward passes per batch of the exact GGN."""

    structure: str
    kind: str
    likelihood: Likelihood
    options: StructureOptions
    samples: int = 1
    max_columns: int = 10_000
    unpack: Unpack | None = None
    progress: bool = True

    def run(self, tape: Tape, loader: Iterable[Any], passes: int, generator: torch.Generator | None) -> Curvature:
        """Accumulate over `passes` passes of the loader; sums are those of one."""
        if iter(loader) is loader and passes * (2 if self.structure == "ekfac" else 1) > 1:
            raise InputError(
                "This fit reads the data more than once (structure='ekfac' or passes > 1), but the loader is an "
                "iterator that can be read only once. Pass a DataLoader or a list of batches."
            )
        statistics, gradient, blocks = Statistics(), dict[str, Tensor](), tuple[Block, ...]()
        for record, targets in self._batches(tape, loader, passes, f"fit {self.structure}"):
            if not blocks:
                blocks = self._blocks(tape)
            statistics += self.likelihood.statistics(record.outputs.detach(), targets)
            slope = record.gradient(self.likelihood.log_prob(record.outputs, targets).sum())
            slope = {name: value.to(sum_dtype(value.dtype)) for name, value in slope.items()}
            gradient = {name: value + gradient[name] if gradient else value for name, value in slope.items()}
            self._add(record, targets, blocks, generator)
        if not blocks:
            raise InputError("The loader is empty: it yielded no batch, so there is nothing to fit.")
        if self.structure == "ekfac":
            blocks = self._second_phase(tape, loader, passes, blocks, generator)
        return Curvature(self.structure, self.kind, blocks, statistics, gradient).scale(1 / passes)

    def _blocks(self, tape: Tape) -> tuple[Block, ...]:
        assert tape.layers is not None
        tape.layers = arrange(self.structure, tape.layers, self.options)
        like = next(iter(tape.parameters.values()))
        return tuple(
            Block(layers, build(self.structure, layers, self.options, like.detach()))
            for layers in group(self.structure, tape.layers)
        )

    def _batches(self, tape: Tape, loader: Iterable[Any], passes: int, title: str) -> Iterator[tuple[Record, Tensor]]:
        device = next(iter(tape.parameters.values())).device
        for _ in range(passes):
            for number, batch in enumerate(bar(loader, title, self.progress)):
                where = f"Batch {number}"
                inputs, targets = unpack(batch, where, self.unpack)
                inputs, targets = inputs.to(device), targets.to(device)
                inputs.check_finite(where)
                for record, own in _recorded(tape, inputs, targets, where, create_graph=self.kind == "hessian"):
                    self.likelihood.check(record.outputs.detach(), own, where)
                    yield record, own

    def _add(
        self, record: Record, targets: Tensor, blocks: tuple[Block, ...], generator: torch.Generator | None
    ) -> None:
        if self.kind == "hessian":
            add_hessian(record, self.likelihood, targets, blocks)
            return
        for block in blocks:
            if len(block.layers) == 1:
                inputs = record.layer_inputs(block.layers[0])
                if inputs is not None:
                    block.accumulator.observe(inputs)
        vectors = columns(self.kind, self.likelihood, record.outputs, targets, self.samples, generator)
        if vectors.count > self.max_columns:
            raise InputError(
                f"curvature={self.kind!r} for outputs of shape {list(record.outputs.shape)} takes {vectors.count} "
                f"backward passes per batch, more than max_columns={self.max_columns}. Use curvature='fisher' or "
                "'empirical', or raise max_columns."
            )
        deliver(record, vectors, blocks, lambda block, gradients: block.accumulator.update(gradients))

    def _second_phase(
        self,
        tape: Tape,
        loader: Iterable[Any],
        passes: int,
        blocks: tuple[Block, ...],
        generator: torch.Generator | None,
    ) -> tuple[Block, ...]:
        """Freeze the Kronecker bases and accumulate the exact diagonal of H in them."""
        refined = tuple(
            replace(block, accumulator=_eigen(block.accumulator, self.options.budget))
            if isinstance(block.accumulator, KroneckerAccumulator)
            else block
            for block in blocks
        )
        targets_of = tuple(block for block in refined if block.accumulator.kind == "ekfac")
        for record, targets in self._batches(tape, loader, passes, "fit ekfac, second pass"):
            self._add(record, targets, targets_of, generator)
        return refined


def _recorded(
    tape: Tape, inputs: Inputs, targets: Tensor, where: str, create_graph: bool
) -> Iterator[tuple[Record, Tensor]]:
    """The batch as one record, or one record per example where it mixes them."""
    try:
        record = tape.record(inputs, create_graph)
    except MixedExamplesError as mixed:
        _check_count(targets, mixed.outputs, where)
        yield from zip(tape.singles(inputs, mixed.outputs, create_graph), targets.split(1), strict=True)
    else:
        _check_count(targets, record.outputs, where)
        yield record, targets


def _check_count(targets: Tensor, outputs: Tensor, where: str) -> None:
    if targets.dim() == 0 or targets.shape[0] != outputs.shape[0]:
        raise InputError(
            f"{where}: {targets.shape[0] if targets.dim() else 'a single number as'} targets for "
            f"{outputs.shape[0]} outputs. The first dimension of both must be the examples."
        )


def _eigen(factors: KroneckerAccumulator, budget: int) -> DiagonalAccumulator:
    decomposition = factors.decompose(None)
    zeros = torch.zeros(decomposition.basis.shape, dtype=factors.inputs.dtype, device=factors.inputs.device)
    return DiagonalAccumulator(decomposition.basis, zeros, budget, kind="ekfac")
