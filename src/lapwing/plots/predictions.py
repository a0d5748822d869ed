"""What predictions say, and how far they are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing import metrics
from lapwing.decisions import selective
from lapwing.errors import InputError
from lapwing.plots.canvas import COLORS, FAINT, GRAY, INK, canvas
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Predictions = Prediction | Mapping[str, Prediction]


def regression_bands(
    x: Tensor,
    prediction: Prediction,
    data: tuple[Tensor, Tensor] | None = None,
    deviations: int = 3,
    output: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """The mean over inputs `x: [N]` or `[N, 1]`, with one shade for each of the first `deviations` standard deviations.

    Lighter, dashed lines are one standard deviation of the epistemic part alone. `data` are points `(x, y)` to draw;
    `output` says which, where there are several.
    """
    if not isinstance(prediction, RegressionPrediction):
        raise InputError(f"regression_bands draws regressions, not a {type(prediction).__name__}.")
    if deviations < 1:
        raise InputError(f"deviations must be at least 1, got {deviations}.")
    place, order = _line(x, prediction).sort()

    def pick(values: Tensor) -> Tensor:
        return values.detach().flatten(1)[order, output].cpu() if values.dim() > 1 else values.detach()[order].cpu()

    mean, std, known = pick(prediction.mean), pick(prediction.std), pick(prediction.epistemic).sqrt()
    ax = canvas(ax)
    for k in range(deviations, 0, -1):
        low, high = mean - k * std, mean + k * std
        ax.fill_between(place, low, high, color=COLORS[0], alpha=0.18, linewidth=0, label=f"± {k} std")
    ax.plot(place, mean, color=COLORS[0], linewidth=1.8, label="mean")
    for side in (-1, 1):
        ax.plot(place, mean + side * known, color=COLORS[0], linewidth=0.8, linestyle="--", label="_epistemic")
    if data is not None:
        points, targets = (values.detach().cpu() for values in data)
        targets = targets.flatten(1)[:, output] if targets.dim() > 1 else targets
        ax.scatter(points.reshape(len(points)), targets, s=9, color=INK, zorder=3, label="data")
    return ax


def _line(x: Tensor, prediction: RegressionPrediction) -> Tensor:
    if x.numel() != len(x) or len(x) != len(prediction.mean):
        raise InputError(
            f"regression_bands needs one number per input, {len(prediction.mean)} of them, got x of {list(x.shape)}."
        )
    return x.detach().reshape(-1).cpu()


def inverse_ecdf(predictions: Predictions, ax: Axes | None = None) -> Axes:
    """The fraction of predictions whose entropy is above each value, a curve for each set.

    On familiar inputs it should fall at once; on foreign ones it should stay up until the largest entropy, log C.
    """
    ax = canvas(ax)
    for color, (name, entropy) in zip(_colors(predictions), _entropies(predictions).items(), strict=False):
        ordered = entropy.sort().values
        above = 1 - torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
        ax.step(torch.cat([ordered.new_zeros(1), ordered]), above, where="post", color=color, label=name)
    ax.set_xlabel("entropy (nats)")
    ax.set_ylabel("fraction above")
    ax.set_ylim(0, 1.02)
    return _legend(ax, predictions)


def entropy_histogram(
    familiar: Prediction,
    foreign: Prediction,
    bins: int = 30,
    names: tuple[str, str] = ("in distribution", "out of distribution"),
    ax: Axes | None = None,
) -> Axes:
    """Densities of the entropies of two sets over the same bins; the title is the AUROC of telling them apart."""
    if bins < 1:
        raise InputError(f"bins must be at least 1, got {bins}.")
    sets = [_entropy(prediction) for prediction in (familiar, foreign)]
    ax = canvas(ax)
    edges = torch.linspace(0, float(torch.cat(sets).max()) * (1 + 1e-9) or 1.0, bins + 1, dtype=torch.float64).tolist()
    for entropy, name, color in zip(sets, names, COLORS, strict=False):
        ax.hist(entropy.tolist(), bins=edges, density=True, color=color, alpha=0.55, label=name)
    ax.set_xlabel("entropy (nats)")
    ax.set_ylabel("density")
    ax.set_title(f"AUROC {float(metrics.auroc(*sets)):.3f}")
    ax.legend(frameon=False)
    return ax


def reliability_diagram(prediction: Prediction, targets: Tensor, bins: int = 15, ax: Axes | None = None) -> Axes:
    """Accuracy against confidence in bins of confidence; bars below the diagonal are overconfident.

    Widths are the bins', shades how many examples are in them. The title is the expected calibration error.
    """
    probs, targets = _flat(prediction, targets)
    found = metrics.reliability(probs, targets, bins)
    ax = canvas(ax, 4.0, 4.0)
    ax.plot([0, 1], [0, 1], color=GRAY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    largest = int(found.examples.max())
    for b in range(bins):
        count = int(found.examples[b])
        if count:
            height, confidence = float(found.accuracy[b]), float(found.confidence[b])
            ax.bar(b / bins, height, 1 / bins, align="edge", color=COLORS[0], alpha=0.25 + 0.75 * count / largest,
                   edgecolor="white", linewidth=0.5)  # fmt: skip
            ax.plot([confidence, confidence], [height, confidence], color=COLORS[1], linewidth=1.2)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.set_xlabel("confidence")
    ax.set_ylabel("accuracy")
    ax.set_title(f"calibration error {float(metrics.expected_calibration_error(probs, targets, bins)):.3f}")
    return ax


def risk_coverage(
    predictions: Predictions,
    targets: Tensor,
    ax: Axes | None = None,
    score: str | None = None,
    risk: str | None = None,
) -> Axes:
    """The error rate among the most confident fraction of the predictions, a curve for each set.

    Fractions are counted in examples of equal confidence together, which cannot be told apart. Another `score` than
    confidence, another `risk` than the error, and regressions: as in `lapwing.decisions.risk_coverage`.
    """
    ax = canvas(ax)
    for color, (name, prediction) in zip(_colors(predictions), _named(predictions).items(), strict=False):
        curve = selective.risk_coverage(prediction, targets, score, risk)
        ax.plot(curve.coverage.cpu(), curve.risk.cpu(), color=color, label=name)
    ax.axhline(0, color=FAINT, linewidth=0.8, zorder=0)
    ax.set_xlabel("coverage")
    ax.set_ylabel(f"{(risk or _default_risk(predictions)).replace('_', ' ')} among the covered")
    ax.set_xlim(0, 1)
    return _legend(ax, predictions)


def _default_risk(predictions: Predictions) -> str:
    found = {selective.default_risk(prediction) for prediction in _named(predictions).values()}
    return " or ".join(sorted(found))


def _flat(prediction: Prediction, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Class probabilities `[M, C]` and targets `[M]` of all observed positions or outputs."""
    if isinstance(prediction, ClassPrediction):
        index, observed = prediction.targets(targets)
        probs = prediction.probs.detach().movedim(prediction.dim, -1)
        return probs[observed].cpu(), index[observed].cpu()
    if isinstance(prediction, BinaryPrediction):
        if targets.shape != prediction.probs.shape:
            shape = list(prediction.probs.shape)
            raise InputError(f"targets of shape {list(targets.shape)} against outputs of {shape}.")
        sides = torch.stack([prediction.log_no, prediction.log_yes], -1).exp()
        return sides.detach().flatten(0, -2).cpu(), targets.flatten().long().cpu()
    raise InputError(f"This picture is one of class predictions, not of a {type(prediction).__name__}.")


def _entropy(prediction: Prediction) -> Tensor:
    if not isinstance(prediction, ClassPrediction | BinaryPrediction):
        raise InputError(f"This picture is one of class predictions, not of a {type(prediction).__name__}.")
    return prediction.entropy.detach().flatten().double().cpu()


def _named(predictions: Predictions) -> dict[str, Prediction]:
    return dict(predictions) if isinstance(predictions, Mapping) else {"": predictions}


def _entropies(predictions: Predictions) -> dict[str, Tensor]:
    return {name: _entropy(prediction) for name, prediction in _named(predictions).items()}


def _colors(predictions: Predictions) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(_named(predictions)))]


def _legend(ax: Axes, predictions: Predictions) -> Axes:
    if isinstance(predictions, Mapping):
        ax.legend(frameon=False)
    return ax
