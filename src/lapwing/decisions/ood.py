"""Out of distribution: one score per input, and an alarm whose false alarms are rare by calibration."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lapwing.decisions import ranks
from lapwing.decisions.scores import check_scores, per_example, score
from lapwing.errors import InputError
from lapwing.predictive.counts import CountPrediction
from lapwing.predictive.mixture_of_outputs import OutputMixture
from lapwing.predictive.prediction import Prediction, RegressionPrediction


def ood_score(prediction: Prediction, kind: str | None = None) -> Tensor:
    """How foreign each input looks: `[N]`, higher further out of distribution; the mean over positions and outputs.

    | prediction of | default | others |
    | --- | --- | --- |
    | classes, yes or no | "entropy" | "confidence" (`1 − max p`), "mutual_information", "variance", "latent_variance" |
    | real numbers | "epistemic", the variance of the mean | "mutual_information", "variance", "entropy" |
    | counts | "latent_variance", of the log-rate | "epistemic", "variance" |
    | a `CustomLikelihood` | "latent_variance", of the outputs | "epistemic", "variance", where it has them |

    Noise is no sign of a foreign input, so defaults for numbers leave it out; for classes entropy, which keeps it, is
    the common choice, and "mutual_information" the one without. Of numbers in different units "mutual_information"
    alone is a fair mean, for `epistemic/aleatoric` has no unit. `lapwing.metrics.auroc` says how well a score tells two
    sets apart. The "latent_variance" of classes counts a shift common to all logits, which no probability sees; see
    `lapwing.decisions.score`.
    """
    return per_example(score(prediction, default_kind(prediction) if kind is None else kind))


def default_kind(prediction: Prediction) -> str:
    """The score that `ood_score` takes if none is named."""
    if isinstance(prediction, RegressionPrediction):
        return "epistemic"
    return "latent_variance" if isinstance(prediction, CountPrediction | OutputMixture) else "entropy"


@dataclass(frozen=True)
class OODAlarm:
    """Rings where a score is above a `threshold` that in-distribution scores seldom exceed.

    `scores: [n]` are those it was calibrated on, in ascending order. Answers are where the scores asked about are.
    """

    threshold: float
    false_alarm_rate: float
    scores: Tensor = field(repr=False)

    @staticmethod
    def calibrated(scores_in: Tensor, false_alarm_rate: float = 0.05) -> OODAlarm:
        """The alarm from `scores_in: [n]` of inputs in distribution that the network was not trained on.

        For a further such input, exchangeable with them, the probability of a false alarm, over calibration sets and
        inputs, is at most the rate: `⌊(n + 1)·rate⌋/(n + 1)` without ties.
        """
        scores = _flat(scores_in, "The scores in distribution")
        threshold = float(ranks.quantile(scores, false_alarm_rate))
        if ranks.rank(len(scores), false_alarm_rate) > len(scores):
            raise InputError(f"The alarm would never ring. {ranks.too_few(len(scores), false_alarm_rate)}")
        return OODAlarm(threshold, false_alarm_rate, scores.sort().values)

    def rings(self, scores: Tensor) -> Tensor:
        """True where the alarm rings, which is where the p-value is at most `false_alarm_rate`: `[N]`."""
        return _flat(scores, "The scores") > self.threshold

    def p_values(self, scores: Tensor) -> Tensor:
        """`(1 + #{i: s_i ≥ s})/(n + 1)`: `[N]`. In distribution, `P(p ≤ α) ≤ α` for every α."""
        return ranks.p_values(self.scores, _flat(scores, "The scores"))


def _flat(scores: Tensor, what: str) -> Tensor:
    if scores.dim() != 1:
        raise InputError(f"{what} must be [N], one number per input, got {list(scores.shape)}; see ood_score.")
    return check_scores(scores.detach().double(), what)
