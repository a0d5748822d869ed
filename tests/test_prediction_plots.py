"""Pictures of predictions draw what the predictions hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing import InputError
from lapwing.metrics import auroc, expected_calibration_error, reliability
from lapwing.plots import entropy_histogram, inverse_ecdf, regression_bands, reliability_diagram, risk_coverage
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, RegressionPrediction

pytest.importorskip("matplotlib")


def classes(probs: Tensor) -> ClassPrediction:
    return ClassPrediction.mixture(probs.double().log()[None], 1)


def random_classes(n: int, sharpness: float, seed: int = 0) -> ClassPrediction:
    logits = sharpness * torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return classes(logits.softmax(1))


def curves(ax: Any) -> list[tuple[list[float], list[float]]]:
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in ax.lines]


X = torch.tensor([2.0, 0.0, 1.0])
LINE = RegressionPrediction(torch.tensor([4.0, 0.0, 2.0]), torch.tensor([0.0, 3.0, 3.0]), torch.tensor([1.0, 1.0, 1.0]))


def test_bands_are_one_shade_per_standard_deviation() -> None:
    ax: Any = regression_bands(X, LINE, data=(X, LINE.mean + 1), deviations=2)
    wide, narrow = ax.collections[:2]
    for band, k in ((wide, 2), (narrow, 1)):
        corners = band.get_paths()[0].vertices
        for x, mean, std in ((0.0, 0.0, 2.0), (1.0, 2.0, 2.0), (2.0, 4.0, 1.0)):
            found = sorted({float(y) for at, y in corners if at == x})
            assert found == [mean - k * std, mean + k * std]
    assert [band.get_label() for band in ax.collections] == ["± 2 std", "± 1 std", "data"]
    assert curves(ax) == [
        ([0, 1, 2], [0, 2, 4]), ([0, 1, 2], [-1, 1, 3]), ([0, 1, 2], [1, 3, 5]),
    ]  # fmt: skip
    assert sorted(map(tuple, ax.collections[2].get_offsets().tolist())) == [(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]


def test_bands_of_one_of_several_outputs() -> None:
    mean = torch.tensor([[4.0, 7.0], [0.0, 8.0], [2.0, 9.0]])
    both = RegressionPrediction(mean, torch.ones(3, 2), torch.ones(3, 2))
    ax: Any = regression_bands(X[:, None], both, output=1)
    assert curves(ax)[0] == ([0, 1, 2], [8, 9, 7])
    assert len(ax.collections) == 3
    again: Any = regression_bands(X, both, ax=ax)
    assert again is ax


def test_inverse_ecdf() -> None:
    prediction = random_classes(4, 2.0)
    entropy = prediction.entropy.sort().values.tolist()
    ax: Any = inverse_ecdf({"one": prediction, "two": random_classes(7, 0.1)})
    (x, y), (_, other) = curves(ax)
    assert x == pytest.approx([0.0, *entropy])
    assert y == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert len(other) == 8
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "two"]
    alone: Any = inverse_ecdf(prediction)
    assert alone.get_legend() is None


def test_entropy_histogram() -> None:
    low, high = random_classes(200, 6.0), random_classes(100, 0.5, 1)
    ax: Any = entropy_histogram(low, high, bins=10)
    assert len(ax.patches) == 20
    for bars in (ax.patches[:10], ax.patches[10:]):
        assert sum(bar.get_height() * bar.get_width() for bar in bars) == pytest.approx(1)
    first = ax.patches[0]
    expected = (low.entropy < first.get_width()).double().mean() / first.get_width()
    assert first.get_height() == pytest.approx(float(expected))
    assert ax.get_title() == f"AUROC {float(auroc(low.entropy, high.entropy)):.3f}"


def test_reliability_diagram() -> None:
    prediction = random_classes(300, 1.5)
    y = torch.randint(3, (300,), generator=torch.Generator().manual_seed(1))
    ax: Any = reliability_diagram(prediction, y, bins=5)
    found = reliability(prediction.probs, y, 5)
    drawn = {round(bar.get_x() * 5): bar.get_height() for bar in ax.patches}
    assert drawn == {b: pytest.approx(float(found.accuracy[b])) for b in range(5) if found.examples[b] > 0}
    assert f"{float(expected_calibration_error(prediction.probs, y, 5)):.3f}" in ax.get_title()
    assert curves(ax)[0] == ([0, 1], [0, 1])
    assert len(ax.lines) == 1 + len(drawn)


def test_positions_that_are_not_observed_are_left_out() -> None:
    probs = torch.tensor([[[0.9, 0.6], [0.1, 0.4]]])  # [1, 2 classes, 2 positions]
    ax: Any = risk_coverage(classes(probs), torch.tensor([[0, -100]]))
    assert curves(ax)[0] == ([1.0], [0.0])


def test_risk_coverage() -> None:
    probs = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
    ax: Any = risk_coverage(classes(probs), torch.tensor([1, 0, 0, 1]))
    x, y = curves(ax)[0]
    assert x == [0.25, 0.5, 1.0]  # the two of confidence 0.6 come together
    assert y == [0.0, 0.5, 0.5]
    yes = BinaryPrediction.mixture(torch.tensor([[3.0, -1.0]]))
    both: Any = risk_coverage({"a": yes, "b": yes}, torch.tensor([1, 1]))
    assert curves(both)[0] == ([0.5, 1.0], [0.0, 0.5])
    assert len(both.get_legend().get_texts()) == 2


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(InputError, match="one of class predictions"):
        inverse_ecdf(LINE)
    with pytest.raises(InputError, match="one of class predictions"):
        reliability_diagram(LINE, torch.zeros(3))
    with pytest.raises(InputError, match="draws regressions"):
        regression_bands(X, random_classes(3, 1.0))
    with pytest.raises(InputError, match="one number per input"):
        regression_bands(torch.zeros(3, 2), LINE)
    with pytest.raises(InputError, match="deviations"):
        regression_bands(X, LINE, deviations=0)
