"""How prior precisions came to be what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lapwing.errors import InputError
from lapwing.plots.canvas import COLORS, GRAY, canvas
from lapwing.tuning import Tuning

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELED = 12  # lines up to which a legend helps


def tuning(done: Tuning, ax: Axes | None = None) -> Axes:
    """A line per precision over the rounds of `tune_prior(method="linear-evidence")`, on a logarithmic scale.

    A group with one precision per input has a line for each. The noise of a regression is dashed. The log-evidence runs
    along on a second axis, in gray; the title says how it ended.
    """
    if not done.rounds:
        raise InputError(
            f"tune_prior(method={done.method!r}) keeps no rounds; those of method='linear-evidence' can be drawn."
        )
    ax = canvas(ax)
    rounds = list(range(len(done.rounds)))
    for number, label in enumerate(done.rounds[0].precisions):
        values = torch.stack([torch.as_tensor(one.precisions[label]).double().flatten() for one in done.rounds])
        color = COLORS[number % len(COLORS)]
        lines = ax.plot(rounds, values.cpu().numpy(), color=color, marker="o", markersize=3)
        lines[0].set_label(label)
    noises = [one.noise for one in done.rounds if one.noise is not None]
    if noises:
        ax.plot(rounds, noises, "--", color=GRAY, label="noise variance")
    evidence = ax.twinx()
    evidence.plot(rounds, [one.value for one in done.rounds], color=GRAY, alpha=0.6, linewidth=2.5, zorder=0)
    evidence.set_ylabel("log-evidence", color=GRAY)
    evidence.tick_params(axis="y", colors=GRAY)
    evidence.spines[["top", "right"]].set_visible(False)
    ax.set_yscale("log")
    ax.set_xticks(rounds if len(rounds) <= _LABELED else rounds[:: len(rounds) // _LABELED + 1])
    ax.set(xlabel="round", ylabel="prior precision")
    ended = "" if done.converged else ", not converged"
    ax.set_title(f"Log-evidence {done.rounds[0].value:.5g} → {done.rounds[-1].value:.5g}{ended}", loc="left")
    if len(done.rounds[0].precisions) <= _LABELED:
        ax.legend(frameon=False, fontsize=8)
    return ax
