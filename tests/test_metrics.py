"""Metrics against values computed by hand and by scikit-learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.metrics import accuracy, auroc, expected_calibration_error, negative_log_likelihood, reliability

PROBS = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.35, 0.65], [0.4, 0.6]], dtype=torch.float64)
TARGETS = torch.tensor([0, 1, 1, 1])


def test_accuracy_by_hand():
    assert accuracy(PROBS, TARGETS).item() == 0.75


def test_negative_log_likelihood_by_hand():
    expected = -(math.log(0.9) + math.log(0.2) + math.log(0.65) + math.log(0.6)) / 4
    assert negative_log_likelihood(PROBS, TARGETS).item() == pytest.approx(expected, rel=1e-12)


def test_negative_log_likelihood_of_an_impossible_target_is_infinite():
    assert negative_log_likelihood(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).item() == math.inf


def test_calibration_error_by_hand():
    # Two bins above one half: (0.5, 0.75] holds 0.65 and 0.6, both right; (0.75, 1] holds 0.9 right, 0.8 wrong.
    expected = 0.5 * abs(1 - 0.625) + 0.5 * abs(0.5 - 0.85)
    assert expected_calibration_error(PROBS, TARGETS, bins=4).item() == pytest.approx(expected, rel=1e-12)


def test_reliability_by_hand():
    found = reliability(PROBS, TARGETS, bins=4)
    assert found.examples.tolist() == [0, 0, 2, 2]
    torch.testing.assert_close(found.confidence[2:], torch.tensor([0.625, 0.85], dtype=torch.float64))
    torch.testing.assert_close(found.accuracy[2:], torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert found.confidence[:2].isnan().all()
    assert found.accuracy[:2].isnan().all()


def test_bins_are_closed_on_the_right():
    probs = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    assert reliability(probs, torch.tensor([0, 0]), bins=2).examples.tolist() == [1, 1]


def test_one_bin_compares_mean_confidence_with_accuracy():
    expected = abs(0.75 - (0.9 + 0.8 + 0.65 + 0.6) / 4)
    assert expected_calibration_error(PROBS, TARGETS, bins=1).item() == pytest.approx(expected, rel=1e-12)


def test_perfect_predictions_are_calibrated():
    probs = torch.eye(3)
    assert expected_calibration_error(probs, torch.arange(3)).item() == 0
    assert negative_log_likelihood(probs, torch.arange(3)).item() == 0


@pytest.mark.parametrize(
    ("negatives", "positives", "expected"),
    [
        ([0.0, 1.0], [2.0, 3.0], 1.0),
        ([2.0, 3.0], [0.0], 0.0),
        ([1.0, 1.0], [1.0], 0.5),
        ([1.0, 2.0], [2.0, 4.0], 0.875),
    ],
)
def test_auroc_by_hand(negatives: list[float], positives: list[float], expected: float):
    assert auroc(torch.tensor(negatives), torch.tensor(positives)).item() == expected


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_auroc_matches_scikit_learn_ties_included(decimals: int):
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(decimals)
    negatives = torch.randn(300, generator=generator).round(decimals=decimals)
    positives = (torch.randn(200, generator=generator) + 0.7).round(decimals=decimals)
    expected = metrics.roc_auc_score([0] * 300 + [1] * 200, torch.cat([negatives, positives]).numpy())
    assert auroc(negatives, positives).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("probs", "targets"),
    [
        (torch.ones(3, 2) / 2, torch.zeros(2, dtype=torch.long)),
        (torch.ones(3) / 3, torch.zeros(3, dtype=torch.long)),
        (torch.ones(0, 2), torch.zeros(0, dtype=torch.long)),
        (torch.full((1, 2), math.nan), torch.zeros(1, dtype=torch.long)),
    ],
)
def test_wrong_input_is_refused(probs: Tensor, targets: Tensor):
    for metric in (accuracy, negative_log_likelihood, expected_calibration_error):
        with pytest.raises(InputError):
            metric(probs, targets)


def test_auroc_refuses_empty_and_nan():
    with pytest.raises(InputError, match="positives of shape"):
        auroc(torch.zeros(2), torch.zeros(0))
    with pytest.raises(InputError, match="negatives hold NaN"):
        auroc(torch.tensor([math.nan]), torch.zeros(1))
