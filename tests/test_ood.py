"""Scores for the unfamiliar, and an alarm whose false alarms are as rare as it says."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from lapwing import InputError
from lapwing.decisions import OODAlarm, coverage_distribution, ood_score, ranks
from lapwing.predictive.counts import CountPrediction
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, RegressionPrediction
from tests.elsewhere import ELSEWHERE, second_device


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.1, 0.29, 0.3, 0.57, 0.7, 0.9, 1 / 3])
def test_ranks_are_exact(alpha: float) -> None:
    """⌈(n + 1)(1 − α)⌉ with α the decimal number that is written."""
    level = Fraction(str(alpha))
    for n in range(1, 200):
        assert ranks.rank(n, alpha) == math.ceil((n + 1) * (1 - level))
        assert (ranks.rank(n, alpha) <= n) == (n >= ranks.fewest(alpha))
    assert ranks.rank(9, 0.7) == 3  # 10·(1 − 0.7) is 3.0000000000000004 in floating point
    assert ranks.rank(99, 0.29) == 71  # and 100·0.29 is 28.999999999999996


def test_levels_are_read_to_12_digits() -> None:
    """1 - 0.9 is 0.09999999999999998 in floating point, at which 9 scores would be too few."""
    assert (ranks.rank(9, 1 - 0.9), ranks.fewest(1 - 0.9)) == (9, 9)
    assert ranks.rank(9, 0.1 - 1e-11) == 10  # that is less than a tenth
    scores = torch.arange(19.0)
    assert OODAlarm.calibrated(scores, 1 - 0.95).threshold == OODAlarm.calibrated(scores, 0.05).threshold
    with pytest.raises(InputError, match="too few for a level of 0.1:"):
        coverage_distribution(8, 1 - 0.9)
    with pytest.raises(InputError, match="between 0 and 1"):
        ranks.rank(9, 1 - 1e-15)


def test_quantile_and_p_values_by_hand() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 2.0]).double()
    assert float(ranks.quantile(scores, 0.2)) == 3  # ⌈5·0.8⌉ = 4th
    assert float(ranks.quantile(scores, 0.4)) == 2
    assert float(ranks.quantile(scores, 0.8)) == 1
    assert math.isinf(float(ranks.quantile(scores, 0.1)))
    found = ranks.p_values(scores, torch.tensor([0.0, 1.0, 2.0, 2.5, 3.0, 4.0]))
    assert found.tolist() == pytest.approx([5 / 5, 5 / 5, 4 / 5, 2 / 5, 2 / 5, 1 / 5])


def test_the_alarm_rings_where_the_p_value_is_at_most_the_rate() -> None:
    """For every n and rate, with ties, at scores on, below and above each calibration score."""
    draw = generator()
    for n, rate in ((19, 0.05), (20, 0.05), (37, 0.1), (9, 0.3), (99, 0.29), (5, 0.9)):
        for scores in (torch.rand(n, generator=draw), torch.randint(4, (n,), generator=draw).float()):
            alarm = OODAlarm.calibrated(scores, rate)
            new = torch.cat([scores, scores + 1e-3, scores - 1e-3, torch.tensor([-9.0, 9.0])])
            assert torch.equal(alarm.rings(new), alarm.p_values(new) <= rate)


def test_false_alarms_are_exactly_as_rare_as_said() -> None:
    """Without ties each rank is equally likely: enumerate which of n + 1 scores is the new one."""
    for n, rate in ((19, 0.05), (30, 0.1), (99, 0.29)):
        scores = torch.randperm(n + 1, generator=generator()).double()
        rung = 0
        for i in range(n + 1):
            others = torch.cat([scores[:i], scores[i + 1 :]])
            rung += int(OODAlarm.calibrated(others, rate).rings(scores[i : i + 1]))
        assert rung == math.floor((n + 1) * Fraction(str(rate)))


def test_with_ties_false_alarms_are_rarer() -> None:
    """Each of 20 scores as the new one, five of each value: as many whole groups ring as the rate has room for."""
    n, scores = 19, (torch.arange(20) // 5).double()
    for rate, expected in ((0.05, 0), (0.2, 0), (0.25, 5), (0.45, 5), (0.5, 10)):
        rung = sum(
            int(OODAlarm.calibrated(torch.cat([scores[:i], scores[i + 1 :]]), rate).rings(scores[i : i + 1]))
            for i in range(n + 1)
        )
        assert rung == expected
        assert rung <= math.floor((n + 1) * Fraction(str(rate)))


def test_answers_are_where_the_scores_are() -> None:
    calibration, new = torch.rand(99, generator=generator()), torch.rand(7, generator=generator(1))
    alarm = OODAlarm.calibrated(calibration, 0.3)
    with second_device():
        other = OODAlarm.calibrated(calibration.to(ELSEWHERE), 0.3)
        for one, scores in ((alarm, new.to(ELSEWHERE)), (other, new)):
            rings, p_values = one.rings(scores), one.p_values(scores)
            assert rings.device == p_values.device == scores.device
            assert torch.equal(rings.cpu(), alarm.rings(new))
            assert torch.equal(p_values.cpu(), alarm.p_values(new))


def test_single_precision() -> None:
    """Scores in float32 are those numbers in float64."""
    calibration, new = torch.rand(99, generator=generator()), torch.rand(50, generator=generator(1))
    found, expected = (OODAlarm.calibrated(scores, 0.1) for scores in (calibration, calibration.double()))
    assert found.threshold == expected.threshold
    assert torch.equal(found.p_values(new), expected.p_values(new.double()))
    assert torch.equal(found.rings(calibration), expected.rings(calibration.double()))


def test_p_values_are_uniform_on_their_grid() -> None:
    scores = torch.randperm(50, generator=generator()).double()
    found = sorted(
        float(ranks.p_values(torch.cat([scores[:i], scores[i + 1 :]]), scores[i : i + 1])) for i in range(50)
    )
    assert found == pytest.approx([(i + 1) / 50 for i in range(50)])


def test_default_scores() -> None:
    logits = torch.randn(4, 6, 3, 2, generator=generator(), dtype=torch.float64)
    classes = ClassPrediction.mixture(logits.log_softmax(2), 1)
    torch.testing.assert_close(ood_score(classes), classes.entropy.mean(1))
    torch.testing.assert_close(ood_score(classes, "mutual_information"), classes.mutual_information.mean(1))
    torch.testing.assert_close(ood_score(classes, "confidence"), (1 - classes.confidence).mean(1))
    answers = BinaryPrediction.mixture(logits[..., 0])
    torch.testing.assert_close(ood_score(answers), answers.entropy.mean(1))
    spread = torch.rand(6, 2, generator=generator(), dtype=torch.float64)
    numbers = RegressionPrediction(spread, 1 - spread, spread)
    torch.testing.assert_close(ood_score(numbers), spread.mean(1))
    counts = CountPrediction.log_normal(spread, spread)
    torch.testing.assert_close(ood_score(counts), spread.mean(1))
    with pytest.raises(
        InputError, match="score of a RegressionPrediction: 'confidence'.*Supported: entropy, epistemic"
    ):
        ood_score(numbers, "confidence")


def test_bad_input() -> None:
    scores = torch.rand(100, generator=generator())
    for rate in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(InputError, match="between 0 and 1"):
            OODAlarm.calibrated(scores, rate)
    with pytest.raises(InputError, match="never ring. 18 calibration scores are too few.*at least 19"):
        OODAlarm.calibrated(scores[:18], 0.05)
    OODAlarm.calibrated(scores[:19], 0.05)
    with pytest.raises(InputError, match="are empty"):
        OODAlarm.calibrated(scores[:0])
    with pytest.raises(InputError, match=r"hold NaN, first at \[1\]"):
        OODAlarm.calibrated(torch.tensor([0.0, math.nan]))
    with pytest.raises(InputError, match=r"must be \[N\].*got \[10, 10\]; see ood_score"):
        OODAlarm.calibrated(scores.reshape(10, 10))
    alarm = OODAlarm.calibrated(scores)
    with pytest.raises(InputError, match="hold NaN"):
        alarm.rings(torch.tensor([math.nan]))
    with pytest.raises(InputError, match="hold NaN"):
        alarm.p_values(torch.tensor([math.nan]))
    with pytest.raises(InputError, match="too few"):
        coverage_distribution(8, 0.1)
