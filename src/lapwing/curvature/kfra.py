"""KFRA: the pre-activation Hessian averaged over the batch at every step back (Botev et al., 2017; Ritter et al.,
2018, Eq. 15).

Going back from the outputs, `M[u, v] ≈ mean_n J_nuᵀ Λ_n J_nv` is kept for all pairs of activations u, v that are
made but not yet passed, with `J_nu` the derivative of the outputs in u:

- `y = x W`: `M[x, x] = W M[y, y] Wᵀ`, `M[x, v] = W M[y, v]`;
- `y = φ(x)` with derivatives `d_n`: `M[x, x] = mean_n[d_n d_nᵀ] ∘ M[y, y]`, `M[x, v] = mean_n[d_n] ∘ M[y, v]`;
- `y = x1 + x2`: both get M, also for the pair;
- an activation that is used twice adds up what arrives, `M[x, x] + J M[y, x] + M[x, y] Jᵀ + J M[y, y] Jᵀ`.

A residual block is so `(I + J_F)ᵀ M (I + J_F)`. It is exact for a batch of one example and for linear networks; all
else is the mean over the batch taken factor by factor. M stays positive semi-definite. No vector is backpropagated;
a batch costs a few products of `[D, D]` matrices a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.curvature.blocks import Block
from lapwing.curvature.kronecker import KroneckerAccumulator
from lapwing.curvature.steps import Activation, Step, refusal, walk_back
from lapwing.errors import InputError
from lapwing.layers.linear import Linear
from lapwing.layers.product import Product
from lapwing.likelihoods import Likelihood
from lapwing.tape import Record

RESIDUAL = ("cross", "sum")


def add_kfra(
    record: Record, likelihood: Likelihood, targets: Tensor, blocks: tuple[Block, ...], residual: str
) -> tuple[Block, ...]:
    """Add `G = N M[h, h]` at the outputs h of every layer in Kronecker form; return the other blocks.

    A weight that is used several times adds the matrices of its uses, as `kron="expand"` does. With `residual`
    "sum" only `M[u, u]` is kept, so that branches that meet are added without their cross terms (Ritter et al.).
    """
    owners: dict[Activation, tuple[str, KroneckerAccumulator]] = {}
    for block in blocks:
        if isinstance(block.accumulator, KroneckerAccumulator):
            for node in _outputs_of(record, block):
                owners[node] = block.name, block.accumulator
    if owners:
        with torch.no_grad():
            curvature = _Joint(residual == "cross")
            curvature.start(record.outputs.grad_fn, _mean_hessian(record, likelihood, targets))
            for activation, step in walk_back(record, {node: name for node, (name, _) in owners.items()}):
                if activation in owners:
                    owners[activation][1].add_output_factor(record.examples * curvature.of(activation))
                curvature.pass_back(activation, step)
    return tuple(block for block in blocks if not isinstance(block.accumulator, KroneckerAccumulator))


def _outputs_of(record: Record, block: Block) -> list[Activation]:
    uses = [record.uses[i] for i in record.uses_of(block.layers[0])]
    for use in uses:
        if not isinstance(use.rule, Linear | Product) or use.call.rows is not None:
            raise refusal(f"the {use.rule.name} {block.name!r}")
        if len(use.output) != 2 or use.output[0] != record.examples:
            raise refusal(f"the layer {block.name!r} with outputs of shape {list(use.output)}")
    assert isinstance(block.accumulator, KroneckerAccumulator)
    if len(uses) > 1 and block.accumulator.reduce:
        raise InputError(
            f"curvature='kfra' with kron='reduce' needs the terms between the {len(uses)} uses of the weight of layer "
            f"{block.name!r}, which it does not keep. Use kron='expand', or curvature='ggn'."
        )
    return [use.edge.node for use in uses]


def _mean_hessian(record: Record, likelihood: Likelihood, targets: Tensor) -> Tensor:
    """The mean of `Λ_n` over the batch, the outputs of an example flat: `[C, C]`."""
    return likelihood.hessian_sum(record.outputs.detach(), targets).to(record.dtype) / record.examples


@dataclass
class _Joint:
    """`M[u, v]`, `[D_u, D_v]`, for the activations that were reached and not yet passed."""

    cross: bool
    rows: dict[Activation, dict[Activation, Tensor]] = field(default_factory=dict)

    def start(self, outputs: Activation, hessian: Tensor) -> None:
        self.rows = {outputs: {outputs: hessian}}

    def of(self, activation: Activation) -> Tensor:
        return self.rows[activation][activation]

    def pass_back(self, activation: Activation, step: Step) -> None:
        """Replace an activation by those that it was made of."""
        row = self.rows.pop(activation)
        own = row.pop(activation)
        for other in row:
            del self.rows[other][activation]
        for i, source in enumerate(step.inputs):
            for other, block in row.items():
                moved = step.pull(i, block)
                self._add(source, other, moved + moved.T if source is other else moved)
            for j in range(i, len(step.inputs) if self.cross else i + 1):
                self._add(source, step.inputs[j], step.pull_both(i, j, own))

    def _add(self, left: Activation, right: Activation, block: Tensor) -> None:
        row = self.rows.setdefault(left, {})
        row[right] = row[right] + block if right in row else block
        self.rows.setdefault(right, {})[left] = row[right].T
