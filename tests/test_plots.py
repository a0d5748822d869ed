"""What is drawn, read back from the axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lapwing import InputError, Laplace, plots
from lapwing.diagnostics import diagnose
from lapwing.plots.canvas import COLORS, canvas
from tests import networks

pytest.importorskip("matplotlib")


def fitted(name="batchnorm"):
    data = [(networks.inputs(name, 12), networks.targets("regression", 12))]
    return Laplace(networks.make(name), "regression", "full", progress=False).fit(data), data


def widths(ax, start, count):
    return [bar.get_width() for bar in ax.patches[start : start + count]]


def ys(line: Any):
    return list(line.get_ydata())


@pytest.mark.parametrize("name", ["batchnorm", "mlp"])
def test_diagnosis_has_a_bar_per_layer(name):
    found = diagnose(fitted(name)[0])
    count = len(found.layers)
    ax = plots.diagnosis(found)
    assert widths(ax, 0, count) == [1.0] * count
    assert widths(ax, count, count) == [layer.effective_dimension / layer.size for layer in found.layers]
    assert [label.get_text() for label in ax.get_yticklabels()] == [layer.name for layer in found.layers]
    assert [text.get_text() for text in ax.texts] == [
        f"{x.effective_dimension:.3g} of {x.size:,}" for x in found.layers
    ]
    assert ax.yaxis_inverted()
    assert f"{found.decrement:.3g} nats" in ax.get_title(loc="left")
    assert ("no mode" in ax.get_title(loc="left")) == (not found.is_mode)
    assert (ax.get_legend() is not None) == (name == "batchnorm")


def test_diagnosis_colors_scale_free_layers():
    from matplotlib.colors import to_hex

    ax = plots.diagnosis(diagnose(fitted()[0]))
    colors = [to_hex(bar.get_facecolor()) for bar in ax.patches[3:6]]
    assert colors == [COLORS[0], COLORS[2], COLORS[2]]  # linear is behind a batch norm; the norm and the head are not


@pytest.mark.filterwarnings("ignore::lapwing.TuningWarning")
@pytest.mark.parametrize("groups", ["auto", "input"])
def test_tuning_has_a_line_per_precision(groups):
    la, data = fitted()
    done = la.tune_prior(method="linear-evidence", groups=groups, loader=data, max_rounds=2, tolerance=0.5).tuning_
    assert done is not None
    ax = plots.tuning(done)
    columns = [
        torch.stack([torch.as_tensor(one.precisions[label]).flatten() for one in done.rounds])
        for label in done.rounds[0].precisions
    ]
    expected = torch.cat([column.reshape(len(done.rounds), -1).double() for column in columns], 1).T
    assert len(ax.lines) == len(expected) + 1 == {"auto": 2, "input": 4}[groups] + 1
    for line, values in zip(ax.lines, expected, strict=False):
        assert ys(line) == pytest.approx(values.tolist())
    assert ys(ax.lines[-1]) == [one.noise for one in done.rounds]
    assert ax.get_yscale() == "log"
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [*done.rounds[0].precisions, "noise variance"]
    (twin,) = [other for other in ax.figure.axes if other is not ax]
    assert ys(twin.lines[0]) == [one.value for one in done.rounds]
    assert ("not converged" in ax.get_title(loc="left")) == (not done.converged)


def test_given_axes_are_drawn_on():
    ax = canvas()
    la, data = fitted("mlp")
    assert plots.diagnosis(diagnose(la), ax) is ax
    other = canvas()
    done = la.tune_prior(method="linear-evidence", loader=data, noise=False, tolerance=0.9).tuning_
    assert done is not None
    assert plots.tuning(done, other) is other
    assert len(other.lines) == 1


def test_other_tunings_have_no_rounds():
    la = Laplace(nn.Linear(2, 1), "regression", progress=False).fit([(torch.randn(5, 2), torch.randn(5, 1))])
    la.tune_prior()
    assert la.tuning_ is not None
    with pytest.raises(InputError, match="linear-evidence"):
        plots.tuning(la.tuning_)
