"""One class out of C, at every position of the output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.columns import Columns, given, random_signs
from lapwing.errors import InputError
from lapwing.likelihoods.base import GaussianOutputs, Statistics, check_finite
from lapwing.predictive.links import categorical_link
from lapwing.predictive.prediction import ClassPrediction


@dataclass(frozen=True)
class Categorical:
    """`p(y|f) = softmax(f)_y` with class indices as targets.

    `dim` is the dimension of the outputs that holds the classes; the others (after the examples) are
    positions, and targets have the outputs' shape without `dim`. Positions whose target is
    `ignore_index` are not observed: they add nothing to likelihood, gradient or curvature.
    """

    dim: int = -1
    ignore_index: int = -100
    name = "categorical"
    noise = None

    def _axis(self, outputs: Tensor) -> int:
        axis = self.dim if self.dim >= 0 else outputs.dim() + self.dim
        if not 1 <= axis < outputs.dim():
            raise InputError(
                f"Categorical(dim={self.dim}) does not name a class dimension of outputs of shape "
                f"{list(outputs.shape)}; dimension 0 holds the examples. For a single logit use 'binary'."
            )
        return axis

    def _positions(self, outputs: Tensor) -> Tensor:
        """`[N, *output]` as `[N, E, C]`: classes last, positions flat."""
        return outputs.movedim(self._axis(outputs), -1).reshape(outputs.shape[0], -1, outputs.shape[self.dim])

    def _outputs(self, positions: Tensor, like: Tensor) -> Tensor:
        """The inverse of `_positions`, with any leading dimensions: `[*, N, E, C]` to `[*, N, *output]`."""
        axis = self._axis(like)
        shape = [size for i, size in enumerate(like.shape) if i != axis]
        lead = positions.shape[:-3]
        return positions.reshape(*lead, *shape, like.shape[axis]).movedim(-1, axis + len(lead))

    def _observed(self, targets: Tensor) -> Tensor:
        """1 where a position is observed: `[N, E]`."""
        return (targets != self.ignore_index).flatten(1) if targets.dim() > 1 else (
            targets != self.ignore_index
        ).unsqueeze(1)  # fmt: skip

    def noise_scale(self, noise: float | Tensor) -> Tensor:
        raise InputError(f"The {self.name} likelihood has no noise to set.")

    def check(self, outputs: Tensor, targets: Tensor, where: str) -> None:
        check_finite(outputs, "the model's outputs hold", where)
        axis = self._axis(outputs)
        if outputs.shape[axis] == 1:
            raise InputError(
                f"{where}: one class only, in outputs of shape {list(outputs.shape)}. For yes or no in a single logit "
                "use the likelihood 'binary'."
            )
        expected = [size for i, size in enumerate(outputs.shape) if i != axis]
        if targets.is_floating_point() or targets.dtype == torch.bool:
            extra = " Soft targets (class probabilities) are not supported." if targets.is_floating_point() else ""
            raise InputError(
                f"{where}: class targets of dtype {targets.dtype}; give class indices, e.g. y.long().{extra}"
            )
        if list(targets.shape) != expected:
            fix = ""
            if list(targets.shape) == [*expected, 1]:
                fix = " Use y.squeeze(-1)."
            elif targets.shape == outputs.shape:
                fix = " One-hot targets are not supported; use y.argmax(dim)."
            raise InputError(
                f"{where}: class targets of shape {list(targets.shape)} against outputs of shape "
                f"{list(outputs.shape)} with classes along dim={self.dim}; expected {expected}.{fix}"
            )
        classes = outputs.shape[axis]
        wrong = (targets != self.ignore_index) & ((targets < 0) | (targets >= classes))
        if bool(wrong.any()):
            raise InputError(
                f"{where}: class index {int(targets[wrong][0])} is out of range for {classes} outputs. Targets "
                f"run from 0 to {classes - 1}; ignore_index is {self.ignore_index}."
            )

    def statistics(self, outputs: Tensor, targets: Tensor) -> Statistics:
        total = float(self.log_prob(outputs.double(), targets).sum())
        return Statistics(outputs.shape[0], total, int(self._observed(targets).sum()))

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        log_probs = self._positions(outputs).log_softmax(-1)
        observed = self._observed(targets)
        index = targets.long().reshape(observed.shape).masked_fill(~observed, 0)
        chosen = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return (chosen * observed).sum(1)

    def hessian_diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = self._positions(outputs)
        log_p = logits.log_softmax(-1)
        variances = log_p.exp() * -torch.expm1(log_p) * self._observed(targets).unsqueeze(-1)
        return self._outputs(variances, outputs)

    def hessian_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`diag(Σ p) − Σ ppᵀ` at every position; the off-diagonal entries make its rows sum to 0."""
        probs = self._positions(outputs).softmax(-1) * self._observed(targets).unsqueeze(-1)
        blocks = [-(p.T @ p) for p in probs.unbind(1)]
        for block in blocks:
            block.fill_diagonal_(0)
            block.diagonal().copy_(-block.sum(1))
        if len(blocks) == 1:
            return blocks[0]
        index = torch.arange(outputs[0].numel(), device=outputs.device).reshape(1, *outputs.shape[1:])
        order = self._positions(index.expand(1, *outputs.shape[1:])).flatten()  # output of every (position, class)
        total = torch.zeros_like(torch.block_diag(*blocks))
        total[order.unsqueeze(1), order] = torch.block_diag(*blocks)
        return total

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        """C − 1 columns per position: the rows of a Cholesky factor of `diag(p) − ppᵀ`, which is

        `S_j = √(p_j q_{j+1}/q_j) (e_j − Σ_{i>j} e_i p_i/q_{j+1})` with `q_j = Σ_{i≥j} p_i`, in logarithms.
        """
        logits = self._positions(outputs)
        examples, positions, classes = logits.shape
        if positions == 1:
            return self._target_first(logits, outputs, targets)
        column = self._root(logits, targets)

        def part(start: int, stop: int) -> Tensor:
            columns = logits.new_zeros(stop - start, examples, positions, classes)
            for k in range(start, stop):
                position, j = divmod(k, classes - 1)
                columns[k - start, :, position] = column(j)[:, position]
            return self._outputs(columns, outputs)

        return Columns(positions * (classes - 1), part)

    def _target_first(self, logits: Tensor, outputs: Tensor, targets: Tensor) -> Columns:
        """The same root with the classes in an order in which the target comes first.

        Its first column is then `√(p_y/(1 − p_y)) (e_y − p)`, the gradient `∇_f log p` but for its length.
        """
        observed = self._observed(targets)
        target = targets.long().reshape(observed.shape).masked_fill(~observed, 0).unsqueeze(-1)  # [N, 1, 1]
        order = torch.arange(logits.shape[2], device=logits.device).expand(logits.shape)
        order = order.scatter(2, target, 0).scatter(2, torch.zeros_like(target), target)  # swap it with the first
        swapped = logits.gather(2, order)
        column = self._root(swapped, targets)
        log_p = swapped.log_softmax(-1)[:, 0]
        ratio = 0.5 * (log_p[:, 1:].logsumexp(1) - log_p[:, 0])
        safe = bool((ratio < math.log(torch.finfo(ratio.dtype).max) / 4).all())  # else the column is all but 0

        def part(start: int, stop: int) -> Tensor:
            columns = torch.stack([column(j) for j in range(start, stop)])
            return self._outputs(columns.gather(3, order.expand(stop - start, *order.shape)), outputs)

        return Columns(logits.shape[2] - 1, part, ratio.exp() * observed[:, 0] if safe else None)

    def _root(self, logits: Tensor, targets: Tensor) -> Callable[[int], Tensor]:
        """Column j of every position's own root, of logits `[N, E, C]`: `j -> [N, E, C]`."""
        log_p = logits.log_softmax(-1)
        log_q = log_p.flip(-1).logcumsumexp(-1).flip(-1)
        observed = self._observed(targets).to(logits.dtype).unsqueeze(-1)

        def column(j: int) -> Tensor:
            values = torch.zeros_like(logits)
            values[..., j] = 1
            values[..., j + 1 :] = -(log_p[..., j + 1 :] - log_q[..., j + 1 : j + 2]).exp()
            size = (0.5 * (log_p[..., j] + log_q[..., j + 1] - log_q[..., j])).exp()
            return values * size.unsqueeze(-1) * observed

        return column

    def signed_columns(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Columns:
        """One position: one column, `(diag(√p) − p√pᵀ) ε`. Several: C − 1, the j-th `Σ_e ± S_ej` over positions e."""
        logits = self._positions(outputs)
        if logits.shape[1] == 1:
            signs = random_signs(logits.shape, logits, generator)
            column = _signed_root(logits.log_softmax(-1), signs) * self._observed(targets).unsqueeze(-1)
            return given(self._outputs(column.unsqueeze(0), outputs))
        signs = random_signs((*logits.shape[:2], logits.shape[2] - 1), logits, generator)
        root = self._root(logits, targets)

        def part(start: int, stop: int) -> Tensor:
            columns = [root(j) * signs[..., j].unsqueeze(-1) for j in range(start, stop)]
            return self._outputs(torch.stack(columns), outputs)

        return Columns(signs.shape[2], part)

    def sampled_gradients(
        self, outputs: Tensor, targets: Tensor, samples: int, generator: torch.Generator | None
    ) -> Tensor:
        probs = self._positions(outputs).softmax(-1)
        drawn = torch.multinomial(probs.flatten(0, 1), samples, replacement=True, generator=generator)  # [N·E, S]
        one_hot = torch.nn.functional.one_hot(drawn.T, probs.shape[-1]).to(probs.dtype)
        gradients = one_hot.unflatten(1, probs.shape[:2]) - probs
        return self._outputs(gradients * self._observed(targets).to(probs.dtype).unsqueeze(-1), outputs)

    def predict_gaussian(
        self, f: GaussianOutputs, noise: Tensor, link: str | None, samples: int, generator: torch.Generator | None
    ) -> ClassPrediction:
        prediction = categorical_link(f, self._axis(f.mean), link or "probit", samples, generator)
        return replace(prediction, ignore_index=self.ignore_index)

    def predict_samples(self, outputs: Tensor, noise: Tensor) -> ClassPrediction:
        axis = self._axis(outputs[0])
        prediction = ClassPrediction.mixture(outputs, axis, self.ignore_index, joint=True)
        return replace(prediction, latent_variance=outputs.var(0, correction=0))

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "dim": self.dim, "ignore_index": self.ignore_index}


def _signed_root(log_p: Tensor, signs: Tensor) -> Tensor:
    """`√p ∘ ε − p (√p · ε)` along the last dimension, whose outer product has the mean `diag(p) − ppᵀ`.

    At the most likely class, where p may be 1 up to rounding, it is `√p ε (1 − p) − p Σ_others √p ε` with 1 − p as
    a sum over the others, so that nothing cancels.
    """
    p, terms = log_p.exp(), (0.5 * log_p).exp() * signs
    top = log_p.argmax(-1, keepdim=True)
    top_p, top_term = p.gather(-1, top), terms.gather(-1, top)
    others = terms.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    complement = p.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    return (terms - p * (top_term + others)).scatter(-1, top, top_term * complement - top_p * others)
