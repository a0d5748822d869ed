"""The neural tangent kernel `J(x) Π⁻¹ J(z)ᵀ` between outputs at two sets of inputs, from `(a, g)`, layer by layer.

For a layer with one position per example it is a product of two Gram matrices, `(a Π⁻¹ a′ᵀ) ∘ (g g′ᵀ)`; elsewhere the
gradients of a few of the layer's outputs at a time are contracted. The Jacobian is never formed. Contractions are in
float64, so that kernels between any sets of inputs are blocks of one positive semidefinite matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.basis import Basis, DenseBasis, KroneckerBasis
from lapwing.batches import Inputs
from lapwing.columns import identity
from lapwing.errors import InputError
from lapwing.gradients import Gradients, Layer, Pair, Rows, Uses
from lapwing.probe import agree
from lapwing.tape import MixedExamplesError, Record, Tape
from lapwing.tokens import TokenPair


@dataclass(frozen=True, eq=False)
class Features:
    """The gradients of all D outputs of some examples by layer, as the tape delivers them; `outputs: [n, *output]`."""

    outputs: Tensor
    gradients: dict[str, Gradients]

    @property
    def count(self) -> int:
        """D, the outputs of an example."""
        return self.outputs[0].numel()

    @property
    def bytes(self) -> int:
        """What holding them takes, about."""
        return sum(_numbers(value) for value in self.gradients.values()) * self.outputs.element_size()


def read_features(tape: Tape, inputs: Inputs, max_columns: int, create_graph: bool = False) -> list[Features]:
    """The features of a batch, in parts that fit into the tape's budget. The model must be borrowed (see `guard`)."""
    try:
        record = tape.record(inputs, create_graph)
    except MixedExamplesError as mixed:
        return [_features(single, max_columns) for single in tape.singles(inputs, mixed.outputs, create_graph)]
    numbers = sum(use.output.numel() for use in record.uses) // record.examples
    each = numbers * record.outputs[0].numel() * record.outputs.element_size()
    step = max(1, tape.budget // max(1, 4 * each))
    if step >= record.examples:
        return [_features(record, max_columns)]
    split, found = inputs.split(record.examples), []
    for start in range(0, record.examples, step):
        part = tape.record(split.part(start, start + step), create_graph)
        if not agree(part.outputs, record.outputs[start : start + step], record.outputs):
            raise InputError(
                "This batch is too large for memory_budget, and its parts give other outputs than the whole, so it "
                "cannot be split. Pass smaller batches, or raise memory_budget."
            )
        found.append(_features(part, max_columns))
    return found


def _features(record: Record, max_columns: int) -> Features:
    outputs = record.outputs if record.create_graph else record.outputs.detach()
    if outputs[0].numel() > max_columns:
        raise InputError(
            f"The kernel of {outputs[0].numel()} outputs per example takes as many backward passes, more than "
            f"max_columns={max_columns}. Use lapwing.sample_by_optimization, or raise max_columns."
        )
    found: dict[str, list[Gradients]] = {}

    def collect(layer: Layer, gradients: Gradients) -> None:
        found.setdefault(layer.name, []).append(gradients)

    names = {layer.name for layer in record.tape.layers or ()}
    unit = identity(record.outputs)
    record.sweep(unit, collect, unit.count, names)
    return Features(outputs, {name: _joined(pieces) for name, pieces in found.items()})


def _joined(pieces: list[Gradients]) -> Gradients:
    rows = sorted((piece for piece in pieces if isinstance(piece, Rows)), key=lambda piece: piece.start)
    if not rows:
        assert len(pieces) == 1
        return pieces[0]
    return Rows(torch.cat([piece.values for piece in rows], dim=1))


@dataclass(frozen=True, eq=False)
class Kernel:
    """`k(x, z) = J(x) Π⁻¹ J(z)ᵀ`; `variances` are the prior's, Π⁻¹ in the layout of each layer `[p]`, float64.

    `independent` leaves out what two different outputs have in common.
    """

    layers: tuple[Layer, ...]
    variances: dict[str, Tensor]
    independent: bool
    budget: int

    @staticmethod
    def of(
        layers: tuple[Layer, ...], precisions: Mapping[str, Tensor], independent: bool, budget: int, like: Tensor
    ) -> Kernel:
        """From prior precisions by parameter name, each 0-d or in the parameter's shape."""
        variances = {}
        for layer in layers:
            sizes = zip(layer.parameters, layer.sizes, strict=True)
            expanded = {name: precisions[name].detach().to(like.device).double().expand(size) for name, size in sizes}
            variances[layer.name] = layer.pack({name: 1 / value for name, value in expanded.items()})
        return Kernel(layers, variances, independent, budget)

    def between(self, left: Features, right: Features) -> Tensor:
        """`k` between all outputs of both: `[n, D, m, E]`, or `[D, n, m]` where outputs are independent; float64."""
        n, m, count, others = len(left.outputs), len(right.outputs), left.count, right.count
        shape = (count, n, m) if self.independent else (n, count, m, others)
        total = torch.zeros(shape, dtype=torch.float64, device=left.outputs.device)
        for layer in self.layers:
            if layer.name in left.gradients and layer.name in right.gradients:
                ours, theirs = _double(left.gradients[layer.name]), _double(right.gradients[layer.name])
                total = total + self._layer(layer, ours, theirs)
        return total

    def variance(self, features: Features, diagonal: bool) -> Tensor:
        """`k` between the outputs of each example: `[n, D, D]`, or `[n, D]` of each with itself; float64."""
        n, count = len(features.outputs), features.count
        shape = (n, count) if diagonal else (n, count, count)
        total = torch.zeros(shape, dtype=torch.float64, device=features.outputs.device)
        for layer in self.layers:
            if layer.name not in features.gradients:
                continue
            basis = _basis(layer)
            scale, gradients = self.variances[layer.name].reshape(basis.shape), _double(features.gradients[layer.name])
            if diagonal:
                total = total + basis.variance(gradients, scale, self.budget).T
            else:
                total = total + basis.covariance(gradients, scale, self.budget)
        return torch.diag_embed(total.diagonal(dim1=1, dim2=2)) if self.independent and not diagonal else total

    def _layer(self, layer: Layer, left: Gradients, right: Gradients) -> Tensor:
        variances = self.variances[layer.name]
        if layer.shape is not None and isinstance(left, Pair) and isinstance(right, Pair):
            scale = variances.reshape(layer.shape)
            if left.positions == right.positions == 1 and bool((scale == scale[:, :1]).all()):
                return self._of_grams(left, right, scale[:, 0])
            return self._of_pairs(left, right, scale)
        rows, others = (side.rows(0, side.examples).reshape(side.columns, side.examples, -1) for side in (left, right))
        return self._contract(rows * variances, others)

    def _of_grams(self, left: Pair, right: Pair, scale: Tensor) -> Tensor:
        """One position per example, and a prior that is alike for all outputs of the layer, `scale: [Q, I]`."""
        inner = torch.einsum("nqi,qi,mqi->qnm", _inputs(left).squeeze(2), scale, _inputs(right).squeeze(2))
        g, h = left.g.squeeze(3), right.g.squeeze(3)
        total: Tensor | None = None
        for q, gram in enumerate(inner):
            if self.independent:
                found = g[:, :, q] @ h[:, :, q].mT * gram
            else:
                found = torch.einsum("kno,lmo->nkml", g[:, :, q], h[:, :, q]) * gram[:, None, :, None]
            total = found if total is None else total + found
        assert total is not None
        return total

    def _of_pairs(self, left: Pair, right: Pair, scale: Tensor) -> Tensor:
        """The gradients of a few outputs of the layer at a time."""
        a, b = _inputs(left), _inputs(right)
        each = (left.columns * left.examples + right.columns * right.examples) * a.shape[1] * a.shape[3] * 8
        step = max(1, self.budget // (2 * each))
        total: Tensor | None = None
        for start in range(0, left.g.shape[4], step):
            part = slice(start, start + step)
            rows = torch.einsum("knqro,nqri->knqoi", left.g[..., part], a) * scale[:, part]
            others = torch.einsum("knqro,nqri->knqoi", right.g[..., part], b)
            found = self._contract(rows.flatten(2), others.flatten(2))
            total = found if total is None else total + found
        assert total is not None
        return total

    def _contract(self, left: Tensor, right: Tensor) -> Tensor:
        """`[K, n, p]` with `[L, m, p]`."""
        if self.independent:
            return left @ right.mT
        columns, examples = left.shape[:2]
        flat = left.flatten(0, 1) @ right.flatten(0, 1).T
        return flat.reshape(columns, examples, *right.shape[:2]).permute(1, 0, 3, 2)


def _basis(layer: Layer) -> Basis:
    return DenseBasis((layer.size,)) if layer.shape is None else KroneckerBasis(layer.shape)


def _inputs(pair: Pair) -> Tensor:
    """`a: [n, Q, R, I]` in float64, the bias included."""
    a = pair.inputs.part(0, pair.examples).to(pair.g.dtype)
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1) if pair.inputs.bias else a


def _double(gradients: Gradients) -> Gradients:
    if isinstance(gradients, Rows):
        return replace(gradients, values=gradients.values.double())
    if isinstance(gradients, Uses):
        parts = [_double(part) for part in gradients.parts]
        return replace(gradients, parts=tuple(part for part in parts if isinstance(part, Pair | TokenPair)))
    return replace(gradients, g=gradients.g.double())


def _numbers(gradients: Gradients) -> int:
    if isinstance(gradients, Uses):
        return sum(_numbers(part) for part in gradients.parts)
    return (gradients.values if isinstance(gradients, Rows) else gradients.g).numel()
