"""How good predictions are: accuracy, log-likelihood, calibration, and telling two sets apart.

Every function returns 0-d float64 tensors, so that averages over large test sets lose nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lapwing.errors import InputError


def accuracy(probs: Tensor, targets: Tensor) -> Tensor:
    """The fraction of examples whose most probable class is the target.

    Args:
        probs: `[N, C]`, class probabilities.
        targets: `[N]`, class indices.

    >>> float(accuracy(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), torch.tensor([0, 1])))
    0.5
    """
    _check(probs, targets)
    return (probs.argmax(1) == targets).double().mean()


def negative_log_likelihood(probs: Tensor, targets: Tensor) -> Tensor:
    """`−(1/N) Σ_n log probs[n, targets[n]]` in nats; infinite where a target was given probability 0.

    Args:
        probs: `[N, C]`, class probabilities.
        targets: `[N]`, class indices.
    """
    _check(probs, targets)
    chosen: Tensor = probs.double().gather(1, targets.long().unsqueeze(1)).squeeze(1)
    return -chosen.log().mean()


class Reliability(NamedTuple):
    """What a reliability diagram shows, one entry per bin of confidence: `[B]` each.

    `confidence` and `accuracy` are the means over the examples of a bin, NaN where `examples` is 0.
    """

    examples: Tensor
    confidence: Tensor
    accuracy: Tensor


def reliability(probs: Tensor, targets: Tensor, bins: int = 15) -> Reliability:
    """Group examples by confidence `max_c probs[n, c]` into B bins `(b/B, (b+1)/B]` of equal width.

    Args:
        probs: `[N, C]`, class probabilities.
        targets: `[N]`, class indices.
        bins: B.
    """
    _check(probs, targets)
    if bins < 1:
        raise InputError(f"bins must be at least 1, got {bins}.")
    confidence, labels = probs.double().max(1)
    right = (labels == targets).double()
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=probs.device)
    index = torch.bucketize(confidence, edges[1:-1].contiguous())

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(bins).index_add(0, index, values)

    count = total(torch.ones_like(confidence))
    return Reliability(count.long(), total(confidence) / count, total(right) / count)


def expected_calibration_error(probs: Tensor, targets: Tensor, bins: int = 15) -> Tensor:
    """`Σ_b (N_b/N) |accuracy_b − confidence_b|` over B bins of confidence, each `(b/B, (b+1)/B]`.

    Args:
        probs: `[N, C]`, class probabilities.
        targets: `[N]`, class indices.
        bins: B.
    """
    count, confidence, right = reliability(probs, targets, bins)
    gap = (right - confidence).abs().nan_to_num()
    return (count * gap).sum() / count.sum()


def auroc(negatives: Tensor, positives: Tensor) -> Tensor:
    """Area under the ROC curve: `P(s⁺ > s⁻) + ½ P(s⁺ = s⁻)` for a random positive and a random negative.

    1 where every positive scores above every negative, ½ where the scores say nothing.

    Args:
        negatives: `[N]`, scores of what should score low, such as the entropy at familiar inputs.
        positives: `[M]`, scores of what should score high.

    >>> float(auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9])))
    0.875
    """
    for name, scores in (("negatives", negatives), ("positives", positives)):
        if scores.dim() != 1 or scores.numel() == 0:
            raise InputError(f"auroc needs one score per example, got {name} of shape {list(scores.shape)}.")
        if bool(scores.isnan().any()):
            raise InputError(f"auroc: the scores of the {name} hold NaN.")
    ordered, found = negatives.double().sort().values, positives.double().contiguous()
    below = torch.searchsorted(ordered, found, side="left")
    not_above = torch.searchsorted(ordered, found, side="right")
    return (below + not_above).double().mean() / (2 * ordered.numel())


def _check(probs: Tensor, targets: Tensor) -> None:
    if probs.dim() != 2 or probs.shape[0] == 0 or targets.shape != probs.shape[:1]:
        raise InputError(
            f"Metrics need probabilities [N, C] and class indices [N], got {list(probs.shape)} and "
            f"{list(targets.shape)}."
        )
    if bool(probs.isnan().any()):
        raise InputError("The probabilities hold NaN.")
