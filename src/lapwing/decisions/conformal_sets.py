"""Sets of classes that hold the right one with a probability one may choose, whatever the network is like."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.decisions import ranks
from lapwing.decisions.selective import answers
from lapwing.errors import InputError, choose
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction

METHODS = ("aps", "threshold")


@dataclass(frozen=True)
class ConformalSets:
    """Split conformal prediction of classes: `sets(prediction)` are all classes whose score is at most `quantile`.

    If the n calibration examples and a new one are exchangeable (and the network was trained without them),

        1 − α ≤ P(the set holds the right class) ≤ 1 − α + 1/(n + 1),

    the upper bound if scores have no ties, such as those of "aps" with its randomization. That is over calibration sets
    and new inputs together, not for each input: what one calibration set achieves is `coverage_distribution(n, α)`.
    With `by_class` it holds within every class (Mondrian).

    Scores of a class y, for probabilities p:

    - "threshold": `1 − p_y` (LAC). The smallest sets on average; they may be empty where nothing is probable.
    - "aps": `Σ_{c before y} p_c + u·p_y` in order of decreasing p, u uniform (Romano et al. 2020). Larger where the
      prediction is less certain. With `penalty` λ > 0, plus `λ·max(0, rank_y − free)`: RAPS (Angelopoulos et al. 2021).

    `quantile` is 0-d, or `[C]` by class: infinite, so that the class is in every set, where too few of it were seen.
    `classes` is C; predictions of other numbers of classes are refused.
    """

    quantile: Tensor
    alpha: float
    examples: int
    classes: int
    method: str = "threshold"
    randomized: bool = True
    penalty: float = 0.0
    free: int = 0

    @staticmethod
    def calibrated(
        prediction: Prediction,
        targets: Tensor,
        alpha: float = 0.1,
        method: str = "threshold",
        *,
        by_class: bool = False,
        randomized: bool = True,
        penalty: float = 0.0,
        free: int = 0,
        generator: torch.Generator | None = None,
    ) -> ConformalSets:
        """Calibrate on predictions of n examples that the network was not trained on.

        Args:
            prediction: of classes, one per example, or of one yes or no (then the classes are "no" and "yes").
            targets: `[N]`, or as the outputs for yes or no. Those with `ignore_index` are left out.
            alpha: the probability α of a set without the right class.
            method: "threshold" or "aps".
            by_class: a quantile for every class, for coverage within each.
            randomized: for "aps", draw u; without, u = 1, sets are larger and coverage may be above the upper bound.
            penalty: λ of RAPS, for "aps".
            free: ranks that RAPS does not penalize.
            generator: the source of u; None consumes torch's global one.
        """
        choose(method, METHODS, "method of conformal sets")
        if penalty < 0 or free < 0:
            raise InputError(f"penalty and free must not be negative, got {penalty} and {free}.")
        if method != "aps" and (penalty or free or not randomized):
            raise InputError("penalty, free and randomized=False belong to method='aps'.")
        log_probs = _log_probs(prediction)
        index, observed = labels(prediction, targets)
        log_probs, index = log_probs[observed], index[observed]
        if len(index) == 0:
            raise InputError("There is no calibration example.")
        classes = log_probs.shape[1]
        rule = ConformalSets(torch.tensor(torch.inf), alpha, len(index), classes, method, randomized, penalty, free)
        own = rule.scores(log_probs, generator).gather(1, index.unsqueeze(1)).squeeze(1)
        if by_class:
            each = [own[index == label] for label in range(classes)]
            found = [ranks.quantile(one, alpha) if len(one) else own.new_tensor(torch.inf) for one in each]
            quantile, counts = torch.stack(found), max(len(one) for one in each)
        else:
            quantile, counts = ranks.quantile(own, alpha), len(own)
        if bool(quantile.isinf().all()):
            raise InputError(f"Every set would hold every class. {ranks.too_few(counts, alpha)}")
        return replace(rule, quantile=quantile)

    def sets(self, prediction: Prediction, generator: torch.Generator | None = None) -> Tensor:
        """Which classes are in the set of each input: a mask `[N, C]`."""
        log_probs = _log_probs(prediction)
        if log_probs.shape[1] != self.classes:
            raise InputError(f"Calibrated for {self.classes} classes, got {log_probs.shape[1]}.")
        return self.scores(log_probs, generator) <= self.quantile.to(log_probs.device)

    def scores(self, log_probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The score of every class, lower where it conforms: `[N, C]` from `log_probs: [N, C]`."""
        if self.method == "threshold":
            return -torch.expm1(log_probs)
        probs, order = log_probs.exp().sort(stable=True, dim=1, descending=True)
        u = probs.new_ones(len(probs), 1)
        if self.randomized:
            u = torch.rand(u.shape, generator=generator, dtype=u.dtype, device=u.device)
        before = probs.cumsum(1) - probs
        place = torch.arange(1, probs.shape[1] + 1, dtype=probs.dtype, device=probs.device)
        sorted_scores = before + u * probs + self.penalty * (place - self.free).clamp(min=0)
        return torch.empty_like(sorted_scores).scatter(1, order, sorted_scores)


def labels(prediction: Prediction, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The class of each example, and whether it was observed: `[N]` each, where the prediction is; or an error."""
    device = _log_probs(prediction).device
    if isinstance(prediction, ClassPrediction):
        index, observed = prediction.targets(targets)
        return index.to(device), observed.to(device)
    assert isinstance(prediction, BinaryPrediction)
    index = answers(prediction, targets).long().flatten()
    return index, torch.ones_like(index, dtype=torch.bool)


def _log_probs(prediction: Prediction) -> Tensor:
    """`[N, C]` in float64, of predictions with one decision per example."""
    if isinstance(prediction, ClassPrediction):
        found = prediction.log_probs
        if found.dim() != 2:
            raise InputError(
                f"Conformal sets need one decision per example, got class probabilities of {list(found.shape)}. "
                "Positions of one example depend on each other and are not exchangeable: predict one position of each."
            )
    elif isinstance(prediction, BinaryPrediction):
        found = prediction.log_yes
        if found[:1].numel() > 1:
            raise InputError(
                f"Conformal sets need one decision per example, got {list(found.shape)} answers. Calibrate each output "
                "by itself; each has its own coverage then."
            )
        found = torch.stack([prediction.log_no.flatten(), found.flatten()], 1)
    else:
        raise InputError(
            f"Conformal sets are of class predictions, not of a {type(prediction).__name__}: for numbers use "
            "ConformalIntervals, for joint predictions prediction.marginals."
        )
    if bool(found.isnan().any()):
        raise InputError("The probabilities hold NaN.")
    return found.detach().double()
