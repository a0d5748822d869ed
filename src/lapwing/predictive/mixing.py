"""The weighted mixture of several predictions of the same kind, itself a prediction of that kind.

What the members disagree on is epistemic: of the mixture's entropy or variance only the weighted mean of the
members' aleatoric parts stays aleatoric.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.predictive.components import Components
from lapwing.predictive.prediction import (
    BinaryPrediction,
    ClassPrediction,
    Prediction,
    RegressionPrediction,
)
from lapwing.predictive.uncertainty import Parts, Split

Kind = TypeVar("Kind", bound=Prediction)


def mix(predictions: Sequence[Prediction], log_weights: Tensor) -> Prediction:
    """`Σ_m w_m p_m(y)` with normalized `log_weights: [M]`."""
    if classes := _all(predictions, ClassPrediction):
        return _classes(classes, log_weights)
    if answers := _all(predictions, BinaryPrediction):
        return _answers(answers, log_weights)
    if values := _all(predictions, RegressionPrediction):
        return _values(values, log_weights)
    kinds = ", ".join(sorted({type(prediction).__name__ for prediction in predictions}))
    raise InputError(f"Predictions of these kinds do not mix: {kinds}.")


def _all(predictions: Sequence[Prediction], kind: type[Kind]) -> list[Kind]:
    """The predictions if each is of this kind, else nothing."""
    found = [prediction for prediction in predictions if isinstance(prediction, kind)]
    return found if len(found) == len(predictions) else []


def _classes(members: list[ClassPrediction], log_weights: Tensor) -> ClassPrediction:
    first = members[0]
    check_shapes([member.log_probs for member in members])
    if len({member.dim for member in members}) > 1:
        raise InputError("Members with classes along different dimensions do not mix.")
    log_probs = log_average([member.log_probs for member in members], log_weights)

    mixed = ClassPrediction(
        log_probs, first.dim, first.ignore_index, sampled=lambda: _parts(mixed, members, log_weights),
        components=_shared(members, log_weights),
    )  # fmt: skip
    return mixed


def _answers(members: list[BinaryPrediction], log_weights: Tensor) -> BinaryPrediction:
    check_shapes([member.log_yes for member in members])
    yes = log_average([member.log_yes for member in members], log_weights)
    no = log_average([member.log_no for member in members], log_weights)

    mixed = BinaryPrediction(yes, no, lambda: _parts(mixed, members, log_weights), _shared(members, log_weights))
    return mixed


def _shared(members: Sequence[ClassPrediction | BinaryPrediction], log_weights: Tensor) -> Callable[[Tensor], Tensor]:
    """`log w_m + log p_m(y)` of all outputs of an example together: `[M, N]`."""

    def components(targets: Tensor) -> Tensor:
        logs = _promoted([member.log_prob(targets) for member in members])
        return logs + log_weights.to(logs).unsqueeze(1)

    return components


def _parts(
    mixed: ClassPrediction | BinaryPrediction,
    members: Sequence[ClassPrediction] | Sequence[BinaryPrediction],
    log_weights: Tensor,
) -> Parts:
    """The mixture's entropy and variance, within which only the members' aleatoric parts remain."""
    entropies, variances = (
        average([member.uncertainty(measure).aleatoric for member in members], log_weights)
        for measure in ("entropy", "variance")
    )
    return Parts(Split(mixed.entropy, entropies), Split(mixed.variance, variances), members[0].parts.source)


def _values(members: list[RegressionPrediction], log_weights: Tensor) -> RegressionPrediction:
    check_shapes([member.mean for member in members])
    mean = average([member.mean for member in members], log_weights)
    aleatoric = average([member.aleatoric for member in members], log_weights)
    epistemic = average([member.epistemic + (member.mean - mean).square() for member in members], log_weights)
    components = Components.joined([_components(member) for member in members], log_weights)
    noise_entropy = average([member.uncertainty("entropy").aleatoric for member in members], log_weights)
    return RegressionPrediction(mean, aleatoric, epistemic, components=components, noise_entropy=noise_entropy)


def _components(member: RegressionPrediction) -> Components:
    """A Gaussian is a mixture of one."""
    if member.components is not None:
        return member.components
    covariance = None
    if member.covariance is not None:
        covariance = (member.covariance + torch.diag_embed(member.aleatoric.reshape(len(member.mean), -1)))[None]
    return Components(member.mean.new_zeros(1), member.mean[None], member.variance[None], covariance)


def check_shapes(outputs: list[Tensor]) -> None:
    """Members must predict the same outputs."""
    for number, output in enumerate(outputs):
        if output.shape != outputs[0].shape:
            raise InputError(
                f"Members with different outputs do not mix: member 0 predicts {list(outputs[0].shape)}, member "
                f"{number} {list(output.shape)}."
            )


def average(values: list[Tensor], log_weights: Tensor) -> Tensor:
    """`Σ_m w_m values_m`."""
    stacked = _promoted(values)
    total: Tensor = torch.tensordot(log_weights.exp().to(stacked), stacked, dims=1)
    return total


def log_average(logs: list[Tensor], log_weights: Tensor) -> Tensor:
    """`log Σ_m w_m exp(logs_m)`."""
    stacked = _promoted(logs)
    return (stacked + log_weights.to(stacked).reshape(-1, *[1] * logs[0].dim())).logsumexp(0)


def _promoted(values: list[Tensor]) -> Tensor:
    """Side by side `[M, ...]` in the widest of their dtypes."""
    dtype = functools.reduce(torch.promote_types, [value.dtype for value in values])
    return torch.stack([value.to(dtype) for value in values])
