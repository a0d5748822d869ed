"""The picture of `lapwing demo`: regression bands, reliability, entropy of seen and unseen digits."""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import torch

from lapwing.demo import CLASSES, Comparison, Curve, Scores, entropy
from lapwing.metrics import reliability
from lapwing.plots.canvas import COLORS, FAINT, GRAY, INK, house_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EVIDENCE, PLAIN, VALIDATED = COLORS[:3]


def draw(curve: Curve, comparison: Comparison, output: Path) -> None:
    """Three panels: bands, reliability, entropy of seen and unseen digits."""
    with house_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(300 / 25.4, 110 / 25.4), layout="constrained")
        grid = figure.add_gridspec(2, 3, width_ratios=(1, 1, 1), wspace=0.05)
        _draw_curve(figure.add_subplot(grid[:, 0]), curve)
        _draw_reliability(figure.add_subplot(grid[:, 1]), comparison)
        top = figure.add_subplot(grid[0, 2])
        _draw_entropy(top, figure.add_subplot(grid[1, 2], sharex=top), comparison)
        figure.savefig(output, dpi=150)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    x, mean, std = curve.grid.numpy(), curve.mean.numpy(), curve.std.numpy()
    for k, shade in ((3, "#dceef0"), (2, "#b3d9de"), (1, "#84c1c9")):
        axes.fill_between(x, mean - k * std, mean + k * std, color=shade, linewidth=0)
        axes.text(6.15, mean[-1] + (k - 0.5) * std[-1], f"{k}σ", color=EVIDENCE, va="center")
    axes.plot(x, x**3, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(x, mean, color=EVIDENCE, linewidth=2)
    axes.plot(curve.x.numpy(), curve.y.numpy(), "o", color=INK, markersize=5, markeredgecolor="white")
    top = 1.05 * float((curve.mean.abs() + 3 * curve.std).max())
    axes.text(6.15, mean[-1], "mean", color=EVIDENCE, va="center", weight="bold")
    axes.text(0.2 - (0.9 * top) ** (1 / 3), -0.9 * top, "truth: x³", va="center")
    axes.set(xlim=(-6, 6), ylim=(-top, top), xlabel="x", ylabel="y")
    inside = (curve.grid > curve.x.min()) & (curve.grid < curve.x.max())
    ratio = float(curve.std[~inside].mean() / curve.std[inside].mean())
    axes.set_title(f"The bands know where the data are:\n{ratio:.1f} times as wide outside as inside")


def _draw_reliability(axes: Axes, comparison: Comparison) -> None:
    axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.2, zorder=0)
    axes.text(0.235, 0.215, "calibrated", color=GRAY, va="top")
    for row, (scores, color) in enumerate(zip(comparison, (PLAIN, EVIDENCE, VALIDATED), strict=True)):
        found = reliability(scores.probs, scores.targets, bins=10)
        enough = found.examples >= 10  # fewer say little about an accuracy
        x, y, count = (values[enough].numpy() for values in (found.confidence, found.accuracy, found.examples))
        axes.plot(x, y, color=color, linewidth=1.6)
        axes.scatter(x, y, 12 + count, color=color, edgecolor="white", linewidth=0.8, zorder=3)
        axes.text(1.05, 0.17 - 0.07 * row, f"{scores.name}: ECE {scores.ece:.3f}", color=color, ha="right")
    axes.set(xlim=(0.2, 1.06), ylim=(0, 1.06), xlabel="confidence (larger dots: more digits)", ylabel="accuracy")
    plain, laplace, validated = (_sureness(scores) for scores in comparison)
    axes.set_title(fill(f"Plain: {plain}. Laplace: {laplace}, validated: {validated}", width=40))


def _draw_entropy(top: Axes, bottom: Axes, comparison: Comparison) -> None:
    plain, laplace = comparison.plain, comparison.evidence
    edges = torch.linspace(0, math.log(CLASSES), 26)
    for axes, scores, color in ((top, plain, PLAIN), (bottom, laplace, EVIDENCE)):
        groups = {"seen 0 to 7": (entropy(scores.probs), GRAY), "unseen 8 and 9": (entropy(scores.unseen), color)}
        shares = torch.stack([torch.histogram(values, edges).hist / len(values) for values, _ in groups.values()])
        for share, (name, (values, shade)) in zip(shares, groups.items(), strict=True):
            axes.stairs(share.numpy(), edges.numpy(), fill=True, color=shade, alpha=0.35)
            axes.stairs(share.numpy(), edges.numpy(), color=shade, linewidth=1.2)
            middle = max(float(values.mean()), 0.3)
            under = shares[:, (edges[:-1] > middle - 0.4) & (edges[:-1] < middle + 0.3)]
            axes.text(middle, float(under.max() + 0.03 * shares.max()), name, color=shade, ha="center")
        axes.text(1, 0.99, scores.name, color=color, weight="bold", ha="right", va="top", transform=axes.transAxes)
        axes.set(xlim=(0, float(edges[-1])), ylim=(0, 1.4 * float(shares.max())), yticks=[])
        axes.spines["left"].set_visible(False)
    top.tick_params(labelbottom=False)
    bottom.set_xlabel("entropy of the prediction (nats)")
    better = "better" if laplace.auroc > plain.auroc else "no better"
    top.set_title(f"Laplace spots unseen 8s and 9s {better}:\nAUROC {laplace.auroc:.3f} against {plain.auroc:.3f}")


def _sureness(scores: Scores) -> str:
    points = round(100 * scores.overconfidence)
    return "about right" if points == 0 else f"{abs(points)} % too {'sure' if points > 0 else 'cautious'}"
