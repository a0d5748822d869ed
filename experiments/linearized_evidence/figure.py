"""The picture: loss landscapes of a network and of its linearization, and predictive spread against a group's scale."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, jvp

from experiments.linearized_evidence.measure import Setting
from lapwing import Laplace
from lapwing.plots.canvas import COLORS, GRAY, INK, house_style

_ACROSS, _ALONG = np.linspace(-0.5, 1.5, 45), np.linspace(-0.35, 0.3, 45)


def landscapes(setting: Setting, la: Laplace) -> dict[str, Any]:
    """Negative log joint per example of network and linearization on the plane through 0, θ̃ and θ*.

    The first axis goes from θ̃ to θ*, the second along θ̃: a factor of all Bayesian weights.
    """
    assert la.mode_ is not None
    model = copy.deepcopy(setting.model)
    weights = {name: value.detach() for name, value in model.named_parameters() if name in la.mode_.step}
    to_mode = {name: la.mode_.step[name] for name in weights}
    x, y = setting.split.x_train, setting.split.y_train

    def outputs(values: dict[str, Tensor]) -> Tensor:
        found: Tensor = functional_call(model, values, (x,))
        return found

    plain, moves = outputs(weights), [jvp(outputs, (weights,), (step,))[1] for step in (to_mode, weights)]
    precisions, scale = la.posterior.precisions, float(la.posterior.likelihood_scale)

    def loss(f: Tensor, values: dict[str, Tensor]) -> float:
        penalty = sum(float((precisions[name] * value.square()).sum()) for name, value in values.items())
        return (0.5 * penalty - scale * float(la.likelihood.log_prob(f, y).sum())) / len(x)

    network, linear = (np.zeros((len(_ALONG), len(_ACROSS))) for _ in range(2))
    with torch.no_grad():
        for i, b in enumerate(_ALONG):
            for j, a in enumerate(_ACROSS):
                here = {name: weights[name] + a * to_mode[name] + b * weights[name] for name in weights}
                network[i, j] = loss(outputs(here), here)
                linear[i, j] = loss(plain + a * moves[0] + b * moves[1], here)
    return {"network": network, "linear": linear}


def draw(fields: dict[str, Any], scalings: dict[str, Any], path: Path) -> None:
    """Three panels: both landscapes, and the spread against the scale of a group."""
    with house_style(), matplotlib.rc_context({"svg.hashsalt": "lapwing", "svg.fonttype": "path"}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10.5, 3.5), layout="constrained")
        axes = figure.subplots(1, 3)
        low = min(fields["network"].min(), fields["linear"].min())
        levels = low + np.geomspace(0.05, 20, 18)
        titles = {"network": "Loss of the network", "linear": "Loss of its linearization"}
        for ax, (name, title) in zip(axes, titles.items(), strict=False):
            ax.contour(_ACROSS, _ALONG, fields[name], levels=levels, cmap="viridis", linewidths=0.8)
            ax.plot(0, 0, "o", color=COLORS[1], label="θ̃, the network")
            ax.plot(1, 0, "*", color=COLORS[0], markersize=11, label="θ*, the linear model's mode")
            ax.set(title=title, xlabel="from θ̃ toward θ*", ylabel="along θ̃" if name == "network" else "")
        axes[0].legend(loc="upper left", fontsize=7)
        ax = axes[2]
        factors = scalings["factors"]
        base = scalings["shared"]["std"][factors.index(1.0)]
        for color, name, label in ((COLORS[1], "shared", "one shared precision"), (COLORS[0], "separate", "separate")):
            ax.plot(factors, np.array(scalings[name]["std"]) / base, "o-", color=color, label=label)
        ax.axhline(1, color=GRAY, linewidth=0.6, zorder=0)
        ax.set(xscale="log", title="Predictive spread", xlabel="scale k of a scale-free group")
        ax.set_ylabel("mean standard deviation (shared, k = 1: 1)")
        ax.legend(fontsize=7, labelcolor=INK)
        figure.savefig(path, metadata={"Date": None})
