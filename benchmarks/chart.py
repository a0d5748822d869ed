"""The chart: what a fit costs in multiples of one plain pass, Lapwing and the fastest rival that is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from benchmarks.operations import OPERATIONS
from benchmarks.report import Cases, cost, fastest
from benchmarks.workloads import MAIN

TEAL, LIGHT, GRAY, INK = "#00796b", "#80cbc4", "#bdbdbd", "#37474f"
PANELS = (
    ("kron, exact", "kron-exact", "kron-tol"),
    ("kron, Monte Carlo", "kron-mc", ""),
    ("diag, exact", "diag-exact", "diag-tol"),
)


def draw(cases: Cases, path: Path) -> None:
    """One panel for each kind of fit, one group of bars for each workload."""
    pyplot.rcParams.update({"svg.hashsalt": "lapwing", "svg.fonttype": "none", "font.size": 9, "text.color": INK})
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10.5, 4.6), sharey=True)
    for axis, (title, plain, loose) in zip(axes, PANELS, strict=True):
        for row, workload in enumerate(MAIN):
            best = fastest(cases, workload, plain)
            bars = [(_ratio(cases, workload, plain), TEAL, "Lapwing")]
            bars += [(_ratio(cases, workload, loose), LIGHT, "Lapwing, to 1e-3")] if loose else []
            bars += [(None if best is None else best[1], GRAY, "fastest rival that is right")]
            for place, (value, color, label) in enumerate(bars):
                height = row + (place - (len(bars) - 1) / 2) * 0.26
                if value is None:
                    continue
                axis.barh(height, value, 0.24, color=color, label=label)
                axis.text(value * 1.06, height, f"{value:.2g}", va="center", fontsize=7)
        axis.set_title(title, fontsize=10, color=INK)
        axis.set_xscale("log")
        axis.set_xlim(0.5, 300)
        axis.set_xticks([1, 10, 100], ["1", "10", "100"])
        axis.set_xlabel("plain passes")
        axis.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axis.tick_params(colors=INK, length=0, which="both")
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].set_yticks(range(len(MAIN)), [workload.title for workload in MAIN.values()])
    axes[0].invert_yaxis()
    entries: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(list(entries.values()), list(entries), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _ratio(cases: Cases, workload: str, operation: str) -> float | None:
    result = cases.get(f"{workload}/{operation}", {})
    return cost(result, OPERATIONS[operation]) if "ratio" in result else None
