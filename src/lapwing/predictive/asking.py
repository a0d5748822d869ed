"""What a posterior is asked at inputs: linearized outputs, their covariance with others, predictions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.errors import InputError, choose
from lapwing.guard import random_state_kept, twice_differentiable
from lapwing.predictive import linearized
from lapwing.predictive.joint import JointPrediction, JointSamples
from lapwing.predictive.linearized import Latent, kept_covariance
from lapwing.predictive.prediction import Prediction
from lapwing.predictive.pushed import pushed_outputs
from lapwing.predictive.sampled import sampled_outputs

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

_CROSS = 64  # examples at once, at least, of the larger of two batches whose covariance is wanted


def latent(la: Laplace, x: Any, joint: bool, keep: int, center: str | None) -> Latent:
    """Mean and covariance of the linearized outputs, the latter of at most `keep` outputs. See `Laplace.latent`."""
    state, posterior, inputs = la._unchanged(), la.at(center=center).posterior, la._inputs(x)
    with random_state_kept(), la._borrow(state.weights):
        return linearized.latent(state.tape, posterior, inputs, joint, keep, la.max_columns, la.progress)


def cross_covariance(la: Laplace, x: Any, other: Any, center: str | None) -> Tensor:
    """Between the outputs at two sets of inputs: `[N·D, M·D]`. See `Laplace.cross_covariance`."""
    first, second = la._inputs(x), la._inputs(other)
    examples, others = first.examples(), second.examples()
    if others < examples:
        return cross_covariance(la, second, first, center).T
    step, split = max(examples, _CROSS), second.split(others)
    columns = []
    for start in range(0, others, step):
        found = latent(la, first.joined(split.part(start, start + step)), True, sys.maxsize, center)
        rows = examples * found.mean[0].numel()
        columns.append(found.covariance[:rows, rows:])
    return torch.cat(columns, dim=1)


def predict(
    la: Laplace,
    x: Any,
    method: str,
    link: str | None,
    samples: int | Mapping[str, Tensor] | None,
    generator: torch.Generator | None,
    center: str | None,
    joint: bool,
) -> Prediction:
    """By the method asked for. See `Laplace.predict`."""
    choose(method, ("linearized", "pushed", "sampled"), "method")
    if isinstance(samples, int) and samples < 1:
        raise InputError(f"predict(samples=...) needs at least 1, got {samples}.")
    noise = la._noise.detach()
    if method != "linearized":
        if link is not None:
            raise InputError(f"link belongs to method='linearized'; {method!r} predictions average p(y|f) itself.")
        outputs = _drawn_outputs(la, x, method, 100 if samples is None else samples, generator, center)
        if joint:
            return JointSamples(outputs, la.likelihood, noise)
        return la.likelihood.predict_samples(outputs, noise)
    if isinstance(samples, Mapping):
        raise InputError("Weights as samples belong to method='pushed' or 'sampled'.")
    count = 1000 if samples is None else samples
    if joint:
        found = latent(la, x, True, sys.maxsize, center)
        prediction = JointPrediction(found.mean, found.covariance, la.likelihood, noise, link, count, generator)
        return prediction if link is None else prediction.checked()
    latents = latent(la, x, False, kept_covariance(link), center).outputs()
    return la.likelihood.predict_gaussian(latents, noise, link, count, generator)


def _drawn_outputs(
    la: Laplace,
    x: Any,
    method: str,
    samples: int | Mapping[str, Tensor],
    generator: torch.Generator | None,
    center: str | None,
) -> Tensor:
    """Outputs of drawn weights, of the linearized network or of itself: `[S, N, *output]`."""
    state, inputs, posterior = la._unchanged(), la._inputs(x), la.at(center=center).posterior
    with la._borrow(state.weights):
        if method == "pushed":
            with twice_differentiable(la.model):
                return pushed_outputs(state.tape, posterior, inputs, samples, generator, la.progress)
        return sampled_outputs(state.tape, posterior, inputs, samples, generator, la.progress)
