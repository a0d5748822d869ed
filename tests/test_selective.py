"""Scores and selective prediction: against every threshold by brute force, all orders of ties, and closed forms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing import Bernoulli, Categorical, CustomLikelihood, InputError, Laplace
from lapwing.decisions import RiskCoverage, reject, risk_coverage, score
from lapwing.predictive.counts import CountPrediction
from lapwing.predictive.mixture_of_outputs import OutputMixture
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction
from tests import networks
from tests.elsewhere import ELSEWHERE, second_device


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(samples: int = 3, *output: int) -> ClassPrediction:
    logits = torch.randn(samples, 40, 4, *output, generator=generator(1), dtype=torch.float64)
    return ClassPrediction.mixture(logits.log_softmax(2), 1)


def numbers(*output: int) -> RegressionPrediction:
    draw = generator(2)
    mean, noise, known = (torch.randn(40, *output, generator=draw, dtype=torch.float64) for _ in range(3))
    return RegressionPrediction(mean, noise.square() + 0.1, known.square())


def area_in_order(losses: list[float]) -> float:
    """The mean of the running means."""
    return sum(sum(losses[:i]) / i for i in range(1, len(losses) + 1)) / len(losses)


def test_every_threshold_by_brute_force() -> None:
    draw = generator()
    scores = torch.randint(6, (30,), generator=draw).double() / 7  # many ties
    losses = torch.rand(30, generator=draw, dtype=torch.float64)
    found = RiskCoverage.of(scores, losses)
    assert found.thresholds.tolist() == sorted(set(scores.tolist()))
    for threshold, coverage, risk in zip(found.thresholds, found.coverage, found.risk, strict=True):
        taken = scores <= threshold
        assert float(coverage) == pytest.approx(float(taken.double().mean()), rel=1e-14)
        assert float(risk) == pytest.approx(float(losses[taken].mean()), rel=1e-13)
    assert float(found.coverage[-1]) == 1
    for wanted in (0.1, 0.31, 0.5, 1.0):
        threshold = found.threshold_for(coverage=wanted)
        smaller = found.thresholds[found.thresholds < threshold]
        assert float((scores <= threshold).double().mean()) >= wanted
        assert all(float((scores <= other).double().mean()) < wanted for other in smaller)
    for allowed in (float(found.risk.min()), float(found.risk.median()), 1.0):
        threshold = found.threshold_for(risk=allowed)
        larger = found.thresholds[found.thresholds > threshold]
        assert float(losses[scores <= threshold].mean()) <= allowed + 1e-14
        assert all(float(losses[scores <= other].mean()) > allowed for other in larger)


def test_the_area_is_the_mean_over_all_orders_of_ties() -> None:
    """Every order of every tie, written out; the order of the input does not matter."""
    scores = [0.2, 0.5, 0.2, 0.5, 0.9, 0.5]
    losses = [0.0, 3.0, 1.0, 0.5, 2.0, 0.0]
    ties = [[loss for s, loss in zip(scores, losses, strict=True) if s == value] for value in (0.2, 0.5, 0.9)]
    orders = itertools.product(*(itertools.permutations(tie) for tie in ties))
    areas = [area_in_order([loss for tie in order for loss in tie]) for order in orders]
    assert len(areas) == 2 * 6
    expected, oracle = sum(areas) / len(areas), area_in_order(sorted(losses))
    for seed in range(5):
        order = torch.randperm(6, generator=generator(seed))
        found = RiskCoverage.of(torch.tensor(scores)[order], torch.tensor(losses)[order])
        assert found.area == pytest.approx(expected, rel=1e-14)
        assert found.oracle_area == pytest.approx(oracle, rel=1e-14)
        assert found.excess_area == pytest.approx(expected - oracle, rel=1e-13)


def test_closed_forms() -> None:
    n = 200
    grid = torch.arange(1, n + 1, dtype=torch.float64)
    # One score for all: no order is better than another, and the expected risk is the mean loss at every coverage.
    flat = RiskCoverage.of(torch.zeros(n), grid)
    assert flat.area == pytest.approx(float(grid.mean()), rel=1e-14)
    assert flat.coverage.tolist() == [1.0]
    # Losses 1, …, n in the right order: risk_i = (i + 1)/2, whose mean is (n + 3)/4; reversed (3n + 1)/4.
    right, wrong = RiskCoverage.of(grid, grid), RiskCoverage.of(-grid, grid)
    assert right.area == pytest.approx((n + 3) / 4, rel=1e-14)
    assert right.excess_area == 0
    assert wrong.area == pytest.approx((3 * n + 1) / 4, rel=1e-14)
    # m errors last: the oracle's risk at i > n − m is 1 − (n − m)/i.
    m = 30
    errors = (grid > n - m).double()
    expected = sum(1 - (n - m) / i for i in range(n - m + 1, n + 1)) / n
    assert RiskCoverage.of(torch.rand(n, generator=generator()), errors).oracle_area == pytest.approx(expected)
    assert RiskCoverage.of(torch.rand(n, generator=generator()), errors).excess_area > 0


def test_classes() -> None:
    prediction, y = classes(), torch.randint(4, (40,), generator=generator(3))
    error = (prediction.probs.argmax(1) != y).double()
    by_hand = RiskCoverage.of(1 - prediction.probs.amax(1), error)
    found = risk_coverage(prediction, y)
    torch.testing.assert_close(found.risk, by_hand.risk)
    assert found.area == pytest.approx(by_hand.area, rel=1e-12)
    nll = risk_coverage(prediction, y, "entropy", "nll")
    expected = RiskCoverage.of(prediction.entropy, -prediction.log_prob(y))
    torch.testing.assert_close(nll.risk, expected.risk)
    given = risk_coverage(prediction, y, prediction.entropy, "nll")
    assert torch.equal(given.risk, nll.risk)
    threshold = found.threshold_for(coverage=0.5)
    kept = ~reject(prediction, threshold)
    assert int(kept.sum()) == 20
    assert float(error[kept].mean()) == pytest.approx(float(found.risk[found.coverage == 0.5]))


def test_positions_decide_for_themselves_and_unobserved_ones_are_left_out() -> None:
    prediction = classes(3, 5)
    y = torch.randint(4, (40, 5), generator=generator(3))
    y[:, 2] = -100
    seen = [0, 1, 3, 4]
    found = risk_coverage(prediction, y)
    probs = prediction.probs[..., seen].movedim(1, -1).flatten(0, 1)
    expected = RiskCoverage.of(1 - probs.amax(1), (probs.argmax(1) != y[:, seen].flatten()).double())
    torch.testing.assert_close(found.risk, expected.risk)
    assert reject(prediction, 0.3).shape == (40, 5)


def test_answers() -> None:
    logits = torch.randn(4, 30, 2, generator=generator(), dtype=torch.float64)
    prediction = BinaryPrediction.mixture(logits)
    y = torch.randint(2, (30, 2), generator=generator(1))
    p = prediction.probs
    found = risk_coverage(prediction, y, risk="nll")
    nll = -torch.where(y == 1, p.log(), (1 - p).log())
    expected = RiskCoverage.of(torch.minimum(p, 1 - p).flatten(), nll.flatten())
    torch.testing.assert_close(found.risk, expected.risk)
    torch.testing.assert_close(score(prediction), torch.minimum(p, 1 - p))
    assert risk_coverage(prediction, y).risk[-1] == ((p > 0.5) != (y == 1)).double().mean()
    torch.testing.assert_close(score(prediction, "variance"), p * (1 - p))
    two = ClassPrediction.mixture(torch.stack([torch.zeros_like(logits), logits], 2), 1)
    torch.testing.assert_close(score(prediction, "variance"), score(two, "variance") / 2)


@pytest.mark.parametrize("output", [(), (1,), (3,)])
def test_numbers(output: tuple[int, ...]) -> None:
    prediction = numbers(*output)
    y = torch.randn(40, *output, generator=generator(4), dtype=torch.float64)
    squares = (y - prediction.mean).square().reshape(40, -1).mean(1)
    for name in ("variance", "epistemic"):
        expected = RiskCoverage.of(getattr(prediction, name).reshape(40, -1).mean(1), squares)
        assert risk_coverage(prediction, y, name).area == pytest.approx(expected.area, rel=1e-12)
    expected = RiskCoverage.of(prediction.variance.reshape(40, -1).mean(1), -prediction.log_prob(y))
    torch.testing.assert_close(risk_coverage(prediction, y, risk="nll").risk, expected.risk)
    information = (0.5 * torch.log1p(prediction.epistemic / prediction.aleatoric)).reshape(40, -1).mean(1)
    torch.testing.assert_close(score(prediction, "mutual_information"), information)
    total = (0.5 * (2 * math.pi * math.e * prediction.variance).log()).reshape(40, -1).mean(1)
    torch.testing.assert_close(score(prediction, "entropy"), total)
    assert reject(prediction, 1.0).shape == (40,)


def test_counts_and_scores_of_outputs() -> None:
    log_rates = torch.randn(5, 6, 2, generator=generator(), dtype=torch.float64)
    counts = CountPrediction.mixture(log_rates)
    torch.testing.assert_close(score(counts, "latent_variance"), log_rates.var(0, correction=0).mean(1))
    spread = torch.tensor([[0.1], [0.5]]).double()
    torch.testing.assert_close(
        score(CountPrediction.log_normal(spread, spread), "latent_variance"), torch.tensor([0.1, 0.5]).double()
    )
    y = torch.poisson(counts.mean, generator=generator(1))
    assert risk_coverage(counts, y).risk[-1] == pytest.approx(float((y - counts.mean).square().mean()))


def test_nearly_certain_predictions_stay_apart() -> None:
    """Both probabilities round to 1 in float32, and the order is still known."""
    prediction = ClassPrediction.mixture(torch.tensor([[[20.0, 0.0], [30.0, 0.0]]]).log_softmax(2), 1)
    assert prediction.confidence.tolist() == [1.0, 1.0]
    found = score(prediction)
    torch.testing.assert_close(found, torch.tensor([-20.0, -30.0]).double().exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("likelihood", ["classification", "binary"])
@pytest.mark.parametrize(("method", "link"), [("linearized", "probit"), ("linearized", "mc"), ("pushed", None)])
def test_the_variance_of_logits_is_that_of_the_posterior(likelihood: str, method: str, link: str | None) -> None:
    x, y = networks.inputs("mlp", 8), networks.targets(likelihood, 8)
    la = Laplace(networks.make("mlp"), likelihood, "full", prior=3.0).fit([(x, y)])
    variance = la.latent(x, diagonal=True).covariance
    samples = 1000 if method == "pushed" else 10
    prediction: Any = la.predict(x, method, link, samples=samples, generator=generator())
    expected = variance.mean(1) if likelihood == "classification" else variance
    # Relative error of a variance from S draws: √(2/S), here 0.045.
    tolerance = 0.2 if method == "pushed" else 1e-9
    torch.testing.assert_close(score(prediction, "latent_variance"), expected, rtol=tolerance, atol=0)


class Laplacian(CustomLikelihood):
    """Absolute errors."""

    name = "laplacian"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).abs().sum(1)


class Broadcast(Laplacian):
    """One that does not mind how many targets there are."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().log_prob(outputs[:1], targets)


def test_the_variance_of_logits_counts_their_common_shift() -> None:
    """tr Σ/C: of logits that move together all of it, though every sample has the same probabilities."""
    shift = torch.randn(9, 4, 1, generator=generator(), dtype=torch.float64)
    together = Categorical().predict_samples(shift.expand(9, 4, 3), torch.tensor(1.0))
    torch.testing.assert_close(score(together, "latent_variance"), shift.var(0, correction=0).squeeze(1))
    torch.testing.assert_close(score(together, "mutual_information"), torch.zeros(4).double(), rtol=0, atol=1e-15)


def test_the_nll_of_a_likelihood_without_a_mean() -> None:
    outputs = torch.randn(3, 6, 2, generator=generator(), dtype=torch.float64)
    y = torch.randn(6, 2, generator=generator(1), dtype=torch.float64)
    mixture = OutputMixture(outputs, Laplacian())
    found = risk_coverage(mixture, y, risk="nll")
    nll = -(-(outputs - y).abs().sum(2)).exp().mean(0).log()
    expected = RiskCoverage.of(outputs.var(0, correction=0).mean(1), nll)
    torch.testing.assert_close(found.risk, expected.risk)
    with pytest.raises(InputError, match=r"no method mean\(outputs\)"):
        risk_coverage(mixture, y)  # the squared error needs one
    missing = y.clone()
    missing[2, 1] = math.nan
    with pytest.raises(InputError, match=r"targets hold NaN or inf, first at \[2, 1\]"):
        risk_coverage(mixture, missing, risk="nll")
    with pytest.raises(InputError, match=r"Broadcast.log_prob returned shape \[7\] for 6 examples"):
        risk_coverage(OutputMixture(outputs, Broadcast()), torch.zeros(7, 2), risk="nll")


@pytest.mark.parametrize("risk", [None, "nll"])
def test_targets_on_another_device(risk: str | None) -> None:
    labels, answers = torch.randint(4, (40,), generator=generator(3)), torch.randint(2, (40,), generator=generator(3))
    yes = BinaryPrediction.mixture(torch.randn(3, 40, generator=generator()))
    rates = CountPrediction.mixture(torch.randn(3, 40, generator=generator()))
    some: list[tuple[Prediction, Tensor]] = [
        (classes(), labels), (yes, answers), (numbers(), labels.double()), (rates, labels.float())
    ]  # fmt: skip
    if risk == "nll":
        outputs = torch.randn(3, 40, 2, generator=generator())
        some.append((OutputMixture(outputs, Laplacian()), torch.zeros(40, 2)))
    for prediction, y in some:
        expected = risk_coverage(prediction, y, risk=risk)
        with second_device():
            found = risk_coverage(prediction, y.to(ELSEWHERE), risk=risk)
        assert torch.equal(found.risk, expected.risk)


def test_single_precision() -> None:
    """A prediction in float32 gives the scores of the same numbers in float64, up to its rounding."""
    logits = 3 * torch.randn(5, 40, 4, generator=generator())
    single, double = (ClassPrediction.mixture(one, 1) for one in (logits, logits.double()))
    for kind in ("confidence", "entropy", "variance", "epistemic", "mutual_information"):
        found = score(single, kind)
        assert found.dtype == torch.float64
        # Sums of up to 4 terms of size 1, and a difference of two entropies.
        torch.testing.assert_close(found, score(double, kind), rtol=0, atol=2e-6)
    y = torch.randint(4, (40,), generator=generator(1))
    assert risk_coverage(single, y).area == pytest.approx(risk_coverage(double, y).area, rel=1e-12)  # the same order


def test_what_a_prediction_does_not_have_is_named() -> None:
    prediction, y = classes(), torch.zeros(40, dtype=torch.long)
    with pytest.raises(InputError, match="score of a ClassPrediction: 'std'.*Supported: confidence, entropy, epis"):
        score(prediction, "std")
    with pytest.raises(InputError, match="Supported: confidence, entropy, epistemic, mutual_information, variance"):
        score(prediction, "latent_variance")  # of log-probabilities alone it is not known
    with pytest.raises(InputError, match="score of a RegressionPrediction: 'confidence'"):
        risk_coverage(numbers(), torch.zeros(40), "confidence")
    with pytest.raises(InputError, match="risk of a RegressionPrediction: 'error'.*nll, squared_error"):
        risk_coverage(numbers(), torch.zeros(40), risk="error")
    with pytest.raises(InputError, match="risk of a ClassPrediction"):
        risk_coverage(prediction, y, risk="squared_error")
    outputs = torch.randn(3, 5, 2, generator=generator())
    mixture = OutputMixture(outputs, Laplacian())
    torch.testing.assert_close(score(mixture), outputs.var(0, correction=0).mean(1).double())
    with pytest.raises(InputError, match="Supported: latent_variance"):
        score(mixture, "variance")
    with pytest.raises(InputError, match="No score is known of a Prediction"):
        score(Prediction())
    x = networks.inputs("mlp", 4)
    la = Laplace(networks.make("mlp"), Bernoulli()).fit([(x, networks.targets("binary", 4))])
    with pytest.raises(InputError, match="prediction.marginals"):
        score(la.predict(x, joint=True))


def test_bad_input() -> None:
    prediction, y = classes(), torch.zeros(40, dtype=torch.long)
    with pytest.raises(InputError, match=r"Class indices of shape \[40\] are needed, got \[39\]"):
        risk_coverage(prediction, y[1:])
    with pytest.raises(InputError, match=r"targets of shape \[40\] against outputs of \[40, 1\]"):
        risk_coverage(numbers(1), torch.zeros(40))
    missing = torch.zeros(40, 1).index_fill(0, torch.tensor([3]), math.nan)
    for risk in ("squared_error", "nll"):
        with pytest.raises(InputError, match=r"targets hold NaN or inf, first at \[3, 0\]"):
            risk_coverage(numbers(1), missing, risk=risk)
    with pytest.raises(InputError, match=r"Scores of shape \[40\]"):
        risk_coverage(prediction, y, torch.zeros(3))
    with pytest.raises(InputError, match=r"hold NaN, first at \[2\]"):
        risk_coverage(prediction, y, torch.tensor([0.0, 1.0, math.nan, *[0.0] * 37]))
    with pytest.raises(InputError, match="0 or 1"):
        risk_coverage(BinaryPrediction.mixture(torch.zeros(1, 3)), torch.tensor([0, 1, 2]))
    with pytest.raises(InputError, match="empty"):
        RiskCoverage.of(torch.zeros(0), torch.zeros(0))
    with pytest.raises(InputError, match="are empty"):
        risk_coverage(prediction, torch.full((40,), -100))  # nothing is observed
    with pytest.raises(InputError, match="One score and one loss"):
        RiskCoverage.of(torch.zeros(2), torch.zeros(3))
    with pytest.raises(InputError, match="NaN or infinite"):
        RiskCoverage.of(torch.zeros(2), torch.tensor([1.0, math.inf]))
    curve = RiskCoverage.of(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0]))
    with pytest.raises(InputError, match="one of risk"):
        curve.threshold_for()
    with pytest.raises(InputError, match="one of risk"):
        curve.threshold_for(risk=0.1, coverage=0.1)
    with pytest.raises(InputError, match="coverage must be"):
        curve.threshold_for(coverage=0.0)
    with pytest.raises(InputError, match=r"the lowest is 0.5, at a coverage of 0.5"):
        curve.threshold_for(risk=0.1)
    with pytest.raises(InputError, match="threshold is NaN"):
        reject(prediction, math.nan)
