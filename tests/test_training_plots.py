"""The picture of a training shows what its history holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lapwing import InputError
from lapwing.plots import training_history
from lapwing.training import Epoch, Training

pytest.importorskip("matplotlib")

HISTORY = (
    Epoch(0, 2.0, 0.1),
    Epoch(1, 1.5, 0.1, -30.0, {"first": 2.0, "second": torch.tensor([1.0, 4.0])}, 0.5),
    Epoch(2, 1.2, 0.1),
    Epoch(3, 1.1, 0.1, -20.0, {"first": 3.0, "second": torch.tensor([9.0, 4.0])}, 0.4),
)
TRAINING = Training(nn.Linear(1, 1), None, 3, HISTORY, False)


def drawn(ax: Any) -> list[tuple[list[float], list[float]]]:
    """The curves, without the line that marks the best."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines if len(line.get_xdata()) != 2 or
            line.get_xdata()[0] != line.get_xdata()[1]]  # fmt: skip


@pytest.mark.parametrize(("what", "curves"), [
    ("evidence", [([2, 4], [-30.0, -20.0])]),
    ("loss", [([1, 2, 3, 4], [2.0, 1.5, 1.2, 1.1])]),
    ("noise", [([2, 4], [0.5, 0.4])]),
    ("precisions", [([2, 4], [2.0, 3.0]), ([2, 4], [2.0, 6.0])]),
])  # fmt: skip
def test_history(what: str, curves: list[tuple[list[float], list[float]]]) -> None:
    ax: Any = training_history(TRAINING, what)
    found = drawn(ax)
    assert len(found) == len(curves)
    for (x, y), (expected_x, expected_y) in zip(found, curves, strict=True):
        assert x == expected_x
        assert y == pytest.approx(expected_y)
    assert ax.get_yscale() == ("log" if what in ("noise", "precisions") else "linear")
    best = next(line for line in ax.lines if list(line.get_xdata()) == [4, 4])
    assert best.get_linestyle() == "--"
    assert [text.get_text() for text in ax.texts] == (["first", "second"] if what == "precisions" else [])


def test_axes_of_ones_own_and_nothing_to_draw() -> None:
    from matplotlib.figure import Figure

    ax = Figure().add_subplot()
    assert training_history(Training(nn.Linear(1, 1), None, None, HISTORY[:1], True), ax=ax) is ax
    assert drawn(ax) == [([], [])]
    with pytest.raises(InputError, match="Unknown what: 'evidences'. Did you mean 'evidence'"):
        training_history(TRAINING, "evidences")
