"""Pruning by the posterior: Occam's razor for weights (Dhahri et al. 2024).

Around its mode the log posterior is `−½ (θ − θ*)ᵀ P (θ − θ*)`, so that setting weight i to 0 costs about `½ P_ii θ_i²`
nats of `log p(D, θ)`, and setting those in S to 0 `½ θ_Sᵀ P_SS θ_S`; elsewhere, `−g_Sᵀ θ_S` more with the slope g of
the negative log posterior. The evidence loses less, because a model without them need not pay for them. With Σ = P⁻¹
it is spared `½ log det(Σ_SS⁻¹ Π_SS⁻¹)`, which is at least `½ Σ_i log(1/(Σ_ii Π_ii))` (Hadamard's inequality) and never
negative. (Where the prior is tempered as well, its normalizers are, too.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.batches import check_targets, outputs_of, read
from lapwing.errors import InputError, PruningWarning, choose, warn
from lapwing.examples import few_examples
from lapwing.laplace import Laplace
from lapwing.progress import bar
from lapwing.removal import joint_loss, marginal_precisions, measurement, penalty, spared
from lapwing.units import Units, first_names, units_of
from lapwing.weights import output_weights

PRECISIONS = ("diagonal", "marginal")
RANKINGS = ("global", "layer")
_SCANNED, _MEASURED = 64, 16  # numbers of units that are tried for a loss of evidence: by the posterior, by the data


@dataclass(frozen=True, eq=False)
class Pruning:
    """Which elements of a model's parameters stay. The model itself is as it was; `model()` gives a pruned copy.

    `masks` has True where an element stays, by parameter name `[*shape]`, for the parameters that could be pruned.
    `threshold` is the largest score of a unit that goes. `joint_loss` is `½ θ_Sᵀ P_SS θ_S − g_Sᵀ θ_S` over the
    elements that go, the expected loss of `log p(D, θ)`; `evidence_loss` is what the evidence is expected to lose at
    most, negative where the smaller model is the better one. Both are those of the Gaussian posterior;
    `measured_loss` looks.
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
        """A pruned copy of the model at the posterior's center; the original is left as it is."""
        self.la._unchanged()
        pruned = copy.deepcopy(self.la.model)
        with torch.no_grad():
            for name, value in self.la.posterior.mean.items():
                pruned.get_parameter(name).copy_(value)
        return self.apply_(pruned)

    def measured_loss(self, loader: Iterable[Any]) -> float:
        """What `log p(D, θ)` really loses where `joint_loss` is expected: one pass over the data of the fit."""
        return measurement(self.la, loader)(self.masks)

    def fine_tune(self, loader: Iterable[Any], epochs: int = 10, lr: float = 1e-3) -> nn.Module:
        """Train a pruned copy on, with what was removed held at 0; returns the copy.

        Adam on `−T log p(D|θ) + ½ ‖θ − μ₀‖²_Π` per example, under the prior and noise of the posterior: after
        `tune_prior` those that the evidence chose. Parameters that are not Bayesian are trained without a prior.
        Modules are in train or eval mode as in the model: batch norms in eval mode keep their statistics.
        """
        if epochs < 1:
            raise InputError(f"fine_tune needs at least 1 epoch, got {epochs}.")
        _check_reread(loader)
        tuned = self.model()
        with torch.inference_mode(False), torch.enable_grad():
            self._train(tuned, loader, epochs, lr)
        return tuned

    def _train(self, tuned: nn.Module, loader: Iterable[Any], epochs: int, lr: float) -> None:
        parameters = dict(tuned.named_parameters())
        optimizer = torch.optim.Adam([value for value in parameters.values() if value.requires_grad], lr=lr)
        posterior = self.la.posterior
        scale, examples = float(posterior.likelihood_scale), posterior.spectrum.curvature.examples
        for epoch in bar(range(epochs), "fine-tune", self.la.progress):
            where = ""
            for where, inputs, targets in read(loader, self.la.device, self.la.unpack, "epoch", False):
                outputs = outputs_of(tuned, inputs, self.la.output)
                check_targets(where, outputs, targets)
                self.la.likelihood.check(outputs, targets, where)
                fit = self.la.likelihood.log_prob(outputs, targets).mean()
                optimizer.zero_grad()
                (penalty(posterior, parameters) / examples - scale * fit).backward()
                for name, mask in self.masks.items():
                    gradient = parameters[name].grad
                    if gradient is not None:
                        gradient.masked_fill_(~mask.to(gradient.device), 0)
                optimizer.step()
                self.apply_(tuned)
            if not where:
                raise InputError(f"The loader of fine_tune is empty in epoch {epoch}: it yields no batch.")
        optimizer.zero_grad()

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
    found = posterior.precision_diagonal() if precision == "diagonal" else marginal_precisions(la)
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
        evidence_loss: instead of it, the nats of evidence that may be lost, at least 0: the most units go whose loss is
            within it, as far as a scan over their number sees.
        units: "weight", "output" (neurons and filters: the row of a weight and its bias; those of the layers that make
            the model's outputs stay), or "input" (what a layer reads: features and channels).
        precision: "diagonal" or "marginal", see `scores`.
        ranking: "global", or "layer" to take the same fraction of each.
        only: names or globs of the parameters to prune, of weights where units are rows or columns. The default is
            all matrices: it leaves out biases and norms.
        loader: the data of the fit. With it, `evidence_loss` counts what `log p(D, θ)` loses in fact, by up to
            some thirty passes over the data, where otherwise the Gaussian posterior says what it should.
    """
    if not isinstance(la, Laplace):
        raise InputError(
            f"prune needs a fitted Laplace, got {type(la).__name__}: prune(Laplace(model, ...).fit(loader))."
        )
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
    la = la.at()  # as it is now, whatever is tuned later
    groups = prunable(la, units, only, loader)
    score, gains = groups.total(scores(la, precision)), groups.total(spared(la))
    order = score.argsort(stable=True)
    joint = partial(joint_loss, la) if loader is None else measurement(la, loader)

    def loss(count: int) -> float:
        """Of the evidence, without the `count` smallest scores."""
        return joint(groups.masks(_all_but(order[:count], groups.count))) - float(gains[order[:count]].sum())

    if sparsity is not None:
        gone = smallest(score, groups, sparsity, ranking)
    else:
        assert evidence_loss is not None
        gone = order[: _largest(loss, evidence_loss, groups.count, _SCANNED if loader is None else _MEASURED)]
    masks = groups.masks(_all_but(gone, groups.count))
    _warn_of_empty_layers(masks, ranking)
    if sparsity and not gone.numel():
        warn(
            f"Nothing is removed: the first unit to go is more than {sparsity:.3g} of the "
            f"{int(groups.sizes().sum())} elements that can be pruned. Prune more, or smaller units.",
            PruningWarning,
        )
    threshold, expected = float(score[gone].max()) if gone.numel() else 0.0, joint_loss(la, masks)
    return Pruning(la, masks, units, threshold, expected, expected - float(gains[gone].sum()))


def prunable(
    la: Laplace, units: str = "weight", only: str | Sequence[str] | None = None, loader: Iterable[Any] | None = None
) -> Units:
    """What may be pruned: see `prune`. Output units take a look at a few inputs, those of the fit or of the loader."""
    la._unchanged()
    outputs = frozenset[str]()
    if units == "output" and only is None:
        inputs = few_examples(la, loader)
        if inputs is None:
            raise InputError(
                "units='output' looks at a few inputs to see which layers make the model's outputs, and a file keeps "
                "none: name the layers to prune, only=[...]."
            )
        outputs = output_weights(la.model, inputs, la.output)
    layers = [layer for block in la.curvature.blocks for layer in block.layers]
    return units_of(layers, units, first_names(la.model, only), la.device, outputs)


def _all_but(gone: Tensor, count: int) -> Tensor:
    """True for all of `count` units but those with these numbers: `[U]`."""
    return torch.ones(count, dtype=torch.bool, device=gone.device).index_fill(0, gone, False)


def _largest(loss: Callable[[int], float], budget: float, count: int, points: int) -> int:
    """The largest number up to `count` at which the loss is within the budget; at 0 nothing is lost.

    The loss need not rise all the way: so many numbers are tried from the top, and below the last that is too much,
    down to the first that is not, bisection finds where the loss crosses the budget.
    """
    tried = sorted({round(count * part / points) for part in range(1, points + 1)} - {0})
    low, high = 0, count + 1
    for number in reversed(tried):
        if loss(number) <= budget:
            low = number
            break
        high = number
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if loss(middle) <= budget else (low, middle)
    return low


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
        gone.append(order[removed <= sparsity * float(removed[-1]) + 1e-6])  # elements are whole: the rest is rounding
    return torch.cat(gone)


def _warn_of_empty_layers(masks: dict[str, Tensor], ranking: str) -> None:
    empty = [name for name, mask in masks.items() if not bool(mask.any())]
    if empty:
        fix = " or take ranking='layer'" if ranking == "global" else ""
        warn(
            f"Nothing is left of {', '.join(map(repr, empty))}. Prune less{fix}, or leave it out with only=...",
            PruningWarning,
        )
