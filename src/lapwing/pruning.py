"""Pruning by the posterior: Occam's razor for weights (Dhahri et al. 2024).

Around its mode the log posterior is `−½ (θ − θ*)ᵀ P (θ − θ*)`, so that setting weight i to 0 costs about `½ P_ii θ_i²`
nats of `log p(D, θ)`. What the evidence loses is less, because a model without the weight need not pay for it:
`½ P_ii θ_i² − ½ log(P_ii/Π_ii)` (the Savage-Dickey ratio; negative where the weight was not worth its price).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.batches import check_targets, read, read_output
from lapwing.errors import InputError, PruningWarning, choose
from lapwing.guard import borrowed
from lapwing.laplace import Laplace
from lapwing.likelihoods import Statistics
from lapwing.progress import bar
from lapwing.units import Units, units_of

PRECISIONS = ("diagonal", "marginal")
RANKINGS = ("global", "layer")


@dataclass(frozen=True, eq=False)
class Pruning:
    """Which elements of a model's parameters stay. The model itself is as it was; `model()` gives a pruned copy.

    `masks` has True where an element stays, by parameter name `[*shape]`, for the parameters that could be pruned.
    `threshold` is the largest score of a unit that goes. `joint_loss` is `½ Σ P_ii θ_i²` over the elements that go, the
    expected loss of `log p(D, θ)`; `evidence_loss` that of the evidence, negative where the smaller model is
    expected to be the better one. Both take P for diagonal: of many weights pruned together they are estimates.
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
        parameters = dict(model.named_parameters())
        for name, mask in self.masks.items():
            if name not in parameters or parameters[name].shape != mask.shape:
                raise InputError(
                    f"The model has no parameter {name!r} of shape {list(mask.shape)}: prune its own kind."
                )
        with torch.no_grad():
            for name, mask in self.masks.items():
                parameters[name].masked_fill_(~mask.to(parameters[name].device), 0)
        return model

    def model(self) -> nn.Module:
        """A pruned copy of the model; the original is left as it is."""
        return self.apply_(copy.deepcopy(self.la.model))

    def measured_loss(self, loader: Iterable[Any]) -> float:
        """What `log p(D, θ)` really loses where `joint_loss` is expected: one pass over the data of the fit."""
        self.la._unchanged()
        posterior, pruned = self.la.posterior, self.model()
        statistics = Statistics()
        with borrowed(pruned, ()), torch.no_grad():
            for where, inputs, targets in read(loader, self.la.device, self.la.unpack, "measure", self.la.progress):
                outputs = read_output(pruned(*inputs.args, **inputs.kwargs), self.la.output)
                check_targets(where, outputs, targets)
                self.la.likelihood.check(outputs, targets, where)
                statistics += self.la.likelihood.statistics(outputs, targets)
        before = posterior.spectrum.curvature.statistics
        if abs(statistics.examples - before.examples) > 1e-6 * before.examples:
            raise InputError(
                f"measured_loss needs the data of the fit: that saw {before.examples:g} examples, the loader shows "
                f"{statistics.examples:g}."
            )
        fits = [stats.log_likelihood_at(posterior.noise.detach()) for stats in (before, statistics)]
        with torch.no_grad():
            penalties = [_penalty(self.la, dict(model.named_parameters())) for model in (self.la.model, pruned)]
        return self.la.temperature * float(fits[0] - fits[1]) + float(penalties[1] - penalties[0])

    def fine_tune(self, loader: Iterable[Any], epochs: int = 10, lr: float = 1e-3) -> nn.Module:
        """Train a pruned copy on, with what was removed held at 0; returns the copy.

        Adam on `−T log p(D|θ) + ½ ‖θ − μ₀‖²_Π` per example, under the prior and noise of the posterior: after
        `tune_prior` those that the evidence chose. Parameters that are not Bayesian are trained without a prior.
        """
        if epochs < 1:
            raise InputError(f"fine_tune needs at least 1 epoch, got {epochs}.")
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
                (_penalty(self.la, parameters) / examples - scale * fit).backward()
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
            f"{self.evidence_loss:.4g} of the evidence",
        ])  # fmt: skip


def scores(la: Laplace, precision: str = "diagonal") -> dict[str, Tensor]:
    """`p_i θ_i²` of every Bayesian parameter's elements, by name, float64: twice what setting one to 0 costs.

    p_i is the "diagonal" of the posterior precision, `P_ii`, as if the other weights stayed where they are, or
    the inverse "marginal" variance `1/(P⁻¹)_ii`, as if they moved to make up for it (optimal brain surgeon).
    """
    precisions = _precisions(la, precision)
    return {name: value * la.posterior.mean[name].double().square() for name, value in precisions.items()}


def prune(
    la: Laplace,
    sparsity: float | None = None,
    evidence_loss: float | None = None,
    units: str = "weight",
    precision: str = "diagonal",
    ranking: str = "global",
    only: str | Sequence[str] | None = None,
) -> Pruning:
    """Remove the units with the smallest scores `Σ_i p_i θ_i²`; returns masks, and leaves the model as it is.

    Args:
        la: a fitted posterior; tune its prior first.
        sparsity: the fraction of elements to remove, at most, of those that can be pruned.
        evidence_loss: instead of it, the nats of evidence that may be lost, by the estimate
            `Σ ½ p_i θ_i² − ½ log(p_i/Π_ii)` over the elements removed; with 0, as much as goes for free.
        units: "weight", "output" (neurons and filters: the row of a weight and its bias; those of the last layer
            stay), or "input" (what a layer reads: features and channels).
        precision: "diagonal" or "marginal", see `scores`.
        ranking: "global", or "layer" to take the same fraction of each.
        only: names or globs of the parameters to prune. The default leaves out biases, norms and single parameters.
    """
    choose(precision, PRECISIONS, "precision")
    choose(ranking, RANKINGS, "ranking")
    if (sparsity is None) == (evidence_loss is None):
        raise InputError("prune needs either sparsity=... or evidence_loss=..., one of the two.")
    if sparsity is not None and not 0 <= sparsity < 1:
        raise InputError(f"sparsity must be at least 0 and below 1, got {sparsity}.")
    if ranking == "layer" and sparsity is None:
        raise InputError("ranking='layer' belongs to sparsity=...; a loss of evidence is that of all layers together.")
    layers = [layer for block in la.curvature.blocks for layer in block.layers]
    groups = units_of(layers, units, only, la.device)
    score, loss = groups.total(scores(la, precision)), groups.total(_losses(la, precision))
    if sparsity is None:
        assert evidence_loss is not None
        gone = _within_loss(score, loss, evidence_loss)
    else:
        gone = _within_size(score, groups, sparsity, ranking)
    masks = groups.masks(~gone)
    _warn_of_empty_layers(masks, ranking)
    threshold = float(score[gone].max()) if bool(gone.any()) else 0.0
    return Pruning(la, masks, units, threshold, float(0.5 * score[gone].sum()), float(loss[gone].sum()))


def _precisions(la: Laplace, precision: str) -> dict[str, Tensor]:
    posterior = la.posterior
    posterior._gaussian()
    if precision == "diagonal":
        found = posterior.precision_diagonal()
    else:
        found = {name: value.double().reciprocal() for name, value in posterior.variances().items()}
    return {name: value.detach() for name, value in found.items()}


def _losses(la: Laplace, precision: str) -> dict[str, Tensor]:
    """What the evidence loses when an element is removed: `−log p(θ_i = 0|D) + log p(θ_i = 0)`."""
    posterior, score = la.posterior, scores(la, precision)
    found = {}
    for name, value in _precisions(la, precision).items():
        prior = (posterior.prior_scale * posterior.precisions[name]).detach()
        found[name] = 0.5 * (score[name] - (value / prior).log() - prior * posterior.means[name].square())
    return found


def _within_size(score: Tensor, groups: Units, sparsity: float, ranking: str) -> Tensor:
    """The smallest scores whose elements are at most this fraction, of all or of each layer: `[U]`."""
    sizes, gone = groups.sizes(), torch.zeros_like(score, dtype=torch.bool)
    parts = [torch.ones_like(gone)] if ranking == "global" else [groups.layers == i for i in groups.layers.unique()]
    for part in parts:
        members = part.nonzero()[:, 0]
        order = members[score[members].argsort(stable=True)]
        removed = sizes[order].cumsum(0)
        gone[order[removed <= round(sparsity * float(removed[-1]))]] = True
    return gone


def _within_loss(score: Tensor, loss: Tensor, budget: float) -> Tensor:
    """As many of the smallest scores as keep the loss of evidence within the budget: `[U]`."""
    order = score.argsort(stable=True)
    fits = (loss[order].cumsum(0) <= budget).nonzero()[:, 0]
    gone = torch.zeros_like(score, dtype=torch.bool)
    if fits.numel():
        gone[order[: int(fits[-1]) + 1]] = True
    return gone


def _warn_of_empty_layers(masks: dict[str, Tensor], ranking: str) -> None:
    empty = [name for name, mask in masks.items() if not bool(mask.any())]
    if empty:
        fix = " or take ranking='layer'" if ranking == "global" else ""
        warnings.warn(
            f"Nothing is left of {', '.join(map(repr, empty))}. Prune less{fix}, or leave it out with only=...",
            PruningWarning,
            stacklevel=3,
        )


def _penalty(la: Laplace, parameters: dict[str, nn.Parameter]) -> Tensor:
    """`½ ‖θ − μ₀‖²_Π` of the Bayesian parameters, 0-d; differentiable in them."""
    posterior = la.posterior
    terms = [
        (precision.detach() * (parameters[name] - posterior.means[name]).square()).sum()
        for name, precision in posterior.precisions.items()
    ]
    return 0.5 * posterior.prior_scale.detach() * torch.stack(terms).sum()
