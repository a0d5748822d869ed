"""How much of each layer the data determine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lapwing.diagnostics import Diagnosis
from lapwing.plots.canvas import COLORS, FAINT, INK, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def diagnosis(found: Diagnosis, ax: Axes | None = None) -> Axes:
    """A bar per layer, from the first at the top: the share `γ/p` of its directions that the data determine.

    Layers with weights of a scale-free group are marked by color; behind each bar stand γ and p. The title says how
    far the network is from a mode.
    """
    ax = canvas(ax, height=1.2 + 0.3 * len(found.layers))
    free = [_is_free(found, number) for number in range(len(found.layers))]
    shares = [layer.effective_dimension / layer.size for layer in found.layers]
    places = list(range(len(found.layers)))
    ax.barh(places, [1.0] * len(places), color=FAINT, height=0.7)
    ax.barh(places, shares, color=[COLORS[0] if flag else COLORS[2] for flag in free], height=0.7)
    for place, layer in zip(places, found.layers, strict=True):
        ax.text(1.02, place, f"{layer.effective_dimension:.3g} of {layer.size:,}", va="center", color=INK, fontsize=8)
    ax.set_yticks(places, [layer.name for layer in found.layers])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3)
    ax.set_xticks([0, 0.5, 1])
    ax.set_xlabel("share of directions that the data determine")
    verdict = "a mode" if found.is_mode else "no mode"
    ax.set_title(f"The network is {verdict}: a Newton step gains {found.decrement:.3g} nats", loc="left")
    if any(free):
        handles = [ax.barh([0], [0.0], color=COLORS[0]), ax.barh([0], [0.0], color=COLORS[2])]
        ax.legend(
            handles, ["scale-free", "with a scale"], frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1)
        )
    return ax


def _is_free(found: Diagnosis, number: int) -> bool:
    names = set(found.layers[number].parameters)
    return any(group.scale_free and names & set(group.parameters) for group in found.groups)
