"""How far one prediction is from another: the Kullback–Leibler divergence, example by example."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.predictive.counts import CountPrediction
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction


def divergence(p: Prediction, q: Prediction) -> Tensor:
    """`KL(p‖q)` in nats, summed over outputs and positions, each by itself: `[N]`; differentiable in q.

    Classes and yes or no exactly, `Σ p log(p/q)`. Of numbers the Gaussians with their moments are compared,
    `½[log(v_q/v_p) + (v_p + (m_p − m_q)²)/v_q − 1]`, of counts the Poisson distributions with their means,
    `m_q − m_p + m_p log(m_p/m_q)`. If q is a Gaussian or Poisson itself, that differs from the exact divergence by what
    depends on p alone, so that derivatives in q are exact.
    """
    if isinstance(p, ClassPrediction) and isinstance(q, ClassPrediction):
        _check(p.log_probs, q.log_probs)
        _check_classes(p, q)
        return _flat(_terms(p.log_probs, q.log_probs))
    if isinstance(p, BinaryPrediction) and isinstance(q, BinaryPrediction):
        _check(p.log_yes, q.log_yes)
        return _flat(_terms(p.log_yes, q.log_yes) + _terms(p.log_no, q.log_no))
    if isinstance(p, RegressionPrediction) and isinstance(q, RegressionPrediction):
        _check(p.mean, q.mean)
        m, v = p.mean.to(q.mean), p.variance.to(q.mean)
        return _flat(0.5 * ((q.variance / v).log() + (v + (m - q.mean).square()) / q.variance - 1))
    if isinstance(p, CountPrediction) and isinstance(q, CountPrediction):
        _check(p.mean, q.mean)
        m = p.mean.to(q.mean)
        return _flat(q.mean - m + torch.xlogy(m, m) - torch.xlogy(m, q.mean))
    raise InputError(
        f"There is no divergence in closed form between a {type(p).__name__} and a {type(q).__name__}: both must be of "
        "classes, of yes or no, of numbers or of counts."
    )


def essence(p: Prediction) -> Prediction:
    """`p` with no more than `divergence` reads of it, to be kept: neither samples nor covariances."""
    if isinstance(p, ClassPrediction):
        return ClassPrediction(p.log_probs, p.dim, p.ignore_index, sampled=_not_kept)
    if isinstance(p, BinaryPrediction):
        return BinaryPrediction(p.log_yes, p.log_no, _not_kept)
    if isinstance(p, RegressionPrediction):
        return RegressionPrediction(p.mean, p.aleatoric, p.epistemic)
    if isinstance(p, CountPrediction):
        return CountPrediction(p.mean, p.aleatoric, p.epistemic, p.mean.unsqueeze(0).log())
    return p


def _not_kept() -> NoReturn:
    raise InputError("The parts of this prediction's uncertainty were not kept.")


def _terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`p log(p/q)`, 0 where p is."""
    log_p = log_p.to(log_q)
    impossible = log_p == -torch.inf
    return torch.where(impossible, 0.0, log_p.exp() * (log_p.masked_fill(impossible, 0) - log_q))


def _flat(terms: Tensor) -> Tensor:
    return terms.flatten(1).sum(1) if terms.dim() > 1 else terms


def _check(p: Tensor, q: Tensor) -> None:
    if p.shape != q.shape:
        raise InputError(f"Predictions of shape {list(p.shape)} and {list(q.shape)} do not compare.")


def _check_classes(p: ClassPrediction, q: ClassPrediction) -> None:
    one, other = (prediction.dim % prediction.log_probs.dim() for prediction in (p, q))
    if one != other:
        raise InputError(
            f"Classes along dimension {one} and along dimension {other} of {list(p.log_probs.shape)} do not compare. A "
            f"student must have them where its teacher has: distill(likelihood=Categorical(dim={one}))."
        )
