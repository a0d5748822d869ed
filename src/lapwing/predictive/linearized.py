"""Outputs of the network linearized in its weights: `f(x) + J(x)(θ − θ̃)` is Gaussian under the posterior.

The Jacobian is never formed: `J P⁻¹ Jᵀ` is contracted from `(a, g)` layer by layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.basis import Basis, DenseBasis, KroneckerBasis
from lapwing.batches import Inputs
from lapwing.columns import identity
from lapwing.curvature import Block
from lapwing.curvature.blocks import deliver
from lapwing.errors import InputError
from lapwing.gradients import Gradients, Rows
from lapwing.head import head_inputs
from lapwing.likelihoods.base import GaussianOutputs
from lapwing.posterior import BlockPosterior, Posterior
from lapwing.predictive.links import needs_covariances
from lapwing.predictive.lowrank import Coordinates
from lapwing.predictive.portions import portions
from lapwing.probe import agree
from lapwing.progress import bar
from lapwing.reflectors import LowRankBasis
from lapwing.tape import MixedExamplesError, Record, Tape

_FULL_COVARIANCE = 64
_MOST, _ENOUGH = 4, 2**30  # a covariance may take so many budgets, or so many times so many bytes if that is more


@dataclass(frozen=True)
class Latent:
    """Gaussian outputs: `mean: [N, *output]`, and `covariance` over the D outputs of an example

    `[N, D, D]`, over all examples `[N·D, N·D]` (joint), or the variances `[N, *output]` (diagonal).
    """

    mean: Tensor
    covariance: Tensor
    diagonal: bool = False

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.mean, self.covariance))

    def outputs(self) -> GaussianOutputs:
        """As a likelihood integrates over them; of a covariance that is not joint."""
        if self.diagonal:
            return GaussianOutputs(self.mean, self.covariance, None)
        variance = self.covariance.diagonal(dim1=1, dim2=2).reshape(self.mean.shape)
        return GaussianOutputs(self.mean, variance, self.covariance)


def kept_covariance(link: str | None) -> int:
    """Outputs up to which a prediction through this link keeps the covariance between them."""
    return sys.maxsize if needs_covariances(link) else _FULL_COVARIANCE


def latent(
    tape: Tape, posterior: Posterior, inputs: Inputs, joint: bool, keep: int, max_columns: int, show: bool = False
) -> Latent:
    """Mean and covariance of the linearized outputs; differentiable in the inputs if they require grad.

    Where an example has more than `keep` outputs, only their variances are computed. Inputs that do not fit into memory
    go in portions, unless they are wanted together.
    """
    parts = [inputs] if joint else portions(tape, inputs)
    every = [_latent(tape, posterior, part, joint, keep, max_columns) for part in bar(parts, "predict", show)]
    return every[0] if len(every) == 1 else _joined(every)


def _latent(tape: Tape, posterior: Posterior, inputs: Inputs, joint: bool, keep: int, max_columns: int) -> Latent:
    create_graph = inputs.requires_grad()
    try:
        record = tape.record(inputs, create_graph)
    except MixedExamplesError as mixed:
        if joint:
            raise
        diagonal = _only_variances(mixed.outputs, keep, max_columns)
        singles = tape.singles(inputs, mixed.outputs, create_graph)
        found = _joined([_moments(single, posterior, joint, diagonal) for single in singles])
    else:
        if joint:
            _check_joint(record.outputs, max_columns)
        head = _of_head(record, posterior) if not joint and record.outputs[0].numel() > keep else None
        if head is not None:
            return head if create_graph else Latent(head.mean.detach(), head.covariance.detach(), True)
        diagonal = _only_variances(record.outputs, keep, max_columns)
        if not diagonal:
            _check_memory(record, joint)
        dense = max((_numbers(block) for block in posterior.blocks), default=0)
        columns = 1 if diagonal else record.outputs[0].numel()
        step = record.examples if joint else _examples_at_once(record, columns, dense)
        if step >= record.examples:
            found = _moments(record, posterior, joint, diagonal)
        else:
            split = inputs.split(record.examples)
            parts = []
            for start in range(0, record.examples, step):
                part = _part(tape, record, split.part(start, start + step), start, create_graph)
                parts.append(_moments(part, posterior, joint, diagonal))
            found = _joined(parts)
    return found if create_graph else Latent(found.mean.detach(), found.covariance.detach(), diagonal)


def _of_head(record: Record, posterior: Posterior) -> Latent | None:
    """Mean and variances where the only layer is the last and its output the model's: no column is needed."""
    block = posterior.blocks[0]
    a = head_inputs(record, block.block.layers[0]) if len(posterior.blocks) == len(block.block.layers) == 1 else None
    if a is None or not isinstance(block.basis, KroneckerBasis):
        return None
    basis, scale = block.basis.to(record.dtype), block.scale.detach().to(record.dtype)
    mean = record.outputs
    if posterior.center != "network":
        step = block.block.pack(posterior.step).to(record.dtype).unflatten(0, basis.shape[1:])
        mean = (mean + a @ step.T).to(mean.dtype)
    return Latent(mean, basis.output_variance(a, scale).to(mean.dtype), True)


def _only_variances(outputs: Tensor, keep: int, max_columns: int) -> bool:
    count = outputs[0].numel()
    if count > max_columns:
        raise InputError(
            f"The linearized prediction of {count} outputs per example takes as many backward passes, more than "
            f"max_columns={max_columns}. Use predict(method='pushed'), which samples the same outputs by "
            "Jacobian-vector products, or method='sampled', or raise max_columns."
        )
    return count > keep


def _check_joint(outputs: Tensor, max_columns: int) -> None:
    if outputs.numel() > max_columns:
        raise InputError(
            f"The joint covariance of {len(outputs)} × {outputs[0].numel()} outputs has {outputs.numel()} rows, "
            f"more than max_columns={max_columns}. Draw joint samples by Jacobian-vector products instead: "
            "la.predict(x, method='pushed', joint=True, samples=...). Or give fewer inputs, or raise max_columns."
        )


def _check_memory(record: Record, joint: bool) -> None:
    """A covariance takes the gradients of all outputs of an example side by side, in every layer."""
    outputs = record.outputs
    rows = outputs.numel() if joint else outputs[0].numel()
    size = outputs.element_size() * (sum(use.output.numel() for use in record.uses) // record.examples) * rows
    if size > _MOST * max(record.tape.budget, _ENOUGH):
        raise InputError(
            f"The covariance of {rows} outputs takes their gradients in all layers at once, {size / 2**30:.0f} GB. Use "
            "method='pushed', which samples the same outputs by Jacobian-vector products (with joint=True for their "
            "covariances), la.latent(x, diagonal=True) for variances alone, or raise memory_budget."
        )


def _joined(parts: list[Latent]) -> Latent:
    mean, covariance = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return Latent(mean, covariance, parts[0].diagonal)


def _examples_at_once(record: Record, columns: int, dense: int) -> int:
    """As many examples as let the gradients of all layers for `columns` outputs fit into the budget.

    `dense` is the size of a block that wants the gradients of several layers side by side.
    """
    numbers = sum(use.output.numel() for use in record.uses) + 2 * dense * record.examples
    size = numbers * record.outputs.element_size() * columns
    return max(1, int(record.examples * min(1.0, record.tape.budget / max(1, 2 * size))))


def _numbers(block: BlockPosterior) -> int:
    """How many numbers a block keeps for a gradient until those of all its layers are there."""
    if isinstance(block.basis, LowRankBasis):
        return block.basis.rank
    return block.block.size if len(block.block.layers) > 1 else 0


def _part(tape: Tape, whole: Record, inputs: Inputs, start: int, create_graph: bool) -> Record:
    record = tape.record(inputs, create_graph)
    if not agree(record.outputs, whole.outputs[start : start + record.examples], whole.outputs):
        raise InputError(
            "This batch is too large for memory_budget, and its parts give other outputs than the whole, so it "
            "cannot be split. Predict on fewer inputs at once, or raise memory_budget."
        )
    return record


def _moments(record: Record, posterior: Posterior, joint: bool, diagonal: bool) -> Latent:
    outputs = record.outputs
    examples, count = outputs.shape[0], outputs[0].numel()
    shift = outputs.new_zeros(count, examples, dtype=record.dtype)
    contractions: list[tuple[Block, _Contraction]] = []
    spanned: list[Coordinates] = []
    for block in posterior.blocks:
        step = None if posterior.center == "network" else block.block.pack(posterior.step).to(record.dtype)
        if isinstance(block.basis, LowRankBasis):
            spanned.append(Coordinates.zeros(block.basis.to(record.dtype), block.scale, outputs))
            contractions += _layer_by_layer(block.block, spanned[-1], step)
        else:
            basis, scale = block.basis.to(record.dtype), block.scale.detach().to(record.dtype)
            contractions.append((block.block, _Contraction(basis, scale, step)))
    by_block = {id(block): contraction for block, contraction in contractions}
    budget = record.tape.budget // 4
    shape = (count, examples) if diagonal else (examples, count, count)
    total = outputs.new_zeros((examples * count,) * 2 if joint else shape, dtype=record.dtype)
    waiting: dict[int, list[Rows]] = {}

    def consume(block: Block, gradients: Gradients) -> None:
        nonlocal total
        contraction = by_block[id(block)]
        columns = slice(gradients.column, gradients.column + gradients.columns)
        part = slice(gradients.start, gradients.start + gradients.examples)
        if contraction.step is not None:
            shift[columns, part] += gradients.contract(contraction.step)
        if contraction.span is not None:
            coordinates, rows = contraction.span
            coordinates.add(gradients, rows, columns, part, budget)
        if joint and isinstance(gradients, Rows):
            waiting.setdefault(id(block), []).append(gradients)
        elif joint:
            total = total + contraction.basis.joint(gradients, contraction.scale, budget)
        elif diagonal:
            total[columns, part] += contraction.basis.variance(gradients, contraction.scale, budget)
        else:
            total[part] += contraction.basis.covariance(gradients, contraction.scale, budget)

    unit = identity(outputs)
    deliver(
        record,
        unit,
        tuple(block for block, _ in contractions),
        consume,
        None if diagonal else unit.count,
        in_parts=not joint,
    )
    for key, pieces in waiting.items():
        rows = Rows(torch.cat([piece.values for piece in sorted(pieces, key=lambda piece: piece.start)], dim=1))
        total = total + by_block[key].basis.joint(rows, by_block[key].scale, budget)
    for coordinates in spanned:
        total = total + (
            coordinates.joint() if joint else coordinates.variance() if diagonal else coordinates.covariance()
        )
    mean = (outputs + shift.T.reshape(outputs.shape)).to(outputs.dtype)
    covariance = total.T.reshape(outputs.shape) if diagonal else total
    return Latent(mean, covariance.to(outputs.dtype), diagonal)


@dataclass(frozen=True)
class _Contraction:
    """A block's basis, scale and step to the center, in the network's dtype.

    `span` of a layer of a low-rank block: the coordinates to add to, and the layer's part of the block's parameters.
    """

    basis: Basis
    scale: Tensor
    step: Tensor | None
    span: tuple[Coordinates, slice] | None = None


def _layer_by_layer(
    block: Block, coordinates: Coordinates, step: Tensor | None
) -> Iterator[tuple[Block, _Contraction]]:
    """`floor·M⁻¹` is diagonal, so each layer of a low-rank block is one of its own, but for its coordinates."""
    start = 0
    for layer in block.layers:
        rows = slice(start, start + layer.size)
        basis = DenseBasis((layer.size,)) if layer.shape is None else KroneckerBasis(layer.shape)
        scale = coordinates.prior(rows).reshape(basis.shape)
        moved = None if step is None else step[rows]
        yield Block((layer,), block.accumulator), _Contraction(basis, scale, moved, (coordinates, rows))
        start = rows.stop
