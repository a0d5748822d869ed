"""A canvas of each kind beside what the network says of it and how sure it is."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from torch import Tensor

from lapwing.plots.canvas import house_style
from lapwing.predictive.prediction import Prediction

TITLES = ("input", "probability of a digit", "aleatoric entropy", "epistemic entropy")
NAMES = {"mnist": "digits", "kmnist": "Japanese characters", "fashion_mnist": "clothes"}


def draw(shown: dict[str, tuple[Tensor, Prediction]], path: Path) -> None:
    """One row for each kind: its first canvas and three maps; the maps of a column share their scale."""
    with house_style(), matplotlib.rc_context({"svg.hashsalt": "lapwing", "svg.fonttype": "path"}):
        figure, axes = plt.subplots(len(shown), 4, figsize=(8, 2.1 * len(shown)), layout="constrained")
        columns = [[getattr(p, name)[0] for _, p in shown.values()] for name in ("probs", "aleatoric", "epistemic")]
        columns[0] = [probs[1] for probs in columns[0]]
        tops = [1.0, *(max(float(one.max()) for one in column) for column in columns[1:])]
        for row, (name, (image, _)) in enumerate(shown.items()):
            axes[row, 0].imshow((image * 0.25 + 0.47).clamp(0, 1).permute(1, 2, 0))
            axes[row, 0].set_ylabel(NAMES[name])
            for place, (column, top) in enumerate(zip(columns, tops, strict=True), 1):
                picture = axes[row, place].imshow(column[row], vmin=0, vmax=top, cmap="magma")
                if row == len(shown) - 1:
                    figure.colorbar(picture, ax=axes[:, place], location="bottom", shrink=0.8)
        for ax in axes.flat:
            ax.set(xticks=[], yticks=[])
            ax.grid(visible=False)
        for ax, title in zip(axes[0], TITLES, strict=True):
            ax.set_title(title, fontsize="medium")
        figure.savefig(path, metadata={"Date": None}, dpi=60)
        plt.close(figure)
