"""Pruning by the posterior: Occam's razor for weights (Dhahri et al. 2024).

Around its mode the log posterior is `−½ (θ − θ*)ᵀ P (θ − θ*)`, so that setting weight i to 0 costs about `½ P_ii θ_i²`
nats of `log p(D, θ)`, and setting those in S to 0 `½ θ_Sᵀ P_SS θ_S`. The evidence loses less, because a model without
them need not pay for them: with Σ = P⁻¹, it is spared `½ log det(Σ_SS⁻¹ Π_SS⁻¹)`, which is at least
`½ Σ_i log(1/(Σ_ii Π_ii))` (Hadamard's inequality) and never negative.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.batches import check_targets, read, read_output
from lapwing.errors import InputError, PruningWarning, choose
from lapwing.guard import borrowed
from lapwing.laplace import Laplace
from lapwing.likelihoods import Statistics
from lapwing.posterior import Posterior
from lapwing.progress import bar
from lapwing.units import Units, units_of
from lapwing.weights import output_weights

PRECISIONS = ("diagonal", "marginal")
RANKINGS = ("global", "layer")


@dataclass(frozen=True, eq=False)
class Pruning:
    """Which elements of a model's parameters stay. The model itself is as it was; `model()` gives a pruned copy.

    `masks` has True where an element stays, by parameter name `[*shape]`, for the parameters that could be pruned.
    `threshold` is the largest score of a unit that goes. `joint_loss` is `½ θ_Sᵀ P_SS θ_S` over the elements that go,
    the expected loss of `log p(D, θ)`; `evidence_loss` is what the evidence is expected to lose at most, negative
    where the smaller model is the better one. Both are those of the Gaussian posterior; `measured_loss` looks.
    """

    la: Laplace = field(repr=False)
    masks: dict[str, Tensor] = field(repr=False)
    units: str
    threshold: float
    joint_loss: float
    evidence_loss: float

    @property
    def sparsity(self) -> float:
        """The fraction of elements that go, of those that could be pruned."""
        return 1 - self._count(kept=True) / self._count()

    def _count(self, kept: bool = False) -> int:
        return sum(int(mask.sum()) if kept else mask.numel() for mask in self.masks.values())

    def apply_(self, model: nn.Module) -> nn.Module:
        """Set what goes to 0 in `model` itself, which has the same parameters; returns it."""
        return _apply(self.masks, model)

    def model(self) -> nn.Module:
        """A pruned copy of the model; the original is left as it is."""
        return self.apply_(copy.deepcopy(self.la.model))

    def measured_loss(self, loader: Iterable[Any]) -> float:
        """What `log p(D, θ)` really loses where `joint_loss` is expected: one pass over the data of the fit."""
        return _measured_loss(self.la, self.masks, loader)

    def fine_tune(self, loader: Iterable[Any], epochs: int = 10, lr: float = 1e-3) -> nn.Module:
        """Train a pruned copy on, with what was removed held at 0; returns the copy.

        Adam on `−T log p(D|θ) + ½ ‖θ − μ₀‖²_Π` per example, under the prior and noise of the posterior: after
        `tune_prior` those that the evidence chose. Parameters that are not Bayesian are trained without a prior.
        """
        if epochs < 1:
            raise InputError(f"fine_tune needs at least 1 epoch, got {epochs}.")
        _check_reread(loader)
        tuned = self.model()
        parameters = dict(tuned.named_parameters())
        optimizer = torch.optim.Adam([value for value in parameters.values() if value.requires_grad], lr=lr)
        posterior = self.la.posterior
        scale, examples = float(posterior.likelihood_scale), posterior.spectrum.curvature.examples
        tuned.train()
        for _ in bar(range(epochs), "fine-tune", self.la.progress):
            for where, inputs, targets in read(loader, self.la.device, self.la.unpack, "epoch", False):
                outputs = read_output(tuned(*inputs.args, **inputs.kwargs), self.la.output)
                check_targets(where, outputs, targets)
                self.la.likelihood.check(outputs, targets, where)
                fit = self.la.likelihood.log_prob(outputs, targets).mean()
                optimizer.zero_grad()
                (_penalty(posterior, parameters) / examples - scale * fit).backward()
                for name, mask in self.masks.items():
                    gradient = parameters[name].grad
                    if gradient is not None:
                        gradient.masked_fill_(~mask.to(gradient.device), 0)
                optimizer.step()
                self.apply_(tuned)
        for module, original in zip(tuned.modules(), self.la.model.modules(), strict=True):
            module.training = original.training
        optimizer.zero_grad()
        return tuned

    def __str__(self) -> str:
        rows = [("parameter", "kept", "of")]
        rows += [(name, f"{int(mask.sum()):,}", f"{mask.numel():,}") for name, mask in self.masks.items()]
        rows.append(("together", f"{self._count(kept=True):,}", f"{self._count():,}"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{name.ljust(widths[0])}  {kept.rjust(widths[1])}  {of.rjust(widths[2])}" for name, kept, of in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([
            *lines,
            f"sparsity {self.sparsity:.1%}; expected to lose {self.joint_loss:.4g} nats of log p(D, θ), "
            f"of the evidence at most {self.evidence_loss:.4g}",
        ])  # fmt: skip


def scores(la: Laplace, precision: str = "diagonal") -> dict[str, Tensor]:
    """`p_i θ_i²` of every Bayesian parameter's elements, by name, float64: twice what setting one to 0 costs.

    p_i is the "diagonal" of the posterior precision, `P_ii`, as if the other weights stayed where they are, or
    the inverse "marginal" variance `1/(P⁻¹)_ii`, as if they moved to make up for it (optimal brain surgeon).
    """
    choose(precision, PRECISIONS, "precision")
    posterior = la.posterior
    found = posterior.precision_diagonal() if precision == "diagonal" else _marginal_precisions(la)
    return {name: value.detach() * posterior.mean[name].double().square() for name, value in found.items()}


def prune(
    la: Laplace,
    sparsity: float | None = None,
    evidence_loss: float | None = None,
    units: str = "weight",
    precision: str = "diagonal",
    ranking: str = "global",
    only: str | Sequence[str] | None = None,
    loader: Iterable[Any] | None = None,
) -> Pruning:
    """Remove the units with the smallest scores `Σ_i p_i θ_i²`; returns masks, and leaves the model as it is.

    Args:
        la: a fitted posterior; tune its prior first.
        sparsity: the fraction of elements to remove, at most, of those that can be pruned.
        evidence_loss: instead of it, the nats of evidence that may be lost, at least 0.
        units: "weight", "output" (neurons and filters: the row of a weight and its bias; those of the layers that make
            the model's outputs stay), or "input" (what a layer reads: features and channels).
        precision: "diagonal" or "marginal", see `scores`.
        ranking: "global", or "layer" to take the same fraction of each.
        only: names or globs of the parameters to prune. The default leaves out biases, norms and single parameters.
        loader: the data of the fit. With it, `evidence_loss` counts what `log p(D, θ)` loses in fact, by a dozen or two
            passes over the data, where otherwise the Gaussian posterior says what it should.
    """
    choose(ranking, RANKINGS, "ranking")
    if (sparsity is None) == (evidence_loss is None):
        raise InputError("prune needs either sparsity=... or evidence_loss=..., one of the two.")
    if sparsity is not None and not 0 <= sparsity < 1:
        raise InputError(f"sparsity must be at least 0 and below 1, got {sparsity}.")
    if evidence_loss is not None and not evidence_loss >= 0:
        raise InputError(f"evidence_loss must be at least 0, got {evidence_loss}.")
    if sparsity is not None and loader is not None:
        raise InputError(
            "loader belongs to evidence_loss=...; with sparsity=... call measured_loss(loader) afterwards."
        )
    if loader is not None:
        _check_reread(loader)
    if sparsity is None and ranking == "layer":
        raise InputError("ranking='layer' belongs to sparsity=...; a loss of evidence is that of all layers together.")
    groups = prunable(la, units, only, loader)
    score, spared = groups.total(scores(la, precision)), groups.total(_spared(la))
    order = score.argsort(stable=True)

    def loss(count: int) -> float:
        """Of the evidence, without the `count` smallest scores."""
        masks = groups.masks(_all_but(order[:count], groups.count))
        joint = _joint_loss(la, masks) if loader is None else _measured_loss(la, masks, loader)
        return joint - float(spared[order[:count]].sum())

    if sparsity is not None:
        gone = smallest(score, groups, sparsity, ranking)
    else:
        assert evidence_loss is not None
        gone = order[: _largest(loss, evidence_loss, groups.count)]
    masks = groups.masks(_all_but(gone, groups.count))
    _warn_of_empty_layers(masks, ranking)
    threshold, joint = float(score[gone].max()) if gone.numel() else 0.0, _joint_loss(la, masks)
    return Pruning(la, masks, units, threshold, joint, joint - float(spared[gone].sum()))


def prunable(
    la: Laplace, units: str = "weight", only: str | Sequence[str] | None = None, loader: Iterable[Any] | None = None
) -> Units:
    """What may be pruned: see `prune`. Output units take a look at a few inputs, those of the fit or of the loader."""
    state, outputs = la._unchanged(), frozenset[str]()
    if units == "output" and only is None:
        inputs = state.tape.seen if loader is None else la._few(loader)
        if inputs is None:
            raise InputError(
                "units='output' looks at a few inputs to see which layers make the model's outputs, and a file keeps "
                "none: name the layers to prune, only=[...]."
            )
        outputs = output_weights(la.model, inputs, la.output)
    layers = [layer for block in la.curvature.blocks for layer in block.layers]
    return units_of(layers, units, only, la.device, outputs)


def _all_but(gone: Tensor, count: int) -> Tensor:
    """True for all of `count` units but those with these numbers: `[U]`."""
    return torch.ones(count, dtype=torch.bool, device=gone.device).index_fill(0, gone, False)


def _largest(loss: Callable[[int], float], budget: float, count: int) -> int:
    """The number up to `count` at which the loss crosses the budget, by bisection; it starts at 0."""
    low, high = 0, count + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if loss(middle) <= budget else (low, middle)
    return low


def _marginal_precisions(la: Laplace) -> dict[str, Tensor]:
    """`1/(P⁻¹)_ii` by parameter name, float64."""
    return {name: value.detach().reciprocal() for name, value in la.posterior.covariance_diagonal().items()}


def _joint_loss(la: Laplace, masks: dict[str, Tensor]) -> float:
    """`½ δᵀ P δ` of the step δ that sets what goes to 0."""
    posterior = la.posterior
    step = {
        name: torch.zeros_like(value, dtype=torch.float64)
        if name not in masks
        else value.double().masked_fill(masks[name], 0)
        for name, value in posterior.mean.items()
    }
    prior = torch.stack([(posterior.precisions[name] * value.square()).sum() for name, value in step.items()]).sum()
    total = posterior.likelihood_scale * posterior.step_curvature(step) + posterior.prior_scale * prior
    return float(0.5 * total.detach())


def _spared(la: Laplace) -> dict[str, Tensor]:
    """What a model without an element need not pay, at least: `½ log(1/(Σ_ii Π_ii))`, and for the prior's mean."""
    posterior, found = la.posterior, {}
    for name, value in _marginal_precisions(la).items():
        prior = (posterior.prior_scale * posterior.precisions[name]).detach()
        found[name] = 0.5 * ((value / prior).log() + prior * posterior.means[name].square())
    return found


def _measured_loss(la: Laplace, masks: dict[str, Tensor], loader: Iterable[Any]) -> float:
    """`log p(D, θ)` of the network less that of the pruned one."""
    la._unchanged()
    pruned = _apply(masks, copy.deepcopy(la.model))
    after = Statistics()
    with borrowed(pruned, ()), torch.no_grad():
        for where, inputs, targets in read(loader, la.device, la.unpack, "measure", la.progress):
            outputs = read_output(pruned(*inputs.args, **inputs.kwargs), la.output)
            check_targets(where, outputs, targets)
            la.likelihood.check(outputs, targets, where)
            after += la.likelihood.statistics(outputs, targets)
    before = la.curvature.statistics
    if abs(after.examples - before.examples) > 1e-6 * before.examples:
        raise InputError(
            f"To measure the loss takes the data of the fit: that saw {before.examples:g} examples, the loader shows "
            f"{after.examples:g}."
        )
    noise = la.posterior.noise.detach()
    with torch.no_grad():
        penalties = [_penalty(la.posterior, dict(model.named_parameters())) for model in (la.model, pruned)]
    fit = float(before.log_likelihood_at(noise) - after.log_likelihood_at(noise))
    return la.temperature * fit + float(penalties[1] - penalties[0])


def _check_reread(loader: Iterable[Any]) -> None:
    if isinstance(loader, Iterator):
        raise InputError(
            "The loader is read more than once here, and this one is used up by the first pass: give a list "
            "of batches or a DataLoader."
        )


def _apply(masks: dict[str, Tensor], model: nn.Module) -> nn.Module:
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            raise InputError(f"The model has no parameter {name!r} of shape {list(mask.shape)}: prune its own kind.")
    with torch.no_grad():
        for name, mask in masks.items():
            parameters[name].masked_fill_(~mask.to(parameters[name].device), 0)
    return model


def smallest(score: Tensor, groups: Units, sparsity: float, ranking: str) -> Tensor:
    """The units with the smallest scores `[U]` whose elements are at most this fraction, of all or of each layer."""
    sizes, gone = groups.sizes(), []
    whole = torch.ones_like(groups.layers, dtype=torch.bool)
    for part in [whole] if ranking == "global" else [groups.layers == layer for layer in groups.layers.unique()]:
        members = part.nonzero()[:, 0]
        order = members[score[members].argsort(stable=True)]
        removed = sizes[order].cumsum(0)
        gone.append(order[removed <= round(sparsity * float(removed[-1]))])
    return torch.cat(gone)


def _warn_of_empty_layers(masks: dict[str, Tensor], ranking: str) -> None:
    empty = [name for name, mask in masks.items() if not bool(mask.any())]
    if empty:
        fix = " or take ranking='layer'" if ranking == "global" else ""
        warnings.warn(
            f"Nothing is left of {', '.join(map(repr, empty))}. Prune less{fix}, or leave it out with only=...",
            PruningWarning,
            stacklevel=3,
        )


def _penalty(posterior: Posterior, parameters: dict[str, nn.Parameter]) -> Tensor:
    """`½ ‖θ − μ₀‖²_Π` of the Bayesian parameters, 0-d; differentiable in them."""
    terms = [
        (precision.detach() * (parameters[name] - posterior.means[name]).square()).sum()
        for name, precision in posterior.precisions.items()
    ]
    return 0.5 * posterior.prior_scale.detach() * torch.stack(terms).sum()
