"""What a fitted posterior rests on: is the network a mode, which weights have no scale, what do the data determine?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.curvature import Block
from lapwing.curvature.lowrank import LowRankAccumulator
from lapwing.errors import ConvergenceWarning
from lapwing.examples import few_examples
from lapwing.gradients import Layer
from lapwing.guard import random_state_kept
from lapwing.mode import Mode
from lapwing.posterior import Posterior
from lapwing.scale_free import REST, ScaleFree, find_scale_free
from lapwing.spectrum import Spectrum

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

_ONE_DEVIATION = 0.5  # nats: the step to the mode is one posterior standard deviation long
_LOOSE = 1e-3  # of a first-order condition, above which a mode is said not to be one
_UNDETERMINED = 1e-3  # directions of a group
_MUCH = 1e-2  # of the trace


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer: its size p, how many directions the data determine, and the spectrum s of its part of H.

    `condition` is `max |s| / min |s|`, infinite where H is singular up to rounding, and NaN where it is 0; `rank`
    counts the eigenvalues above rounding; `frobenius` is `√Σ s²`, of H at unit noise and temperature.
    """

    name: str
    parameters: tuple[str, ...]
    size: int
    effective_dimension: float
    rank: int
    condition: float
    frobenius: float


@dataclass(frozen=True)
class GroupDiagnosis:
    """Weights that share a scale: a scale-free group, or the `rest`, whose scale the network sees.

    `precision` is the prior's, None where it has several here. `distance` is `‖θ* − θ̃‖/‖θ̃‖`, None without a θ*.
    """

    label: str
    scale_free: bool
    parameters: tuple[str, ...]
    size: int
    effective_dimension: float
    precision: float | None
    distance: float | None


@dataclass(frozen=True)
class ModeDiagnosis:
    """θ*, the linear model's own mode, as it was found: is it still the mode under the current prior, noise and T?

    `residual` is the violation of its first-order condition now, `found` when it was found (see `lapwing.mode.Mode`);
    `evidence` is the log-evidence there, and `distance` is `‖θ* − θ̃‖/‖θ̃‖` over all weights.
    """

    residual: float
    found: float
    evidence: float
    distance: float

    @property
    def current(self) -> bool:
        """Whether it belongs to the current prior, noise and temperature."""
        return self.residual <= max(_LOOSE, 2 * self.found)


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `str` makes a table of it, `lapwing.plots.diagnosis` a picture.

    `decrement` is `½ gᵀ P⁻¹ g` in nats, with g the gradient of the log joint at θ̃: what a Newton step would gain.
    `violation` is that of the first-order condition relative to its terms, `‖g‖ / (‖Π(θ̃ − μ₀)‖ + ‖T∇/σ²‖)` in the norm
    of Π⁻¹. `evidence` is the log-evidence at θ̃, `dropped` the fraction of the curvature's trace that `rank_tolerance`
    left out. `groups_seen` is False where there were no inputs to find scale-free groups with.
    """

    structure: str
    decrement: float
    violation: float
    evidence: float
    mode: ModeDiagnosis | None
    groups: tuple[GroupDiagnosis, ...]
    layers: tuple[LayerDiagnosis, ...]
    dropped: float
    groups_seen: bool

    @property
    def is_mode(self) -> bool:
        """Whether θ̃ is within one posterior standard deviation of the quadratic model's mode: at most ½ nat below."""
        return self.decrement <= _ONE_DEVIATION

    @property
    def scale_free(self) -> tuple[str, ...]:
        """Labels of the scale-free groups."""
        return tuple(group.label for group in self.groups if group.scale_free)

    @property
    def effective_dimension(self) -> float:
        """γ of all weights."""
        return sum(layer.effective_dimension for layer in self.layers)

    @property
    def advice(self) -> tuple[str, ...]:
        """What is off, and what to do about it; empty where nothing is."""
        return tuple(_advice(self))

    def __str__(self) -> str:
        return "\n".join([*_findings(self), "", *_group_table(self), "", *_layer_table(self), "", *_closing(self)])


def diagnose(la: Laplace, loader: Iterable[Any] | None = None) -> Diagnosis:
    """Look at a fitted posterior; nothing of it or of the model is changed.

    Everything but the scale-free groups is read from what `fit` and `find_mode` left behind. Those are found by forward
    passes of a few examples of the fit, or of `loader`, which a posterior from a file needs.

    Examples:
        >>> import torch
        >>> from lapwing import Laplace, diagnostics
        >>> data = [(torch.randn(8, 3), torch.randn(8, 1))]
        >>> la = Laplace(torch.nn.Linear(3, 1), "regression").fit(data)
        >>> diagnostics.diagnose(la).scale_free
        ()
    """
    posterior = la.at(center="network").posterior
    with torch.no_grad():
        determined = {name: float(value.sum()) for name, value in posterior.effective_dimensions().items()}
        decrement, violation = _first_order(posterior)
        found = _scale_free(la, loader)
        return Diagnosis(
            structure=la.structure,
            decrement=decrement,
            violation=violation,
            evidence=float(la.log_evidence(center="network")),
            mode=None if la.mode_ is None else _mode(la, posterior, la.mode_),
            groups=tuple(_groups(posterior, found, la.mode_, determined)),
            layers=tuple(_layers(posterior.spectrum, determined)),
            dropped=la.curvature.dropped,
            groups_seen=found is not None,
        )


def _first_order(posterior: Posterior) -> tuple[float, float]:
    """The Newton decrement in nats, and the relative violation of the first-order condition, at θ̃."""
    found = posterior.first_order()
    solved = posterior.solve(found.slope)
    return 0.5 * sum(float((slope * solved[name]).sum()) for name, slope in found.slope.items()), found.residual


def _mode(la: Laplace, posterior: Posterior, mode: Mode) -> ModeDiagnosis:
    residual = posterior.first_order(mode.step, mode.gradient).residual
    distance = _distance(posterior, mode, tuple(posterior.sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the diagnosis says it
        evidence = float(la.log_evidence(center="linear"))
    return ModeDiagnosis(residual, mode.residual, evidence, distance)


def _distance(posterior: Posterior, mode: Mode, names: tuple[str, ...]) -> float:
    """`‖θ* − θ̃‖/‖θ̃‖` over these parameters; infinite for weights that are 0 and move."""
    moved = math.sqrt(sum(float(mode.step[name].square().sum()) for name in names))
    size = math.sqrt(sum(float(posterior.weights[name].double().square().sum()) for name in names))
    return moved / size if size > 0 else math.inf if moved > 0 else 0.0


def _scale_free(la: Laplace, loader: Iterable[Any] | None) -> ScaleFree | None:
    state = la._unchanged()
    with random_state_kept(), la._borrow(state.weights):
        inputs = few_examples(la, loader)
        return None if inputs is None else find_scale_free(state.tape, inputs)


def _groups(
    posterior: Posterior, found: ScaleFree | None, mode: Mode | None, determined: dict[str, float]
) -> Iterable[GroupDiagnosis]:
    free = {} if found is None else found.groups
    rest = tuple(posterior.sizes) if found is None else found.rest
    for label, names in (*free.items(), (REST, rest)):
        if not names:
            continue
        precisions = torch.cat([posterior.precisions[name].flatten() for name in names])
        low, high = float(precisions.min()), float(precisions.max())
        yield GroupDiagnosis(
            label=label,
            scale_free=label in free,
            parameters=names,
            size=sum(posterior.sizes[name].numel() for name in names),
            effective_dimension=sum(determined[name] for name in names),
            precision=low if low == high else None,
            distance=None if mode is None else _distance(posterior, mode, names),
        )


def _layers(spectrum: Spectrum, determined: dict[str, float]) -> Iterable[LayerDiagnosis]:
    for index, block in enumerate(spectrum.blocks):
        start = 0
        for layer in block.layers:
            values, side = _eigenvalues(spectrum, index, block, layer, slice(start, start + layer.size))
            start += layer.size
            sizes = values.abs()
            largest, smallest = float(sizes.max()), float(sizes.min())
            dtype = torch.promote_types(spectrum.curvature.gradient[layer.parameters[0]].dtype, torch.float32)
            rounding = side * torch.finfo(dtype).eps * largest
            condition = largest / smallest if smallest > rounding else math.inf if largest > 0 else math.nan
            yield LayerDiagnosis(
                name=layer.name,
                parameters=layer.parameters,
                size=layer.size,
                effective_dimension=sum(determined[name] for name in layer.parameters),
                rank=int((sizes > rounding).sum()),
                condition=condition,
                frobenius=float(values.square().sum().sqrt()),
            )


def _eigenvalues(spectrum: Spectrum, index: int, block: Block, layer: Layer, part: slice) -> tuple[Tensor, int]:
    """All p eigenvalues of a layer's diagonal part of H, and the larger side of a matrix they come from."""
    if len(block.layers) == 1:
        found = spectrum.decompose(index, None)
        return found.eigenvalues.flatten(), max(found.basis.shape)
    accumulator = block.accumulator
    if not isinstance(accumulator, LowRankAccumulator):
        return torch.linalg.eigvalsh(accumulator.matrix()[part, part].double()), layer.size
    factor = accumulator.vectors[part].double() * accumulator.values.sqrt()  # H_l = F Fᵀ
    count = min(factor.shape)
    values = torch.linalg.eigvalsh(factor.T @ factor)[-count:].clamp(min=0)
    return torch.cat([values.new_zeros(layer.size - count), values]), max(factor.shape)


# --------------------------------------------------------------------------------------------- words


def _findings(diagnosis: Diagnosis) -> list[str]:
    verdict = "a mode" if diagnosis.is_mode else "no mode"
    lines = [
        f"The network is {verdict} of its log joint: a Newton step would gain {diagnosis.decrement:.3g} nats; the "
        f"first-order condition is violated by {diagnosis.violation:.2g} of its terms.",
        f"Log-evidence at the network's weights: {diagnosis.evidence:.6g}.",
    ]
    if diagnosis.mode is None:
        return [*lines, "The linear model's mode: not found: la.find_mode(loader)."]
    mode = diagnosis.mode
    return [
        *lines,
        f"Log-evidence at the linear model's mode: {mode.evidence:.6g}, {mode.distance:.3g} times the network's norm "
        f"away; its first-order condition is violated by {mode.residual:.2g} (when found: {mode.found:.2g}).",
    ]


def _group_table(diagnosis: Diagnosis) -> list[str]:
    rows = [("group", "scale-free", "size", "effective dimension", "prior precision", "‖θ* − θ̃‖/‖θ̃‖")]
    for group in diagnosis.groups:
        free = "yes" if group.scale_free else "no" if diagnosis.groups_seen else "unknown"
        precision = "several" if group.precision is None else f"{group.precision:.4g}"
        distance = "–" if group.distance is None else f"{group.distance:.3g}"
        rows.append((group.label, free, f"{group.size:,}", f"{group.effective_dimension:.4g}", precision, distance))
    return _table(rows)


def _layer_table(diagnosis: Diagnosis) -> list[str]:
    rows = [("layer", "size", "effective dimension", "rank", "condition", "Frobenius norm")]
    for layer in diagnosis.layers:
        condition = "singular" if math.isinf(layer.condition) else f"{layer.condition:.3g}"
        effective = f"{layer.effective_dimension:.4g}"
        rows.append((layer.name, f"{layer.size:,}", effective, f"{layer.rank:,}", condition, f"{layer.frobenius:.4g}"))
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _closing(diagnosis: Diagnosis) -> list[str]:
    size = sum(layer.size for layer in diagnosis.layers)
    dropped = f"{100 * diagnosis.dropped:.2g} % of the curvature's trace dropped"
    if diagnosis.structure == "lowrank":
        dropped = "the curvature beyond the eigenpairs of the fit dropped"
    lines = [f"The data determine {diagnosis.effective_dimension:.4g} of {size:,} directions; {dropped}."]
    return [*lines, *(f"! {sentence}" for sentence in diagnosis.advice)]


def _advice(diagnosis: Diagnosis) -> Iterable[str]:
    if not diagnosis.is_mode:
        yield (
            "The network is no mode, so its evidence depends on where training stopped: use la.find_mode(loader) and "
            "center='linear', or la.tune_prior(method='linear-evidence', loader=loader)."
        )
    if diagnosis.mode is not None and diagnosis.mode.found > _LOOSE:
        yield "The linear model's mode did not converge: call la.find_mode(loader) again, with more steps."
    elif diagnosis.mode is not None and not diagnosis.mode.current:
        yield (
            "The linear model's mode was found under another prior, noise or temperature: call la.find_mode(loader) "
            "again."
        )
    shared = _sharing(diagnosis)
    if shared:
        yield (
            f"The scale of {_named(shared)} means nothing to the network, but a prior precision shared with other "
            "weights makes predictions depend on it: use la.tune_prior(method='linear-evidence', groups='auto', "
            "loader=loader)."
        )
    if not diagnosis.groups_seen:
        yield "Scale-free groups are seen on a few inputs, and a file keeps none: use diagnose(la, loader)."
    undetermined = [group.label for group in diagnosis.groups if group.effective_dimension < _UNDETERMINED]
    if undetermined:
        yield (
            f"The data say nothing about {_named(undetermined)} under this prior: there the posterior is the prior. "
            "Leave those weights out (weights=...), or give them a weaker prior."
        )
    if diagnosis.dropped > _MUCH:
        yield (
            f"{100 * diagnosis.dropped:.2g} % of the curvature was dropped, so the posterior is too wide: lower "
            "rank_tolerance."
        )


def _sharing(diagnosis: Diagnosis) -> list[str]:
    """Scale-free groups with a precision that another group has, too, or with several."""
    given = [group.precision for group in diagnosis.groups]
    return [
        group.label
        for group in diagnosis.groups
        if group.scale_free and (group.precision is None or given.count(group.precision) > 1)
    ]


def _named(labels: list[str]) -> str:
    return ", ".join(repr(label) for label in labels)
