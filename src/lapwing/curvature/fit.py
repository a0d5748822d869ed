"""The one pass over the data (two for ekfac, several for lowrank)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.batches import Unpack, read
from lapwing.columns import Columns, given, side_by_side
from lapwing.curvature import lowrank
from lapwing.curvature.blocks import Block, choose, deliver
from lapwing.curvature.compaction import like_outputs, rank
from lapwing.curvature.curvature import Curvature, Traces
from lapwing.curvature.diagonal import DiagonalAccumulator
from lapwing.curvature.gradient import add_gradient, by_parameter, multiples
from lapwing.curvature.hessian import add_hessian
from lapwing.curvature.kfra import add_kfra
from lapwing.curvature.kinds import RANDOM, check_count, columns, output_gradient
from lapwing.curvature.kronecker import KroneckerAccumulator
from lapwing.curvature.leftovers import Leftovers
from lapwing.curvature.structures import StructureOptions, arrange, build, group
from lapwing.curvature.tied import TiedAccumulator
from lapwing.errors import InputError
from lapwing.gathering import Batch, Gathering
from lapwing.head import head_inputs
from lapwing.likelihoods import Likelihood, Statistics
from lapwing.slope import Slope
from lapwing.tape import Record, Tape


@dataclass(frozen=True)
class Fit:
    """What to accumulate. `max_columns` bounds the backward passes per batch."""

    structure: str
    kind: str
    likelihood: Likelihood
    options: StructureOptions
    samples: int = 1
    max_columns: int = 10_000
    unpack: Unpack | None = None
    progress: bool = True
    kfra_residual: str = "cross"
    rank_tolerance: float = 0.0
    elements: Mapping[str, Tensor] | None = None
    """Of a subnetwork, its elements of each flat parameter."""

    def run(self, tape: Tape, loader: Iterable[Any], passes: int, generator: torch.Generator | None) -> Curvature:
        """Accumulate over `passes` passes of the loader; sums are those of one."""
        if isinstance(loader, Iterator) and (passes > 1 or self.structure in ("ekfac", "lowrank")):
            raise InputError(
                "This fit reads the data more than once (structure='ekfac' or 'lowrank', or passes > 1), but the "
                "loader is an iterator that can be read only once. Pass a DataLoader or a list of batches."
            )
        if self.structure == "lowrank" and passes > 1:
            raise InputError(
                "structure='lowrank' needs the same data in every pass, so it does not average passes=... over "
                "augmented data. Pass one augmented copy as data, or use another structure."
            )
        statistics, slopes, blocks, traces = Statistics(), dict[str, Tensor](), tuple[Block, ...](), Traces()
        leftovers = self._leftovers(blocks, slopes)
        for record, batch in self._batches(tape, loader, passes, f"fit {self.structure}", self.structure == "diag"):
            if not blocks:
                blocks = self._blocks(tape)
                leftovers = self._leftovers(blocks, slopes)
            statistics += self.likelihood.statistics(record.outputs.detach(), batch.targets)
            if self.structure == "lowrank":
                self._add_slope(record, batch.targets, slopes)
            else:
                traces += self._add(record, batch, blocks, leftovers, generator, slopes)
            del record  # its activations, before there are others
        leftovers.flush(tape)
        for block in blocks:
            block.accumulator.settle()
        if not blocks:
            raise InputError("The loader is empty: it yielded no batch, so there is nothing to fit.")
        if self.structure == "ekfac":
            blocks = self._second_phase(tape, loader, passes, blocks, generator)
        if self.structure == "lowrank":
            budget = self.options.budget
            blocks = (lowrank.fill(blocks[0], tape, self.likelihood, loader, self.unpack, budget, self.progress),)
        gradient = by_parameter(tape, slopes)
        curvature = Curvature(self.structure, self.kind, blocks, statistics, gradient, traces)
        return curvature if passes == 1 else curvature.scale(1 / passes)

    def _blocks(self, tape: Tape) -> tuple[Block, ...]:
        assert tape.layers is not None
        tape.layers = arrange(self.structure, tape.layers, self.options)
        like = next(iter(tape.parameters.values()))
        blocks = []
        for layers in group(self.structure, tape.layers):
            chosen = None if self.elements is None else choose(layers, self.elements)
            accumulator = build(self.structure, layers, self.options, like.detach(), chosen=chosen)
            blocks.append(Block(layers, accumulator, chosen))
        return tuple(blocks)

    def _batches(
        self, tape: Tape, loader: Iterable[Any], passes: int, title: str, several: bool
    ) -> Iterator[tuple[Record, Batch]]:
        """Passes over the data; `several` columns of an example may come together, which takes memory."""
        device = next(iter(tape.parameters.values())).device
        # KFRA averages over a batch before it goes on, so that it must be the loader's.
        gathering = Gathering(tape, self.kind == "hessian", several, self.rank_tolerance > 0, self.kind != "kfra")
        for _ in range(passes):
            for record, batch in gathering.records(read(loader, device, self.unpack, title, self.progress)):
                for where, outputs, targets in batch.split(record.outputs.detach()):
                    self.likelihood.check(outputs, targets, where)
                yield record, batch
                del record  # its activations, before there are others

    def _add(
        self,
        record: Record,
        batch: Batch,
        blocks: tuple[Block, ...],
        leftovers: Leftovers,
        generator: torch.Generator | None,
        slopes: dict[str, Tensor] | None = None,
    ) -> Traces:
        """Add a batch to the blocks, and its gradient to `slopes`; returns what was dropped of it."""
        targets = batch.targets
        if self.kind == "hessian":
            add_hessian(record, self.likelihood, targets, blocks)
            self._add_slope(record, targets, slopes)
            return Traces()
        for block in blocks:
            if len(block.layers) == 1:
                inputs = record.layer_inputs(block.layers[0])
                if inputs is not None:
                    block.accumulator.observe(inputs)
        if self.kind == "ggn" and len(blocks) == 1 and self._add_head(record, targets, blocks[0]):
            self._add_slope(record, targets, slopes)
            return Traces()
        if self.kind == "kfra":
            blocks = add_kfra(record, self.likelihood, targets, blocks, self.kfra_residual)
        vectors = self._columns(record, batch, generator)
        size = vectors.count * record.outputs.numel() * 8
        ranked = self.kind == "ggn" and self.rank_tolerance > 0 and 4 * size <= self.options.budget
        # The gradient comes with the first column where that has its direction, and each layer a block of its own. Of
        # ranked columns that takes one of all examples: next to nothing for kron, but not where gradients are formed.
        whole = self.kind != "kfra" and all(len(block.layers) == 1 and block.chosen is None for block in blocks)
        shared = slopes is not None and whole and (self.structure == "kron" or not ranked)
        if slopes is not None and shared and self.kind == "fisher" and vectors.count == 1:
            self._add_sampled(record, targets, vectors, blocks, leftovers, slopes)
            return Traces()
        slope = None if slopes is None or not shared or vectors.slope is None else Slope.of(slopes, vectors.slope)
        if slope is None:
            self._add_slope(record, targets, slopes)
        if blocks:
            check_count(self.kind, vectors.count, record.outputs, self.max_columns)
        if ranked:
            return self._add_ranked(record, vectors, blocks, leftovers, batch.sizes, slope)
        if blocks:
            at_once = self._at_once(record, vectors, blocks)
            deliver(record, vectors, blocks, at_once=at_once, slope=slope, in_parts=at_once is not None)
        return Traces()

    def _columns(self, record: Record, batch: Batch, generator: torch.Generator | None) -> Columns:
        """What to backpropagate; drawn for each batch of the loader, so that draws do not depend on gathering."""
        if self.kind not in RANDOM:
            return columns(self.kind, self.likelihood, record.outputs, batch.targets, self.samples, generator)
        return side_by_side(
            [
                columns(self.kind, self.likelihood, outputs, targets, self.samples, generator)
                for _, outputs, targets in batch.split(record.outputs)
            ]
        )

    def _at_once(self, record: Record, vectors: Columns, blocks: tuple[Block, ...]) -> int | None:
        """Structures that form gradients read the inputs once for as many columns as fit into memory."""
        if not self._forms_gradients(blocks):
            return None
        uses = {i for block in blocks for layer in block.layers for i in record.uses_of(layer)}
        size = sum(record.uses[i].output.numel() for i in uses) * record.outputs.element_size()
        turns = math.ceil(vectors.count / max(1, self.options.budget // max(1, size)))
        return math.ceil(vectors.count / max(1, turns))  # turns of equal size

    def _forms_gradients(self, blocks: tuple[Block, ...]) -> bool:
        """Whether the blocks need the gradients themselves: not in the first phase of ekfac, which is kron's."""
        return self.structure in ("diag", "ekfac") and not any(
            isinstance(block.accumulator, KroneckerAccumulator | TiedAccumulator) for block in blocks
        )

    def _add_head(self, record: Record, targets: Tensor, block: Block) -> bool:
        """Where the one layer is the last and its output the model's, no column is needed: `G` is `Σ_n Λ_n`."""
        a = head_inputs(record, block.layers[0]) if len(block.layers) == 1 else None
        outputs, accumulator = record.outputs.detach(), block.accumulator
        if a is None or not isinstance(accumulator, KroneckerAccumulator | DiagonalAccumulator):
            return False
        if isinstance(accumulator, DiagonalAccumulator):
            if not accumulator.elementwise:
                return False
            diagonal = self.likelihood.hessian_diagonal(outputs, targets)
            accumulator.sums += (diagonal.to(a.dtype).T @ a.square()).to(accumulator.sums.dtype)
        elif accumulator.output_sum.dense:
            accumulator.add_output_factor(self.likelihood.hessian_sum(outputs, targets))
        else:
            accumulator.output_sum.add_squares(self.likelihood.hessian_diagonal(outputs, targets).sum(0))
        return True

    def _add_slope(self, record: Record, targets: Tensor, slopes: dict[str, Tensor] | None) -> None:
        """Add the gradient by a backward pass of its own."""
        if slopes is not None:
            add_gradient(record, output_gradient(self.likelihood, record.outputs, targets), slopes)

    def _leftovers(self, blocks: tuple[Block, ...], slopes: dict[str, Tensor]) -> Leftovers:
        """Of a draw other than the label the gradient is left over, of ranked columns the curvature."""
        if self.kind == "fisher":
            return Leftovers(
                lambda record, vectors: add_gradient(record, vectors.part(0, vectors.count).sum(0), slopes)
            )
        return Leftovers(lambda record, vectors: deliver(record, vectors, blocks))

    def _add_sampled(
        self,
        record: Record,
        targets: Tensor,
        vectors: Columns,
        blocks: tuple[Block, ...],
        leftovers: Leftovers,
        slopes: dict[str, Tensor],
    ) -> None:
        """One draw per example. Where its column has the direction of the gradient, as it has where the label was drawn
        and wherever there is one direction only, it gives the gradient too; what that lacks of the other examples is
        left over.
        """
        drawn, own = vectors.part(0, 1)[0], output_gradient(self.likelihood, record.outputs, targets)
        scale, along = multiples(drawn.flatten(1), own.flatten(1))
        others = (~along).nonzero().squeeze(1)
        if 2 * len(others) > len(along):
            self._add_slope(record, targets, slopes)
            deliver(record, vectors, blocks)
            return
        leftovers.add(record, others, (own - drawn)[others].unsqueeze(0), torch.ones_like(others))
        deliver(record, vectors, blocks, slope=Slope.of(slopes, scale))

    def _add_ranked(
        self,
        record: Record,
        vectors: Columns,
        blocks: tuple[Block, ...],
        leftovers: Leftovers,
        sizes: Sequence[int],
        slope: Slope | None,
    ) -> Traces:
        """The largest columns on the batch as it is, what is left of them on a batch of their examples alone."""
        if slope is not None:
            deliver(record, given(vectors.part(0, 1)), blocks, slope=slope)
        ranked = rank(vectors, self.rank_tolerance, sizes, first=0 if slope is None else 1)
        whole = ranked.whole_batches()
        if whole:
            deliver(record, given(like_outputs(ranked.columns[:whole], record.outputs)), blocks)
        examples, left, counts = ranked.left_over(whole)
        leftovers.add(record, examples, like_outputs(left, record.outputs), counts)
        return Traces(ranked.dropped, ranked.total)

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
            if isinstance(block.accumulator, KroneckerAccumulator | TiedAccumulator)
            else block
            for block in blocks
        )
        targets_of = tuple(block for block in refined if block.accumulator.kind == "ekfac")
        leftovers = self._leftovers(targets_of, {})
        for record, batch in self._batches(tape, loader, passes, "fit ekfac, second pass", several=True):
            self._add(record, batch, targets_of, leftovers, generator)
            del record
        leftovers.flush(tape)
        return refined


def _eigen(factors: KroneckerAccumulator | TiedAccumulator, budget: int) -> DiagonalAccumulator:
    decomposition = factors.decompose(None)
    like = next(iter(factors.tensors().values()))
    zeros = torch.zeros(decomposition.basis.shape, dtype=like.dtype, device=like.device)
    return DiagonalAccumulator(decomposition.basis, zeros, budget, kind="ekfac")
