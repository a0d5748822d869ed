"""Conformal sets and intervals: by hand on a few numbers, and their coverage against its exact distribution."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing import InputError
from lapwing.decisions import ConformalIntervals, ConformalSets, coverage_distribution
from lapwing.predictive.counts import CountPrediction
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, RegressionPrediction


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(probs: Any) -> ClassPrediction:
    return ClassPrediction.mixture(torch.as_tensor(probs, dtype=torch.float64).log()[None], 1)


def numbers(mean: Any, std: Any) -> RegressionPrediction:
    mean, std = (torch.as_tensor(value, dtype=torch.float64) for value in (mean, std))
    return RegressionPrediction(mean, std.square(), torch.zeros_like(std))


def some_classes(n: int, draw: torch.Generator, skew: float = 1.0) -> tuple[ClassPrediction, Tensor]:
    """Probabilities `[n, 4]`, and labels from others: the network is wrong, which the guarantee does not mind."""
    logits = 2 * torch.randn(n, 4, generator=draw, dtype=torch.float64)
    y = torch.multinomial((skew * logits).softmax(1), 1, generator=draw).squeeze(1)
    return classes(logits.softmax(1)), y


THREE = classes([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.3, 0.6], [0.25, 0.35, 0.4]])
LABELS = torch.tensor([0, 1, 2, 0])


def test_thresholds_by_hand() -> None:
    """Scores 1 − p_y: 0.3, 0.6, 0.4, 0.75. At α = 0.4 the ⌈5·0.6⌉ = 3rd, so classes with p ≥ 0.4."""
    found = ConformalSets.calibrated(THREE, LABELS, 0.4)
    assert float(found.quantile) == pytest.approx(0.6)
    new = classes([[0.39, 0.3, 0.31], [0.41, 0.18, 0.41], [0.9, 0.05, 0.05]])
    assert found.sets(new).tolist() == [[False] * 3, [True, False, True], [True, False, False]]
    widest = ConformalSets.calibrated(THREE, LABELS, 0.2)
    assert float(widest.quantile) == pytest.approx(0.75)
    assert found.examples == 4


def test_adaptive_sets_by_hand() -> None:
    """Without randomization, mass up to and with y in decreasing order: 0.7, 0.9, 0.6, 1.0."""
    found = ConformalSets.calibrated(THREE, LABELS, 0.4, "aps", randomized=False)
    assert float(found.quantile) == pytest.approx(0.9)
    new = classes([[0.6, 0.28, 0.12], [0.05, 0.03, 0.92], [0.3, 0.32, 0.38]])
    assert found.sets(new).tolist() == [[True, True, False], [False] * 3, [False, True, True]]
    # RAPS: + 0.5·max(0, rank − 1): 0.7, 0.9 + 0.5, 0.6, 1.0 + 1.
    regular = ConformalSets.calibrated(THREE, LABELS, 0.4, "aps", randomized=False, penalty=0.5, free=1)
    assert float(regular.quantile) == pytest.approx(1.4)
    torch.testing.assert_close(
        regular.scores(torch.tensor([[0.2, 0.5, 0.3]]).double().log()), torch.tensor([[2.0, 0.5, 1.3]]).double()
    )


def test_randomized_scores_are_uniform_under_the_predicted_probabilities() -> None:
    """`F(before y) + u·p_y` with y ~ p: the probability integral transform, at every p."""
    n = 40_000
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).double().log().expand(n, -1)
    rule = ConformalSets(torch.tensor(1.0), 0.1, 1, 4, "aps")
    y = torch.multinomial(log_probs.exp(), 1, generator=generator())
    drawn = rule.scores(log_probs, generator(1)).gather(1, y).squeeze(1).sort().values
    gap = (drawn - torch.arange(1, n + 1, dtype=torch.float64) / n).abs().max()
    assert float(gap) < 1.95 / math.sqrt(n)  # Kolmogorov–Smirnov at a level of 0.001


def covered(sets: Tensor, y: Tensor) -> Tensor:
    return sets.gather(1, y.unsqueeze(1)).squeeze(1).double()


@pytest.mark.parametrize("method", ["threshold", "aps"])
@pytest.mark.parametrize(("n", "alpha"), [(19, 0.1), (30, 0.25)])
def test_coverage_of_sets(method: str, n: int, alpha: float) -> None:
    """Over 1,500 calibration sets the coverage has mean k/(n + 1), between its bounds, and the variance of the Beta."""
    draw, tests, repetitions = generator(), 40, 1500
    prediction, y = some_classes(n * repetitions, draw, 0.5)
    new, truth = some_classes(tests * repetitions, draw, 0.5)
    logs, fresh = prediction.log_probs.reshape(repetitions, n, 4), new.log_probs.reshape(repetitions, tests, 4)
    coverage = []
    for i in range(repetitions):
        rule = ConformalSets.calibrated(classes(logs[i].exp()), y[i * n : (i + 1) * n], alpha, method, generator=draw)
        sets = rule.sets(classes(fresh[i].exp()), draw)
        coverage.append(covered(sets, truth[i * tests : (i + 1) * tests]).mean())
    check_beta(torch.stack(coverage), n, alpha, tests)


def check_beta(coverage: Tensor, n: int, alpha: float, tests: int) -> None:
    """Mean and variance of a fraction of `tests` whose probability is Beta(k, n + 1 − k), within 4 standard errors."""
    exact = coverage_distribution(n, alpha)
    mean, spread = float(exact.mean), float(exact.variance)
    assert 1 - alpha <= mean + 1e-12
    assert mean <= 1 - alpha + 1 / (n + 1) + 1e-12
    variance = spread + (mean * (1 - mean) - spread) / tests  # of the Beta, and of counting
    assert float(coverage.mean()) == pytest.approx(mean, abs=4 * math.sqrt(variance / len(coverage)))
    # The variance of a sample variance, by its fourth moment.
    squares = (coverage - coverage.mean()).square()
    assert float(squares.mean()) == pytest.approx(variance, abs=4 * float(squares.std()) / math.sqrt(len(coverage)))


@pytest.mark.parametrize("method", ["normalized", "absolute", "quantile"])
def test_coverage_of_intervals(method: str) -> None:
    """Heavy tails and a wrong std: coverage is as it should be."""
    draw, n, alpha, tests, repetitions = generator(), 19, 0.1, 40, 1500

    def data(count: int) -> tuple[RegressionPrediction, Tensor]:
        mean, std = torch.randn(count, generator=draw).double(), torch.rand(count, generator=draw).double() + 0.1
        noise = torch.randn(count, generator=draw).double() / torch.rand(count, generator=draw).double()
        return numbers(mean, std), mean + 0.3 * std.square() * noise

    coverage = []
    for _ in range(repetitions):
        rule = ConformalIntervals.calibrated(*data(n), alpha, method)
        new, truth = data(tests)
        low, high = rule.interval(new)
        coverage.append(((low <= truth) & (truth <= high)).double().mean())
    check_beta(torch.stack(coverage), n, alpha, tests)


def test_coverage_within_every_class() -> None:
    """A network that never believes in class 3: marginal sets leave it out, Mondrian ones do not."""
    draw = generator()
    prediction, y = some_classes(4000, draw, 0.2)
    biased = classes((prediction.log_probs + torch.tensor([0.0, 0.0, 0.0, -3.0]).double()).softmax(1))
    new, truth = some_classes(20_000, draw, 0.2)
    foreign = classes((new.log_probs + torch.tensor([0.0, 0.0, 0.0, -3.0]).double()).softmax(1))
    for by_class in (False, True):
        rule = ConformalSets.calibrated(biased, y, 0.1, "aps", by_class=by_class, generator=draw)
        found = covered(rule.sets(foreign, draw), truth)
        each = [float(found[truth == label].mean()) for label in range(4)]
        assert (max(abs(value - 0.9) for value in each) < 0.04) == by_class


def test_a_class_too_rare_to_calibrate_is_in_every_set() -> None:
    prediction, y = some_classes(60, generator())
    y = y.clamp(max=2)  # class 3 never seen
    rule = ConformalSets.calibrated(prediction, y, 0.1, by_class=True)
    assert rule.quantile.isinf().tolist() == [False, False, False, True]
    assert bool(rule.sets(prediction)[:, 3].all())
    with pytest.raises(InputError, match=r"hold every class. \d calibration scores are too few.*at least 9"):
        ConformalSets.calibrated(classes(prediction.probs[:8]), y[:8], 0.1, by_class=True)


@pytest.mark.parametrize("shape", [(300,), (300, 1)])
def test_one_yes_or_no(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, generator=generator(), dtype=torch.float64)
    y = torch.bernoulli(logits.sigmoid(), generator=generator(1)).long()
    rule = ConformalSets.calibrated(BinaryPrediction.mixture(logits[None]), y, 0.1)
    two = classes(torch.stack([(-logits).sigmoid().flatten(), logits.sigmoid().flatten()], 1))
    same = ConformalSets.calibrated(two, y.flatten(), 0.1)
    torch.testing.assert_close(rule.quantile, same.quantile)
    sets = rule.sets(BinaryPrediction.mixture(logits[None]))
    assert torch.equal(sets, same.sets(two))
    assert sets.shape == (300, 2)


def test_intervals_by_hand() -> None:
    """|y − m|/s: 1, 2, 0.5, 3; at α = 0.4 the 3rd."""
    calibration, y = numbers([0.0, 1.0, 2.0, 3.0], [1.0, 0.5, 2.0, 1.0]), torch.tensor([1.0, 0.0, 3.0, 6.0])
    rule = ConformalIntervals.calibrated(calibration, y, 0.4)
    assert float(rule.quantile) == 2
    low, high = rule.interval(numbers([10.0], [3.0]))
    assert (float(low), float(high)) == (4.0, 16.0)
    flat = ConformalIntervals.calibrated(calibration, y, 0.4, "absolute")  # 1, 1, 1, 3
    assert [float(side) for side in flat.interval(numbers([10.0], [3.0]))] == [9.0, 11.0]
    quantiles = ConformalIntervals.calibrated(calibration, y, 0.4, "quantile")
    width = math.sqrt(2) * float(torch.erfinv(torch.tensor(0.6, dtype=torch.float64)))
    scores = sorted([1 - width, 1 - 0.5 * width, 1 - 2 * width, 3 - width])
    assert float(quantiles.quantile) == pytest.approx(scores[2], rel=1e-12)
    low, high = quantiles.interval(numbers([10.0], [3.0]))
    assert float(high) == pytest.approx(10 + 3 * width + scores[2])
    assert float(low) == pytest.approx(10 - 3 * width - scores[2])


def test_several_outputs_each_by_itself_or_all_at_once() -> None:
    draw = generator()

    def data(n: int) -> tuple[RegressionPrediction, Tensor]:
        mean = torch.randn(n, 3, generator=draw, dtype=torch.float64)
        std = torch.tensor([1.0, 10.0, 0.1]).double().expand(n, 3)
        return numbers(mean, std), mean + std * torch.randn(n, 3, generator=draw, dtype=torch.float64)

    (prediction, y), (new, truth) = data(999), data(100_000)
    own = ConformalIntervals.calibrated(prediction, y, 0.2)
    assert own.quantile.shape == (3,)
    for k in range(3):
        alone = ConformalIntervals.calibrated(numbers(prediction.mean[:, k], prediction.std[:, k]), y[:, k], 0.2)
        assert float(own.quantile[k]) == float(alone.quantile)
    low, high = own.interval(new)
    inside = (low <= truth) & (truth <= high)
    # 4 deviations: of a probability c ~ Beta(800, 200), and of counting 100,000 cases; of three outputs at once c₁c₂c₃
    # with independent c, whose second moment is E[c²]³.
    mean, spread = 0.8, float(coverage_distribution(999, 0.2).variance)
    one = 4 * math.sqrt(spread + mean * (1 - mean) / 100_000)
    three = 4 * math.sqrt((mean**2 + spread) ** 3 - mean**6 + mean**3 * (1 - mean**3) / 100_000)
    assert inside.double().mean(0).tolist() == pytest.approx([mean] * 3, abs=one)
    assert float(inside.all(1).double().mean()) == pytest.approx(mean**3, abs=three)
    all_of_them = ConformalIntervals.calibrated(prediction, y, 0.2, simultaneous=True)
    assert all_of_them.quantile.dim() == 0
    low, high = all_of_them.interval(new)
    assert float(((low <= truth) & (truth <= high)).all(1).double().mean()) == pytest.approx(mean, abs=one)
    worst = ((y - prediction.mean).abs() / prediction.std).amax(1).sort().values
    assert float(all_of_them.quantile) == float(worst[799])


def test_single_precision() -> None:
    """Predictions in float32 are those numbers in float64, and cover as many of the calibration examples."""
    mean, std = torch.randn(2, 99, generator=generator())
    y = mean + std * torch.randn(99, generator=generator(1))
    single = RegressionPrediction(mean, std.square(), torch.zeros(99))
    double = RegressionPrediction(mean.double(), std.square().double(), torch.zeros(99).double())
    for method in ("absolute", "normalized", "quantile"):
        found, expected = (ConformalIntervals.calibrated(one, y, 0.2, method) for one in (single, double))
        # √ and the sum mean ± width are rounded in float32, relative to numbers below 10.
        torch.testing.assert_close(found.quantile, expected.quantile, rtol=1e-6, atol=1e-6)
        low, high = found.interval(single)
        assert low.dtype == torch.float64
        assert int(((low <= y) & (y <= high)).sum()) == 80  # ⌈100·0.8⌉ of the calibration examples themselves
    logits = torch.randn(1, 99, 4, generator=generator())
    labels = torch.randint(4, (99,), generator=generator(1))
    for method in ("aps", "threshold"):
        rule = ConformalSets.calibrated(ClassPrediction.mixture(logits, 1), labels, 0.2, method, generator=generator())
        sets = rule.sets(ClassPrediction.mixture(logits, 1), generator())
        assert int(covered(sets, labels).sum()) == 80


@pytest.mark.parametrize("method", ["absolute", "normalized", "quantile"])
@pytest.mark.parametrize(
    ("calibrated", "asked", "simultaneous"), [((), (3,), False), ((2,), (300,), True), ((2, 3), (6,), True)]
)
def test_intervals_of_other_outputs_are_refused(
    method: str, calibrated: tuple[int, ...], asked: tuple[int, ...], simultaneous: bool
) -> None:
    calibration = numbers(torch.zeros(20, *calibrated), torch.ones(20, *calibrated))
    y = torch.randn(20, *calibrated, generator=generator(), dtype=torch.float64)
    rule = ConformalIntervals.calibrated(calibration, y, 0.1, method, simultaneous=simultaneous)
    assert rule.interval(numbers(torch.zeros(4, *calibrated), torch.ones(4, *calibrated)))[0].shape == (4, *calibrated)
    with pytest.raises(InputError, match=rf"outputs of shape {re.escape(str(list(calibrated)))}, got "):
        rule.interval(numbers(torch.zeros(4, *asked), torch.ones(4, *asked)))


def test_a_tenth_by_subtraction() -> None:
    """9 examples are enough for α = 0.1, also if that is written 1 - 0.9."""
    line, y = numbers([0.0] * 9, [1.0] * 9), torch.arange(9.0)
    assert float(ConformalIntervals.calibrated(line, y, 1 - 0.9).quantile) == 8


def test_counts() -> None:
    """Whole numbers have ties, so the lower bound alone."""
    log_rates = torch.randn(1, 2000, generator=generator(), dtype=torch.float64)
    prediction = CountPrediction.mixture(log_rates)
    y = torch.poisson(log_rates[0].exp(), generator=generator(1))
    rule = ConformalIntervals.calibrated(prediction, y, 0.1, "quantile")
    low, high = rule.interval(prediction)
    assert float(((low <= y) & (y <= high)).double().mean()) >= 0.9


def test_the_beta_distribution() -> None:
    exact = coverage_distribution(9, 0.1)
    assert (float(exact.concentration1), float(exact.concentration0)) == (9, 1)
    assert float(coverage_distribution(99, 0.29).mean) == pytest.approx(0.71, rel=1e-14)


def test_bad_input() -> None:
    line, y = numbers([0.0] * 20, [1.0] * 20), torch.zeros(20)
    for alpha in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(InputError, match="between 0 and 1"):
            ConformalSets.calibrated(THREE, LABELS, alpha)
        with pytest.raises(InputError, match="between 0 and 1"):
            ConformalIntervals.calibrated(line, y, alpha)
    with pytest.raises(InputError, match="hold every class. 4 calibration scores are too few.*at least 9.*1/5"):
        ConformalSets.calibrated(THREE, LABELS, 0.1)
    with pytest.raises(InputError, match="would be infinite. 20 calibration scores.*at least 99"):
        ConformalIntervals.calibrated(line, y, 0.01)
    with pytest.raises(InputError, match="no calibration example"):
        ConformalSets.calibrated(THREE, torch.full((4,), -100), 0.1)
    with pytest.raises(InputError, match="no calibration example"):
        ConformalIntervals.calibrated(numbers([], []), torch.zeros(0), 0.1)
    with pytest.raises(InputError, match=r"Class indices of shape \[4\]"):
        ConformalSets.calibrated(THREE, LABELS[:3], 0.4)
    with pytest.raises(InputError, match=r"targets of shape \[20, 1\]"):
        ConformalIntervals.calibrated(line, y[:, None], 0.1)
    with pytest.raises(InputError, match="targets hold NaN"):
        ConformalIntervals.calibrated(line, y * math.nan, 0.1)
    with pytest.raises(InputError, match="probabilities hold NaN"):
        ConformalSets.calibrated(classes([[math.nan, 1.0]] * 9), torch.zeros(9, dtype=torch.long), 0.1)
    with pytest.raises(InputError, match="means hold NaN"):
        ConformalIntervals.calibrated(numbers([math.nan] * 20, [1.0] * 20), y)
    unsure = numbers([0.0] * 3, [math.nan] * 3)
    with pytest.raises(InputError, match="intervals hold NaN"):
        ConformalIntervals.calibrated(line, y, method="quantile").interval(unsure)
    rates = CountPrediction.mixture(torch.zeros(1, 20))
    for method in ("absolute", "normalized", "quantile"):
        with pytest.raises(InputError, match="means hold NaN"):
            ConformalIntervals.calibrated(line, y, method=method).interval(numbers([math.nan], [1.0]))
        with pytest.raises(InputError, match="means hold NaN"):
            ConformalIntervals.calibrated(rates, y, method=method).interval(
                CountPrediction.mixture(torch.full((1, 2), math.nan))
            )
    with pytest.raises(InputError, match="one is 0 or NaN. Use method='absolute'"):
        ConformalIntervals.calibrated(numbers([0.0] * 20, [0.0] * 20), y)
    with pytest.raises(InputError, match="method of conformal sets: 'lac'"):
        ConformalSets.calibrated(THREE, LABELS, 0.4, "lac")
    with pytest.raises(InputError, match="method of conformal intervals"):
        ConformalIntervals.calibrated(line, y, 0.1, "cqr")
    options: list[dict[str, Any]] = [{"penalty": 1.0}, {"free": 3}, {"randomized": False}]
    for option in options:
        with pytest.raises(InputError, match="penalty, free and randomized=False belong to method='aps'"):
            ConformalSets.calibrated(THREE, LABELS, 0.4, **option)
    with pytest.raises(InputError, match="not be negative"):
        ConformalSets.calibrated(THREE, LABELS, 0.4, "aps", penalty=-1.0)
    with pytest.raises(InputError, match=r"one decision per example.*\[1, 2, 2\].*not exchangeable"):
        ConformalSets.calibrated(classes([[[0.5, 0.5], [0.5, 0.5]]]), torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(InputError, match="Calibrate each output by itself"):
        ConformalSets.calibrated(BinaryPrediction.mixture(torch.zeros(1, 3, 2)), torch.zeros(3, 2))
    with pytest.raises(InputError, match="use ConformalIntervals"):
        ConformalSets.calibrated(line, LABELS)
    with pytest.raises(InputError, match="for classes use ConformalSets"):
        ConformalIntervals.calibrated(THREE, LABELS)
    for by_class in (False, True):
        rule = ConformalSets.calibrated(THREE, LABELS, 0.4, by_class=by_class)
        with pytest.raises(InputError, match="Calibrated for 3 classes, got 2"):
            rule.sets(classes([[0.5, 0.5]]))
        with pytest.raises(InputError, match="Calibrated for 3 classes, got 2"):
            rule.sets(BinaryPrediction.mixture(torch.zeros(1, 5)))
    both = ConformalIntervals.calibrated(numbers(torch.zeros(20, 2), torch.ones(20, 2)), torch.zeros(20, 2))
    with pytest.raises(InputError, match=r"outputs of shape \[2\], got \[3\]"):
        both.interval(numbers(torch.zeros(4, 3), torch.ones(4, 3)))
