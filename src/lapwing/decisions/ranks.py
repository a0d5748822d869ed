"""Ranks among exchangeable scores: the finite-sample arithmetic that alarms and conformal predictions rest on.

If n calibration scores and a new one are exchangeable, the new one is equally likely to have each rank among the n + 1.
So it is at most the k-th smallest of the n with probability at least k/(n + 1), and exactly that without ties.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.distributions import Beta

from lapwing.decisions.scores import check_scores
from lapwing.errors import InputError


def rank(examples: int, alpha: float) -> int:
    """`k = ⌈(n + 1)(1 − α)⌉`, in whole numbers: of 9 scores at α = 0.7 the 3rd, however 1 − 0.7 is rounded.

    α is read to 12 significant digits, so that `1 - 0.9`, which is 0.09999999999999998, is a tenth.
    Above n where n is below `1/α − 1`: then no finite threshold is exceeded that seldom.
    """
    level = _level(alpha)
    return examples + 1 - int((examples + 1) * level)


def fewest(alpha: float) -> int:
    """The smallest n with `rank(n, α) ≤ n`: `⌈1/α⌉ − 1`."""
    return -int(-1 // _level(alpha)) - 1


def quantile(scores: Tensor, alpha: float) -> Tensor:
    """The `rank(n, α)`-th smallest of `scores: [n, *rest]` along the first dimension, infinite where that is above n.

    A new exchangeable score exceeds it with probability at most α, and at least `α − 1/(n + 1)` without ties.
    """
    check_scores(scores, "The calibration scores")
    k = rank(len(scores), alpha)
    if k > len(scores):
        return torch.full_like(scores[0], torch.inf)
    return scores.sort(dim=0).values[k - 1]


def p_values(calibration: Tensor, scores: Tensor) -> Tensor:
    """`(1 + #{i: s_i ≥ s})/(n + 1)` for calibration scores `[n]` and each s of `scores`: of their shape and device.

    For an s exchangeable with the s_i, `P(p ≤ α) ≤ α` at every α.
    """
    check_scores(calibration, "The calibration scores")
    ordered = calibration.to(scores.device).sort().values
    below = torch.searchsorted(ordered, scores.to(ordered.dtype).contiguous(), side="left")
    return (1 + len(ordered) - below).double() / (len(ordered) + 1)


def coverage_distribution(examples: int, alpha: float) -> Beta:
    """How much a threshold from n calibration scores covers, over calibration sets: `Beta(k, n + 1 − k)`, without ties.

    Its mean is `k/(n + 1)`, between 1 − α and `1 − α + 1/(n + 1)`; a single calibration set may do worse.
    """
    k = rank(examples, alpha)
    if k > examples:
        raise InputError(too_few(examples, alpha))
    return Beta(*torch.tensor([k, examples + 1 - k], dtype=torch.float64))


def too_few(examples: int, alpha: float) -> str:
    """What to say where n is too small."""
    return (
        f"{examples} calibration scores are too few for a level of {alpha:.12g}: the threshold would be infinite. It "
        f"takes at least {fewest(alpha)}, or a level of at least 1/{examples + 1}."
    )


def _level(alpha: float) -> Fraction:
    """The number as it is written, to 12 significant digits: 0.1 is a tenth, and so is 1 - 0.9."""
    written = f"{float(alpha):.12g}"
    if not 0 < float(written) < 1:
        raise InputError(f"A level must be between 0 and 1, exclusively, got {alpha}.")
    return Fraction(written)
