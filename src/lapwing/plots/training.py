"""How a training with the evidence went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lapwing.errors import choose
from lapwing.plots.canvas import COLORS, GRAY, INK, canvas
from lapwing.training import Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AXES = {
    "evidence": "log-evidence",
    "loss": "loss",
    "precisions": "prior precision",
    "noise": "noise variance",
}


def training_history(training: Training, what: str = "evidence", ax: Axes | None = None) -> Axes:
    """Draw "evidence", "loss", "precisions" (one line for each group) or "noise" against the epochs done.

    Groups with a precision for every element show its geometric mean. A dashed line marks the best evidence, whose
    weights the model has.
    """
    choose(what, _AXES, "what")
    ax = canvas(ax)
    fitted = [record for record in training.history if record.log_evidence is not None]
    records = list(training.history) if what == "loss" else fitted
    lines: dict[str, list[float]] = {}
    if what == "precisions":
        for label in (fitted[0].precisions or {}) if fitted else {}:
            found = [torch.as_tensor((record.precisions or {})[label], dtype=torch.float64) for record in fitted]
            lines[label] = [float(value.log().mean().exp()) for value in found]
    else:
        field = {"evidence": "log_evidence"}.get(what, what)
        records = [record for record in records if getattr(record, field) is not None]
        lines[what] = [getattr(record, field) for record in records]
    epochs = [record.epoch + 1 for record in records]
    for i, (label, values) in enumerate(lines.items()):
        color = COLORS[i % len(COLORS)]
        ax.plot(
            epochs, values, color=color, linewidth=1.8, marker="" if what == "loss" else "o", markersize=4, label=label
        )
        if len(lines) > 1:
            ax.annotate(label, (epochs[-1], values[-1]), (6, 0), textcoords="offset points", color=color, va="center")
    if what in ("precisions", "noise"):
        ax.set_yscale("log")
    if training.best_epoch is not None:
        ax.axvline(training.best_epoch + 1, color=GRAY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    ax.set_xlabel("epochs", color=INK)
    ax.set_ylabel(_AXES[what], color=INK)
    return ax
