"""Intervals of numbers that hold the target with a probability one may choose, whatever the network is like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.decisions import ranks
from lapwing.decisions.selective import check_targets
from lapwing.errors import InputError, choose
from lapwing.predictive.counts import CountPrediction
from lapwing.predictive.mixture_of_outputs import OutputMixture
from lapwing.predictive.prediction import Prediction, RegressionPrediction

METHODS = ("absolute", "normalized", "quantile")


@dataclass(frozen=True)
class ConformalIntervals:
    """Split conformal prediction of numbers: intervals with `1 − α ≤ P(y inside) ≤ 1 − α + 1/(n + 1)`.

    That holds if the n calibration examples and a new one are exchangeable (and the network was trained without them);
    the upper bound without ties. It is over calibration sets and new inputs together, not for each input.

    | method | score | interval |
    | --- | --- | --- |
    | "normalized" | `abs(y − mean)/std` | `mean ± q·std` |
    | "absolute" | `abs(y − mean)` | `mean ± q`, of one width everywhere |
    | "quantile" | `max(low − y, y − high)` of `prediction.interval(1 − α)` | `[low − q, high + q]` (CQR) |

    With several outputs the guarantee is of *each output by itself* (`quantile: [*output]`), and says nothing of all of
    them at once; with `simultaneous` it is of *all outputs at once*: the score is the largest of the example's, and
    `quantile` is 0-d. For "absolute" and "quantile" that takes outputs in comparable units.

    In "quantile" q may be negative where the prediction's own intervals are too wide, and an interval with low > high
    is empty.

    `output` is the shape of an example's outputs; predictions of another are refused.
    """

    quantile: Tensor
    alpha: float
    examples: int
    output: tuple[int, ...]
    method: str = "normalized"
    simultaneous: bool = False

    @staticmethod
    def calibrated(
        prediction: Prediction,
        targets: Tensor,
        alpha: float = 0.1,
        method: str = "normalized",
        *,
        simultaneous: bool = False,
    ) -> ConformalIntervals:
        """Calibrate on predictions of n examples `[N, *output]` that were not trained on, and their targets."""
        choose(method, METHODS, "method of conformal intervals")
        _check(prediction, method)
        check_targets(prediction, targets)
        if len(targets) == 0:
            raise InputError("There is no calibration example.")
        low, high, unit = _parts(prediction, method, alpha)
        y, output = targets.detach().to(low), tuple(low.shape[1:])
        scores = torch.maximum(low - y, y - high) / unit
        if simultaneous and scores.dim() > 1:
            scores = scores.flatten(1).amax(1)
        if ranks.rank(len(scores), alpha) > len(scores):
            raise InputError(f"Every interval would be infinite. {ranks.too_few(len(scores), alpha)}")
        return ConformalIntervals(ranks.quantile(scores, alpha), alpha, len(scores), output, method, simultaneous)

    def interval(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """`(low, high)`: `[N, *output]` each, in float64."""
        _check(prediction, self.method)
        low, high, unit = _parts(prediction, self.method, self.alpha)
        if low.shape[1:] != self.output:
            raise InputError(f"Calibrated for outputs of shape {list(self.output)}, got {list(low.shape[1:])}.")
        margin = self.quantile.to(low.device) * unit
        return low - margin, high + margin


def _parts(prediction: Prediction, method: str, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """The interval to widen, and the unit it is widened in: `[N, *output]` each, float64."""
    mean = prediction.mean.detach().double()
    if bool(mean.isnan().any()):
        raise InputError("The predicted means hold NaN.")
    if method == "quantile":
        low, high = (side.detach().double() for side in prediction.interval(1 - alpha))
        if bool((low.isnan() | high.isnan()).any()):
            raise InputError("The predicted intervals hold NaN.")
        return low, high, torch.ones_like(low)
    if method == "absolute":
        return mean, mean, torch.ones_like(mean)
    std = prediction.std.detach().double()
    if not bool((std > 0).all()):
        raise InputError(
            "method='normalized' divides by the predicted std, and one is 0 or NaN. Use method='absolute'."
        )
    return mean, mean, std


def _check(prediction: Prediction, method: str) -> None:
    if not isinstance(prediction, RegressionPrediction | CountPrediction | OutputMixture):
        raise InputError(
            f"Conformal intervals are of numbers and counts, not of a {type(prediction).__name__}: for classes use "
            "ConformalSets, for joint predictions prediction.marginals."
        )
    if method == "quantile" and isinstance(prediction, OutputMixture):
        raise InputError("method='quantile' needs prediction.interval, which this prediction does not have.")
