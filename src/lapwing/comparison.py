"""Compare fitted models by their evidence, without a validation set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import evidence
from lapwing.errors import ComparisonWarning, InputError, NotFittedError, positive, warn
from lapwing.laplace import Laplace
from lapwing.priors import FactoredDamping


@dataclass(frozen=True)
class Entry:
    """One model of a comparison: `log p(D|M)`, `p(M|D)`, and where the evidence comes from.

    `log_likelihood` is `log p(D|θ*)` at the posterior's center, so that `log_likelihood − log_evidence` is the price of
    its complexity. `effective_dimension` counts the directions that the data determine, out of `parameters`.
    """

    name: str
    log_evidence: float
    probability: float
    log_likelihood: float
    effective_dimension: float
    parameters: int


@dataclass(frozen=True)
class Comparison:
    """Models on the same data, the most probable first; `print` shows a table, `lapwing.plots.comparison` a picture."""

    entries: tuple[Entry, ...]
    examples: float

    @property
    def best(self) -> str:
        """The name of the most probable model."""
        return self.entries[0].name

    @property
    def log_evidences(self) -> dict[str, float]:
        """`log p(D|M)` by name."""
        return {entry.name: entry.log_evidence for entry in self.entries}

    @property
    def probabilities(self) -> dict[str, float]:
        """`p(M|D)` by name, summing to 1."""
        return {entry.name: entry.probability for entry in self.entries}

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def __str__(self) -> str:
        top = max(entry.log_evidence for entry in self.entries)
        rows = [("model", "log evidence", "difference", "probability", "log likelihood", "γ", "parameters")]
        rows += [
            (
                str(entry.name), f"{entry.log_evidence:,.2f}", f"{entry.log_evidence - top:,.2f}",
                f"{entry.probability:.3g}", f"{entry.log_likelihood:,.2f}", f"{entry.effective_dimension:,.1f}",
                f"{entry.parameters:,}",
            )
            for entry in self.entries
        ]  # fmt: skip
        first, *others = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(first), *(cell.rjust(n) for cell, n in zip(row[1:], others, strict=True))])
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in (first, *others)))
        return "\n".join([*lines, f"{self.examples:g} examples; γ is the effective dimension, of so many parameters"])


def compare(models: Mapping[str, Laplace], prior: Mapping[str, float] | None = None) -> Comparison:
    """Evidence and posterior probability of each model: `p(M|D) ∝ p(D|M) p(M)`.

    The models may differ in anything but the data: architecture, depth, width, activation, checkpoint, prior. Tune
    their priors first; an evidence under an arbitrary prior says as much about that prior as about the network.

    Args:
        models: fitted posteriors by name, at temperature 1.
        prior: probabilities p(M) by name, up to a factor; default all equal.

    Examples:
        >>> import torch
        >>> from lapwing import Laplace, compare
        >>> data = [(torch.linspace(-1, 1, 20)[:, None], 2 * torch.linspace(-1, 1, 20)[:, None])]
        >>> line, constant = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        >>> _ = constant.weight.data.zero_(), constant.weight.requires_grad_(False)
        >>> fits = {"line": line, "constant": constant}
        >>> posteriors = {n: Laplace(m, "regression").fit(data).at(center="newton") for n, m in fits.items()}
        >>> compare(posteriors).best
        'line'
    """
    check_comparable(models)
    posteriors = [la.posterior for la in models.values()]
    evidences = log_evidences(models.values())
    for name, value in zip(models, evidences.tolist(), strict=True):
        if not math.isfinite(value):
            raise InputError(f"{name!r} has the log-evidence {value}, which compares with nothing: look at its fit.")
    logs = evidences + _log_prior(models, prior)
    entries = [
        Entry(*row)
        for row in zip(
            models,
            evidences.tolist(),
            logs.softmax(0).tolist(),
            [float(evidence.log_likelihood(posterior)) for posterior in posteriors],
            [float(posterior.effective_dimension()) for posterior in posteriors],
            [posterior.spectrum.curvature.size for posterior in posteriors],
            strict=True,
        )
    ]
    order = logs.argsort(descending=True, stable=True).tolist()
    return Comparison(tuple(entries[i] for i in order), posteriors[0].spectrum.curvature.examples)


def log_evidences(models: Iterable[Laplace]) -> Tensor:
    """`log p(D|M)` of each: `[M]`, float64."""
    return torch.stack([la.log_evidence().detach().cpu() for la in models])


def check_comparable(models: Mapping[str, Laplace]) -> None:
    """Raise where evidences are not of the same data and kind; warn where they are bounds of unequal tightness."""
    if not isinstance(models, Mapping):
        raise InputError(f"compare needs models by name, {{name: la, ...}}, got a {type(models).__name__}.")
    if not models:
        raise InputError("There is nothing to compare: give {name: la, ...}.")
    for name, la in models.items():
        if not isinstance(la, Laplace):
            raise InputError(f"{name!r} is a {type(la).__name__}; give fitted Laplace objects, {{name: la, ...}}.")
        if not la.fitted:
            raise NotFittedError(f"{name!r} has no posterior yet: call la.fit(loader) first.")
        if isinstance(la.prior, FactoredDamping):
            raise InputError(
                f"{name!r} has FactoredDamping, which is no prior and has no evidence. Set a Gaussian one."
            )
        if la.temperature != 1:
            raise InputError(
                f"{name!r} has temperature {la.temperature:g}. A tempered evidence is no probability of the data and "
                "does not compare: use la.at(temperature=1)."
            )
    for what, value in _SAME.items():
        first, *others = models
        for other in others:
            left, right = value(models[first]), value(models[other])
            if not (left == right or _close(left, right)):
                raise InputError(
                    f"{first!r} and {other!r} do not compare: their {what} differ ({_shown(left)} and "
                    f"{_shown(right)}). Evidences compare on the same data alone."
                )
    for what, (value, consequence) in _ALIKE.items():
        found = {name: value(la) for name, la in models.items()}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{name}: {kind}" for name, kind in found.items())
            warn(f"The models differ in {what} ({shown}). {consequence}", ComparisonWarning)


_SAME: dict[str, Callable[[Laplace], Any]] = {
    "likelihoods": lambda la: la.likelihood.name,
    "numbers of examples seen": lambda la: la.curvature.examples,
    "numbers of observed values": lambda la: la.curvature.statistics.observations,
}
_ALIKE: dict[str, tuple[Callable[[Laplace], Any], str]] = {
    "structure": (
        lambda la: _with(la.structure, {"kron": la.kron, "ekfac": la.kron, "lowrank": la.rank}.get(la.structure)),
        "Their evidences are bounds of unequal tightness (diag ≤ block ≤ full), so that a difference may be the "
        "structure's.",
    ),
    "curvature": (
        lambda la: _with(la.curvature_kind, la.rank_tolerance or None),
        "A difference between their evidences may be the curvature's.",
    ),
    "center": (lambda la: la.center, "Moving the center raises the evidence, so a difference may be the center's."),
    "the Bayesian weights": (
        lambda la: la.weights,
        "Weights that are not Bayesian are fitted without a price, so that such evidences are too high.",
    ),
}


def _with(kind: str, option: object) -> str:
    """A kind and the option that belongs to it, if any."""
    return kind if option is None else f"{kind} {option}"


def _close(left: Any, right: Any) -> bool:
    """Numbers that are the same up to the rounding of averaged passes."""
    return isinstance(left, float) and math.isclose(left, right, rel_tol=1e-9)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _log_prior(models: Mapping[str, Laplace], prior: Mapping[str, float] | None) -> Tensor:
    """`log p(M)`, normalized: `[M]`."""
    if prior is None:
        prior = dict.fromkeys(models, 1.0)
    if set(prior) != set(models):
        odd = sorted(set(prior) ^ set(models))
        raise InputError(f"prior must have one probability for each model; {odd[0]!r} is in one of the two only.")
    return positive([prior[name] for name in models], "The prior probabilities of models").log().log_softmax(0)
