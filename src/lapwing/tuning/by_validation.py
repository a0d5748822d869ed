"""Choose the prior by the score of its predictions on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.batches import unpack
from lapwing.errors import InputError, TuningWarning, choose, warn
from lapwing.predictive.options import predict_options
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction
from lapwing.progress import bar
from lapwing.tuning.result import Tuning

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

Score = Callable[[Prediction, Tensor], Tensor]


def log_score(prediction: Prediction, targets: Tensor) -> Tensor:
    """Log predictive probability: `[N]`, higher is better."""
    return prediction.log_prob(targets)


def brier_score(prediction: Prediction, targets: Tensor) -> Tensor:
    """Negative squared distance of the probabilities from the truth: `[N]`, higher is better."""
    if isinstance(prediction, ClassPrediction):
        index, observed = (part.unsqueeze(prediction.dim) for part in prediction.targets(targets))
        one_hot = torch.zeros_like(prediction.probs).scatter_(prediction.dim, index, 1.0)
        return -((prediction.probs - one_hot).square() * observed).flatten(1).sum(1)
    if isinstance(prediction, BinaryPrediction):
        return -(prediction.probs - targets.to(prediction.probs.dtype)).square().reshape(targets.shape[0], -1).sum(1)
    raise InputError("score='brier' is for classification; use 'log' for regression.")


SCORES: dict[str, Score] = {"log": log_score, "brier": brier_score}


def tune_by_validation(
    la: Laplace,
    loader: Iterable[Any],
    candidates: Sequence[Any] | None = None,
    temperatures: Sequence[float] | None = None,
    score: str | Score = "log",
    predict: Mapping[str, Any] | None = None,
) -> tuple[Laplace, Tuning]:
    """Take the candidate (prior × temperature) with the best mean score on the loader.

    `candidates` are priors of any kind (default: 21 precisions from 1e-4 to 1e4), `score` is "log", "brier"
    or `fn(prediction, targets) -> [N]`, higher is better; `predict` are options of `la.predict` by name, such as its
    method. Scores that are NaN or infinite never win.
    """
    given = predict_options(la.predict, predict)
    scorer = SCORES[choose(score, SCORES, "score")] if isinstance(score, str) else score
    priors = list(candidates) if candidates is not None else [10 ** (k / 2.5) for k in range(-10, 11)]
    options: list[dict[str, Any]] = [
        {"prior": prior, "temperature": temperature}
        for prior in priors
        for temperature in (temperatures if temperatures is not None else [la.temperature])
    ]
    if not options:
        raise InputError("tune_prior(method='validation') needs at least one candidate.")
    batches = list(loader) if isinstance(loader, Iterator) else loader
    seed: torch.Generator | None = given.pop("generator", None)

    def score_of(candidate: Laplace) -> float:
        if seed is not None:  # the same noise for every candidate
            given["generator"] = torch.Generator(seed.device).set_state(seed.get_state())
        return _mean_score(candidate, batches, scorer, given)

    start = score_of(la)
    results = [(option, score_of(la.at(**option))) for option in bar(options, "tune prior", la.progress)]
    finite = [(option, value) for option, value in results if math.isfinite(value)]
    if not finite:
        raise InputError(
            f"None of the {len(results)} candidates has a finite score on the validation set; check its data, or "
            "give other candidates."
        )
    best, value = max(finite, key=lambda item: item[1])
    messages = []
    if len(priors) > 2 and best["prior"] in (priors[0], priors[-1]) and isinstance(best["prior"], float | int):
        messages.append(
            f"The best prior precision, {best['prior']:.3g}, is at the end of the candidates; the optimum may lie "
            "beyond. Give others with candidates=[...]."
        )
    for message in messages:
        warn(message, TuningWarning)
    return la.at(**best), Tuning(
        "validation", start, value, True, len(results), candidates=results, warnings=tuple(messages)
    )


def _mean_score(la: Laplace, batches: Iterable[Any], score: Score, predict: dict[str, Any]) -> float:
    total, count = 0.0, 0
    for number, batch in enumerate(batches):
        inputs, targets = unpack(batch, f"Validation batch {number}", la.unpack)
        prediction = la.predict(inputs, **predict)
        values = score(prediction, targets.to(la.device))
        total += float(values.double().sum())
        count += values.numel()
    if count == 0:
        raise InputError("The validation loader is empty.")
    return total / count
