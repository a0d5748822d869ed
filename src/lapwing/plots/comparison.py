"""The evidence of models, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lapwing.comparison import Comparison
from lapwing.plots.canvas import COLORS, FAINT, GRAY, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def comparison(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """A dot per model at its log-evidence, the most probable on top, with its posterior probability beside it."""
    entries = comparison.entries
    ax = canvas(ax, height=1.2 + 0.3 * len(entries))
    places = range(len(entries))
    values = [entry.log_evidence for entry in entries]
    ax.hlines(places, min(values), values, colors=FAINT)
    ax.scatter(values, places, color=[COLORS[0], *[GRAY] * (len(entries) - 1)], zorder=2)
    for place, entry in zip(places, entries, strict=True):
        ax.annotate(f"{entry.probability:.2g}", (1.02, place), xycoords=("axes fraction", "data"), va="center")
    ax.annotate("p(M|D)", (1.02, 1.02), xycoords="axes fraction", color=GRAY)
    ax.set_yticks(places, [entry.name for entry in entries])
    ax.invert_yaxis()
    ax.set_xlabel("log evidence (nats)")
    return ax
