"""Active learning: which candidates to label, by what their targets would tell about the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lapwing.decisions.gaussian_batch import GaussianBatch, independent_information
from lapwing.decisions.sampled_batch import SampledBatch, sampled
from lapwing.decisions.scores import check_scores
from lapwing.errors import InputError
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian
from lapwing.predictive.joint import JointPrediction, JointSamples
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction
from lapwing.progress import bar


def bald(prediction: Prediction) -> Tensor:
    """The mutual information between the target of each candidate and the weights, in nats: `[N]`.

    Houlsby et al. (2011). Of numbers `½ log det(I + K/σ²)` with the covariance K of the candidate's outputs; of a
    mixture by quadrature. Of several labels, or several outputs without a covariance, it is the sum over them: an upper
    bound, since what they tell may be the same. Closed-form links take it from Monte Carlo in output space.

    The k largest are `bald(prediction).topk(k).indices`: each informative by itself, but maybe all alike; see
    `batch_bald`.
    """
    if isinstance(prediction, ClassPrediction | BinaryPrediction):
        found = prediction.mutual_information
        found = found.flatten(1).sum(1) if found.dim() > 1 else found
    elif isinstance(prediction, RegressionPrediction):
        if prediction.components is None and prediction.noise_entropy is None:
            covariance = None if prediction.covariance is None else prediction.covariance.detach().double()
            found = independent_information(
                prediction.epistemic.detach().double(), prediction.aleatoric.detach().double(), covariance
            )
        else:
            found = prediction.uncertainty("entropy").epistemic
            found = found.flatten(1).sum(1) if found.dim() > 1 else found
    elif isinstance(prediction, JointPrediction | JointSamples):
        raise InputError("bald looks at each candidate by itself: give it prediction.marginals, or use batch_bald.")
    else:
        raise InputError(f"The mutual information of a {type(prediction).__name__} with the weights is not known.")
    return check_scores(found.detach().double(), "The mutual informations")


@dataclass(frozen=True)
class Batch:
    """Candidates in the order in which they were chosen: `indices: [b]`.

    `information: [b]` is the mutual information between the targets of the first 1, …, b of them and the weights, in
    nats.
    """

    indices: Tensor
    information: Tensor


def batch_bald(
    joint: Prediction,
    size: int,
    *,
    samples: int = 200,
    max_outcomes: int = 1000,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Batch:
    """Choose `size` candidates that tell most *together*: greedily, the one that adds most to those already chosen.

    The information of a set is monotone and submodular, so that greedy has at least `1 − 1/e` (63 %) of what the best
    set of this size has (Nemhauser et al. 1978).

    - Gaussian likelihood, `la.predict(x, joint=True)`: exact, `½ log det(I + K_SS/σ²)`, by a block Cholesky step per
      choice.
    - Classes and one yes or no, `la.predict(x, method="pushed" or "sampled", joint=True)`: BatchBALD (Kirsch et al.
      2019), with the S samples in the place of the posterior. Exact for these samples while the labels of the chosen
      ones have at most `max_outcomes` outcomes (`C^b`), from then on over that many drawn ones. S samples tell no more
      than log S nats apart: take several hundred for batches of ten. A `JointPrediction` of classes is drawn from
      first.

    Args:
        joint: the candidates, predicted with `joint=True`.
        size: b.
        samples: draws from a `JointPrediction` of classes.
        max_outcomes: of the chosen ones' labels, above which outcomes are drawn.
        generator: for both kinds of draws; None consumes torch's global one.
        progress: show a bar where it takes longer than two seconds.
    """
    state = _state(joint, samples, max_outcomes, generator)
    candidates = len(joint.mean)
    if not 1 <= size <= candidates:
        raise InputError(f"A batch of {size} cannot be chosen from {candidates} candidates.")
    chosen: list[int] = []
    information: list[Tensor] = []
    for _ in bar(range(size), "choose", progress):
        gains = check_scores(state.gains(), "The mutual informations")
        gains[chosen] = -torch.inf
        best = int(gains.argmax())
        information.append(gains[best])
        chosen.append(best)
        if len(chosen) < size:
            state = state.after(best)
    return Batch(torch.tensor(chosen, device=gains.device), torch.stack(information).cumsum(0))


def batch_information(
    joint: Prediction,
    indices: Tensor | Sequence[int],
    *,
    samples: int = 200,
    max_outcomes: int = 1000,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The mutual information between the targets of these candidates together and the weights, in nats: 0-d.

    Exact, or by draws, as in `batch_bald`; at most the sum of their `bald`.
    """
    state = _state(joint, samples, max_outcomes, generator)
    chosen = _indices(indices, len(joint.mean))
    total = check_scores(state.gains(), "The mutual informations")[chosen[0]]
    for before, index in pairwise(chosen):
        state = state.after(before)
        total = total + check_scores(state.gains(), "The mutual informations")[index]
    return total


def _indices(given: Tensor | Sequence[int], candidates: int) -> list[int]:
    """Those of a list or a tensor `[b]`, if they are whole numbers that name different candidates."""
    found = torch.as_tensor(given)
    chosen: list[int] = found.flatten().tolist()
    whole = found.dim() == 1 and not found.is_floating_point() and found.dtype != torch.bool
    known = all(0 <= index < candidates for index in chosen)
    if not (chosen and whole and known) or len(set(chosen)) < len(chosen):
        raise InputError(
            f"indices must be whole numbers [b] that name different ones of the {candidates} candidates, got "
            f"{found.tolist()}."
        )
    return chosen


def _state(
    joint: Prediction, samples: int, max_outcomes: int, generator: torch.Generator | None
) -> GaussianBatch | SampledBatch:
    """Nothing chosen yet."""
    if samples < 1 or max_outcomes < 1:
        raise InputError(f"samples and max_outcomes must be at least 1, got {samples} and {max_outcomes}.")
    if isinstance(joint, JointPrediction):
        if isinstance(joint.likelihood, Gaussian):
            return GaussianBatch.of(joint)
        if isinstance(joint.likelihood, Categorical | Bernoulli):
            return SampledBatch.of(sampled(joint, samples, generator), max_outcomes, generator)
        raise InputError(
            f"The {joint.likelihood.name} likelihood has no batch_bald: it is for Gaussian, Categorical and Bernoulli."
        )
    if isinstance(joint, JointSamples):
        return SampledBatch.of(joint, max_outcomes, generator)
    raise InputError(
        f"batch_bald needs the candidates together: la.predict(x, joint=True), not a {type(joint).__name__}. "
        "bald looks at each by itself."
    )
