"""Pictures of decisions draw what the decisions are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lapwing import InputError
from lapwing.decisions import ConformalSets, OODAlarm, risk_coverage
from lapwing.plots import learning_curves, ood_alarm, set_sizes
from lapwing.plots import risk_coverage as drawn_risk_coverage
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, RegressionPrediction

pytest.importorskip("matplotlib")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def curves(ax: Any) -> list[tuple[list[float], list[float]]]:
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in ax.lines]


def classes(seed: int) -> ClassPrediction:
    logits = 2 * torch.randn(1, 200, 4, generator=generator(seed), dtype=torch.float64)
    return ClassPrediction.mixture(logits.log_softmax(2), 1)


LINE = RegressionPrediction(torch.arange(5.0), torch.tensor([1.0, 4.0, 2.0, 2.0, 3.0]), torch.ones(5))


def test_risk_and_coverage_of_a_regression() -> None:
    y = torch.tensor([0.0, 0.0, 3.0, 3.0, 8.0])
    ax: Any = drawn_risk_coverage({"a": LINE, "b": LINE}, y)
    curve = risk_coverage(LINE, y)
    assert curve.coverage.tolist() == pytest.approx([0.2, 0.6, 0.8, 1.0])
    for x, height in curves(ax)[:2]:
        assert x == curve.coverage.tolist()
        assert height == curve.risk.tolist()
    assert ax.get_ylabel() == "squared error among the covered"
    other: Any = drawn_risk_coverage(LINE, y, score="epistemic", risk="nll")
    assert len(curves(other)[0][0]) == 1  # one epistemic variance for all
    assert other.get_ylabel() == "nll among the covered"


def test_alarm() -> None:
    inside, outside = torch.rand(199, generator=generator()), torch.rand(100, generator=generator(1)) + 0.5
    alarm = OODAlarm.calibrated(inside, 0.1)
    ax: Any = ood_alarm(alarm, {"foreign": outside, "same": inside}, bins=12)
    assert len(ax.patches) == 36
    for start, scores in ((0, inside), (12, outside), (24, inside)):
        bars = ax.patches[start : start + 12]
        assert sum(bar.get_height() * bar.get_width() for bar in bars) == pytest.approx(1)
        within = (scores.double() < bars[0].get_x() + bars[0].get_width()).double().mean()
        assert bars[0].get_height() * bars[0].get_width() == pytest.approx(float(within))
    assert curves(ax)[0][0] == [alarm.threshold] * 2
    rate = float((outside > alarm.threshold).double().mean())
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["calibration", f"foreign: {rate:.1%} ring", "same: 9.5% ring"]
    alone: Any = ood_alarm(alarm, outside, ax=ax)
    assert alone is ax
    with pytest.raises(InputError, match="bins"):
        ood_alarm(alarm, outside, bins=0)


def test_sizes_of_sets() -> None:
    calibration, new = classes(0), classes(1)
    y, truth = (torch.multinomial(one.probs, 1, generator=generator(2)).squeeze(1) for one in (calibration, new))
    alphas = (0.05, 0.3, 0.1)
    rules = {
        method: [ConformalSets.calibrated(calibration, y, alpha, method, randomized=randomized) for alpha in alphas]
        for method, randomized in (("threshold", True), ("aps", False))
    }
    ax: Any = set_sizes(rules, new, truth)
    for (x, height), several in zip(curves(ax)[:2], rules.values(), strict=True):
        expected = []
        for rule in several:
            sets = rule.sets(new)
            held = sum(bool(sets[i, truth[i]]) for i in range(200)) / 200
            expected.append((held, float(sets.sum()) / 200))
        expected.sort()
        assert x == pytest.approx([held for held, _ in expected])
        assert height == pytest.approx([size for _, size in expected])
    assert [x[0] for x, _ in curves(ax)[2:]] == pytest.approx([0.7, 0.9, 0.95])
    yes = BinaryPrediction.mixture(torch.randn(1, 50, generator=generator()))
    answers = torch.bernoulli(yes.probs, generator=generator(1))
    two: Any = set_sizes({"yes or no": [ConformalSets.calibrated(yes, answers, 0.2)]}, yes, answers)
    assert curves(two)[0][0][0] >= 0.8
    with pytest.raises(InputError, match="not of a RegressionPrediction"):
        set_sizes(rules, LINE, truth)


def test_learning_curves() -> None:
    runs = torch.tensor([[0.1, 0.5, 0.7], [0.3, 0.7, 0.7]])
    ax: Any = learning_curves([10, 20, 30], {"several": runs, "one": runs[0]}, "accuracy of the test")
    (x, mean), (_, alone) = curves(ax)
    assert x == [10, 20, 30]
    assert mean == pytest.approx([0.2, 0.6, 0.7])
    assert alone == pytest.approx([0.1, 0.5, 0.7])
    assert len(ax.collections) == 1  # a single run has no standard error
    corners = ax.collections[0].get_paths()[0].vertices
    error = math.sqrt(0.02) / math.sqrt(2)  # std of 0.1 and 0.3 over √2
    assert sorted({round(float(y), 6) for at, y in corners if at == 10}) == pytest.approx([0.2 - error, 0.2 + error])
    assert ax.get_ylabel() == "accuracy of the test"
    with pytest.raises(InputError, match="2 numbers of labels against results 'several'"):
        learning_curves([10, 20], {"several": runs})
