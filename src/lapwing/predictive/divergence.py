"""How far one prediction is from another: the Kullback–Leibler divergence, example by example."""

from __future__ import annotations

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
        return _flat(q.mean - m + torch.xlogy(m, m) - m * q.mean.log())
    raise InputError(
        f"There is no divergence in closed form between a {type(p).__name__} and a {type(q).__name__}: both must be of "
        "classes, of yes or no, of numbers or of counts."
    )


def _terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`p log(p/q)`, 0 where p is."""
    log_p = log_p.to(log_q)
    possible = log_p > -torch.inf
    return torch.where(possible, log_p.exp() * (log_p.masked_fill(~possible, 0) - log_q), torch.zeros_like(log_q))


def _flat(terms: Tensor) -> Tensor:
    return terms.flatten(1).sum(1) if terms.dim() > 1 else terms


def _check(p: Tensor, q: Tensor) -> None:
    if p.shape != q.shape:
        raise InputError(f"Predictions of shape {list(p.shape)} and {list(q.shape)} do not compare.")
