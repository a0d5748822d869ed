"""Alarms, conformal sets and active learning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.decisions.conformal_sets import ConformalSets, labels
from lapwing.decisions.ood import OODAlarm
from lapwing.errors import InputError
from lapwing.plots.canvas import COLORS, GRAY, INK, canvas
from lapwing.predictive.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ood_alarm(
    alarm: OODAlarm,
    scores: Tensor | Mapping[str, Tensor],
    bins: int = 30,
    ax: Axes | None = None,
) -> Axes:
    """Densities of the alarm's calibration scores and of other `scores`, with its threshold.

    Each label says what fraction rings.
    """
    if bins < 1:
        raise InputError(f"bins must be at least 1, got {bins}.")
    others = dict(scores) if isinstance(scores, Mapping) else {"new": scores}
    rings = {name: float(alarm.rings(values).double().mean()) for name, values in others.items()}
    sets = [alarm.scores.cpu(), *(values.detach().double().cpu() for values in others.values())]
    names = ["calibration", *(f"{name}: {rate:.1%} ring" for name, rate in rings.items())]
    ax = canvas(ax)
    low, high = float(torch.cat(sets).min()), float(torch.cat(sets).max())
    edges = torch.linspace(low, high if high > low else low + 1, bins + 1, dtype=torch.float64).tolist()
    for i, (values, name) in enumerate(zip(sets, names, strict=True)):
        ax.hist(values.tolist(), bins=edges, density=True, color=COLORS[i % len(COLORS)], alpha=0.55, label=name)
    ax.axvline(alarm.threshold, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label="_threshold")
    ax.set_xlabel("score")
    ax.set_ylabel("density")
    ax.set_title(f"false alarms ≤ {alarm.false_alarm_rate:g}")
    ax.legend(frameon=False)
    return ax


def set_sizes(
    rules: Mapping[str, Sequence[ConformalSets]],
    prediction: Prediction,
    targets: Tensor,
    generator: torch.Generator | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The mean number of classes in a set against the fraction of sets that hold the right one, a curve per name.

    A curve is made of rules calibrated at several α, each a point; ticks below mark the coverages asked for.
    `prediction` and `targets` are of examples that none was calibrated on.
    """
    index, observed = labels(prediction, targets)
    ax = canvas(ax)
    for number, (name, several) in enumerate(rules.items()):
        points = []
        for rule in several:
            sets = rule.sets(prediction, generator)[observed].double()
            held = sets.gather(1, index[observed].unsqueeze(1))
            points.append((float(held.mean()), float(sets.sum(1).mean())))
        points.sort()
        color = COLORS[number % len(COLORS)]
        ax.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3.5, label=name)
    asked = sorted({1 - rule.alpha for several in rules.values() for rule in several})
    for value in asked:
        ax.axvline(value, ymax=0.03, color=GRAY, linewidth=1.2)
    ax.set_xlabel("coverage")
    ax.set_ylabel("classes in a set, on average")
    ax.legend(frameon=False)
    return ax


def learning_curves(
    counts: Sequence[int] | Tensor, results: Mapping[str, Tensor], ylabel: str = "accuracy", ax: Axes | None = None
) -> Axes:
    """A measure against the number of labels, a curve per way to choose them.

    Args:
        counts: R numbers of labels.
        results: by name, `[R]` of one run or `[runs, R]` of several: their mean, and its standard error as a shade.
        ylabel: what is measured.
        ax: where to draw.
    """
    places = [int(count) for count in counts]
    ax = canvas(ax)
    for number, (name, values) in enumerate(results.items()):
        runs = values.detach().double().cpu().reshape(-1, values.shape[-1])
        if runs.shape[1] != len(places):
            raise InputError(f"{len(places)} numbers of labels against results {name!r} of {list(values.shape)}.")
        mean, color = runs.mean(0), COLORS[number % len(COLORS)]
        ax.plot(places, mean, color=color, linewidth=1.6, label=name)
        if len(runs) > 1:
            error = runs.std(0) / math.sqrt(len(runs))
            ax.fill_between(places, mean - error, mean + error, color=color, alpha=0.18, linewidth=0)
    ax.set_xlabel("labels")
    ax.set_ylabel(ylabel)
    ax.legend(frameon=False)
    return ax
