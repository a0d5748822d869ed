"""Selective prediction: answer where the prediction is certain enough, and say how often one is wrong there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.decisions.scores import check_scores, per_example, score
from lapwing.errors import InputError, choose
from lapwing.predictive.mixture_of_outputs import OutputMixture
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction


@dataclass(frozen=True)
class RiskCoverage:
    """The risk among the decisions that are taken, for every threshold on the score: `[K]` each, float64.

    `coverage[k]` is the fraction of decisions with a score of at most `thresholds[k]`, `risk[k]` their mean loss;
    thresholds are the K distinct scores, in ascending order, since equal scores cannot be told apart.

    `area` is the mean over i = 1, …, M of the risk among the i most certain (AURC), with equal scores in random order:
    its expectation, whatever order they came in. `oracle_area` is that of sorting by the loss itself, below which no
    score gets.
    """

    coverage: Tensor
    risk: Tensor
    thresholds: Tensor = field(repr=False)
    area: float
    oracle_area: float

    @staticmethod
    def of(scores: Tensor, losses: Tensor) -> RiskCoverage:
        """The curve of `scores: [M]`, higher where less certain, and `losses: [M]`."""
        if scores.shape != losses.shape or scores.dim() != 1:
            raise InputError(
                f"One score and one loss per decision are needed: {list(scores.shape)}, {list(losses.shape)}."
            )
        scores = check_scores(scores.detach().double(), "The scores")
        losses = losses.detach().double().to(scores.device)
        if not bool(torch.isfinite(losses).all()):
            raise InputError("A loss is NaN or infinite, such as the NLL of a target that was given probability 0.")
        thresholds, group, count = scores.unique(return_inverse=True, return_counts=True)
        total = losses.new_zeros(len(count)).index_add(0, group, losses)
        covered, lost = count.cumsum(0).double(), total.cumsum(0)
        return RiskCoverage(
            covered / len(scores), lost / covered, thresholds, _area(total, count), _area(*_each(losses.sort().values))
        )

    @property
    def excess_area(self) -> float:
        """`area − oracle_area`: what a better score could gain. 0 is perfect."""
        return self.area - self.oracle_area

    def threshold_for(self, *, risk: float | None = None, coverage: float | None = None) -> float:
        """The largest threshold whose risk is at most `risk`, or the smallest one that covers at least `coverage`.

        Both are of the decisions seen here. On new ones the risk at a threshold chosen so is somewhat larger; a
        guarantee is what conformal sets have.
        """
        if (risk is None) == (coverage is None):
            raise InputError("threshold_for needs one of risk=... and coverage=....")
        if coverage is not None:
            if not 0 < coverage <= 1:
                raise InputError(f"coverage must be above 0 and at most 1, got {coverage}.")
            # The fraction as a number of decisions, so that 0.3 of 10 is 3 whatever their rounding is.
            enough = self.coverage >= coverage * (1 - 1e-12)
            return float(self.thresholds[enough][0])
        assert risk is not None
        good = self.risk <= risk
        if not bool(good.any()):
            raise InputError(
                f"No threshold has a risk of at most {risk}: the lowest is {float(self.risk.min()):.4g}, at a coverage "
                f"of {float(self.coverage[self.risk.argmin()]):.4g}."
            )
        return float(self.thresholds[good][-1])


def risk_coverage(
    prediction: Prediction, targets: Tensor, score: str | Tensor | None = None, risk: str | None = None
) -> RiskCoverage:
    """The risk–coverage curve of a prediction.

    Args:
        prediction: of classes or yes or no (a decision per position), or of numbers or counts (a decision per example).
        targets: as for `prediction.log_prob`, on any device. Positions with `ignore_index` are left out.
        score: by name, see `lapwing.decisions.score`; or a tensor with one number per decision, higher where less
            certain.
        risk: the loss of a decision: "error" (0 or 1, the default) or "nll" for classes; "squared_error" (mean over the
            outputs, the default) or "nll" for numbers and counts.
    """
    scores = scores_of(prediction, score)
    losses, observed = _losses(prediction, targets, risk)
    return RiskCoverage.of(scores[observed.to(scores.device)], losses[observed])


def reject(prediction: Prediction, threshold: float, score: str | Tensor | None = None) -> Tensor:
    """True where the score is above the threshold, so that no decision should be taken: `[N, *positions]` or `[N]`."""
    if threshold != threshold:
        raise InputError("The threshold is NaN.")
    return scores_of(prediction, score) > threshold


def scores_of(prediction: Prediction, given: str | Tensor | None) -> Tensor:
    """The scores of this name, or the tensor given, if it has one number per decision."""
    if not isinstance(given, Tensor):
        return score(prediction, given)
    expected = score(prediction).shape
    if given.shape != expected:
        raise InputError(f"Scores of shape {list(expected)}, one per decision, are needed, got {list(given.shape)}.")
    return check_scores(given.detach().double(), "The scores")


def default_risk(prediction: Prediction) -> str:
    """The loss of a decision that is taken if none is named."""
    return "error" if isinstance(prediction, ClassPrediction | BinaryPrediction) else "squared_error"


def _losses(prediction: Prediction, targets: Tensor, risk: str | None) -> tuple[Tensor, Tensor]:
    """The loss of every decision, and where it was observed: both of the shape of the scores."""
    what = f"risk of a {type(prediction).__name__}"
    risk = risk or default_risk(prediction)
    if isinstance(prediction, ClassPrediction | BinaryPrediction):
        chosen = choose(risk, ("error", "nll"), what)
        if isinstance(prediction, ClassPrediction):
            index, observed = prediction.targets(targets.to(prediction.log_probs.device))
            picked = prediction.log_probs.gather(prediction.dim, index.unsqueeze(prediction.dim))
            losses = prediction.labels != index if chosen == "error" else -picked.squeeze(prediction.dim)
            return losses.detach().double(), observed
        truth = answers(prediction, targets)
        picked = torch.where(truth, prediction.log_yes, prediction.log_no)
        losses = prediction.labels != truth if chosen == "error" else -picked
        return losses.detach().double(), torch.ones_like(truth)
    chosen = choose(risk, ("squared_error", "nll"), what)
    if isinstance(prediction, OutputMixture) and chosen == "nll":
        losses = _own_nll(prediction, targets)
    else:
        check_targets(prediction, targets)
        targets = targets.to(prediction.mean.device)
        losses = -prediction.log_prob(targets) if chosen == "nll" else per_example((prediction.mean - targets).square())
    return losses.detach().double(), torch.ones_like(losses, dtype=torch.bool)


def _own_nll(prediction: OutputMixture, targets: Tensor) -> Tensor:
    """`−log p(y_n)` by a user's likelihood, `[N]`: it alone knows what targets are like, and may have no mean."""
    _check_finite(targets)
    losses, examples = -prediction.log_prob(targets.to(prediction.outputs.device)), prediction.outputs.shape[1]
    if losses.shape != (examples,):
        raise InputError(
            f"{prediction.likelihood.name}.log_prob returned shape {list(losses.shape)} for {examples} examples and "
            f"targets of shape {list(targets.shape)}; it must return one value for each example."
        )
    return losses


def answers(prediction: BinaryPrediction, targets: Tensor) -> Tensor:
    """Targets 0 or 1 of the shape of the outputs, as booleans where the outputs are; or an error."""
    check_targets(prediction, targets)
    if not bool(((targets == 0) | (targets == 1)).all()):
        raise InputError("Targets of yes or no are 0 or 1.")
    return targets.to(prediction.log_yes.device, torch.bool)


def check_targets(prediction: Prediction, targets: Tensor) -> None:
    """An error unless there is a finite target for each output."""
    expected = prediction.log_yes.shape if isinstance(prediction, BinaryPrediction) else prediction.mean.shape
    if targets.shape != expected:
        raise InputError(f"targets of shape {list(targets.shape)} against outputs of {list(expected)}.")
    _check_finite(targets)


def _check_finite(targets: Tensor) -> None:
    """An error that says where a target is NaN or infinite."""
    wrong = ~torch.isfinite(targets)
    if bool(wrong.any()):
        raise InputError(f"The targets hold NaN or inf, first at {wrong.nonzero()[0].tolist()}. Leave those out.")


def _each(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Every loss as a group of its own."""
    return losses, torch.ones_like(losses, dtype=torch.long)


def _area(total: Tensor, count: Tensor) -> float:
    """The mean over i of the expected loss of the first i, groups `[K]` in order and at random within each.

    Within a group that begins after a decisions with loss L, `E[risk_i] = (L + (i − a)·mean)/i`.
    """
    before, lost, mean = count.cumsum(0) - count, total.cumsum(0) - total, total / count
    place = torch.arange(1, int(count.sum()) + 1, device=total.device)
    before, lost, mean = (values.repeat_interleave(count) for values in (before, lost, mean))
    return float(((lost + (place - before) * mean) / place).mean())
