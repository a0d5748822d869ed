"""How uncertain a prediction is, one number per decision: higher is less certain.

A decision is a class or a yes or no, at one position or output: scores are `[N, *positions]`. Of real numbers and
counts it is an example: `[N]`, the mean over its outputs, each taken by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InputError, choose
from lapwing.predictive.counts import CountPrediction
from lapwing.predictive.joint import JointPrediction, JointSamples
from lapwing.predictive.mixture_of_outputs import OutputMixture
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction

Score = Callable[[Any], Tensor]

_DISCRETE: dict[str, Score] = {
    "entropy": lambda prediction: prediction.entropy,
    "epistemic": lambda prediction: prediction.epistemic,
    "mutual_information": lambda prediction: prediction.mutual_information,
}
_CLASSES: dict[str, Score] = _DISCRETE | {
    "confidence": lambda prediction: _others(prediction),
    "variance": lambda prediction: prediction.variance.sum(prediction.dim),
}
_ANSWERS: dict[str, Score] = _DISCRETE | {
    "confidence": lambda prediction: torch.minimum(prediction.log_yes, prediction.log_no).exp(),
    "variance": lambda prediction: prediction.variance,
}
_MOMENTS: dict[str, Score] = {
    "variance": lambda prediction: per_example(prediction.variance),
    "epistemic": lambda prediction: per_example(prediction.epistemic),
}
_NUMBERS: dict[str, Score] = _MOMENTS | {
    "entropy": lambda prediction: per_example(prediction.uncertainty("entropy").total),
    "mutual_information": lambda prediction: per_example(prediction.uncertainty("entropy").epistemic),
}
_COUNTS: dict[str, Score] = _MOMENTS | {"latent_variance": lambda prediction: per_example(_log_rate(prediction))}


def score(prediction: Prediction, kind: str | None = None) -> Tensor:
    """One number per decision, float64, higher where the prediction is less certain.

    | kind | classes, yes or no: `[N, *positions]` | real numbers, counts: `[N]` |
    | --- | --- | --- |
    | "confidence" | `1 − max_c p_c` (default) | |
    | "entropy" | `−Σ p log p` | differential entropy (not of counts) |
    | "variance" | `Σ_c p_c(1 − p_c)` of classes, `p(1 − p)` of yes or no | total variance (default) |
    | "epistemic" | the epistemic part of the entropy | the epistemic part of the variance |
    | "mutual_information" | between label and weights | between target and weights (not of counts) |
    | "latent_variance" | mean variance of the logits | variance of the log-rate (counts alone) |

    "variance" is that of `prediction.variance`: of a yes or no half of what it would be with two classes.

    "latent_variance" of classes is `tr Σ/C` of the logits' covariance Σ. It counts their common shift, `1ᵀΣ1/C²`, which
    moves no probability: an input where all logits are uncertain together has a high score. Without that part it would
    take the covariances between classes, which closed-form links leave out for many outputs, and the score would mean
    different things for different methods. Predictions of a `Mixture` do not know it.

    A `CustomLikelihood` has "latent_variance" (default), the mean variance of its outputs, and what of "epistemic" and
    "variance" its methods give.
    """
    known, default = supported(prediction)
    chosen = choose(default if kind is None else kind, known, f"score of a {type(prediction).__name__}")
    return check_scores(known[chosen](prediction).detach().double(), f"The scores {chosen!r}")


def supported(prediction: Prediction) -> tuple[dict[str, Score], str]:
    """The scores that this prediction has, by name, and the name of its default."""
    if isinstance(prediction, JointPrediction | JointSamples):
        raise InputError(
            f"A {type(prediction).__name__} is one prediction of all inputs together. For decisions on each of them "
            "use prediction.marginals."
        )
    if isinstance(prediction, ClassPrediction | BinaryPrediction):
        known = dict(_CLASSES if isinstance(prediction, ClassPrediction) else _ANSWERS)
        if prediction.latent_variance is not None:
            known["latent_variance"] = _logits
        return known, "confidence"
    if isinstance(prediction, RegressionPrediction):
        return _NUMBERS, "variance"
    if isinstance(prediction, CountPrediction):
        return _COUNTS, "variance"
    if isinstance(prediction, OutputMixture):
        has = {"epistemic": ("mean",), "variance": ("mean", "variance")}
        known = {
            name: function
            for name, function in _MOMENTS.items()
            if all(hasattr(prediction.likelihood, method) for method in has[name])
        }
        return known | {"latent_variance": lambda one: per_example(one.outputs.var(0, correction=0))}, "latent_variance"
    raise InputError(f"No score is known of a {type(prediction).__name__}: give a tensor of scores.")


def per_example(values: Tensor) -> Tensor:
    """The mean over all but the first dimension: `[N]`."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def check_scores(scores: Tensor, what: str) -> Tensor:
    """The scores, if there are any and none is NaN."""
    if scores.numel() == 0:
        raise InputError(f"{what} are empty: at least one prediction is needed.")
    if bool(scores.isnan().any()):
        raise InputError(f"{what} hold NaN, first at {scores.isnan().nonzero()[0].tolist()}. Leave those inputs out.")
    return scores


def _others(prediction: ClassPrediction) -> Tensor:
    """`1 − max p` as a sum over the other classes: predictions that are nearly certain stay apart."""
    top = prediction.labels.unsqueeze(prediction.dim)
    return prediction.probs.scatter(prediction.dim, top, 0.0).sum(prediction.dim)


def _logits(prediction: ClassPrediction | BinaryPrediction) -> Tensor:
    assert prediction.latent_variance is not None
    if isinstance(prediction, ClassPrediction):
        return prediction.latent_variance.mean(prediction.dim)
    return prediction.latent_variance


def _log_rate(prediction: CountPrediction) -> Tensor:
    if prediction.gaussian is not None:
        return prediction.gaussian[1]
    return prediction.log_rates.var(0, correction=0)
