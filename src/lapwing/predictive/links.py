"""Integrals of class probabilities over Gaussian logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.errors import InputError, choose
from lapwing.likelihoods.base import GaussianOutputs
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction

LINKS = ("probit", "mc")


def categorical_link(
    f: GaussianOutputs, dim: int, link: str, samples: int, generator: torch.Generator | None
) -> ClassPrediction:
    """Class probabilities for logits N(mean, covariance), classes along `dim`.

    "probit": `softmax(μ_i / √(1 + πΣ_ii/8))`. "mc": the mean of softmax over `samples` draws, with
    noise of its own for every input.
    """
    choose(link, LINKS, "link for classification")

    def sampled() -> ClassPrediction:
        if f.covariance is None:
            raise InputError(
                "The mutual information needs the covariance between outputs, which the closed-form link left out "
                "for so many outputs. Use la.predict(x, link='mc')."
            )
        return ClassPrediction.mixture(_draw(f.mean, f.covariance, samples, generator).log_softmax(dim + 1), dim)

    if link == "mc":
        return sampled()
    log_probs = (f.mean / (1 + math.pi / 8 * f.variance).sqrt()).log_softmax(dim)
    return ClassPrediction(log_probs, dim, sampled=lambda: sampled().sampled())


def bernoulli_link(
    mean: Tensor, variance: Tensor, link: str, samples: int, generator: torch.Generator | None
) -> BinaryPrediction:
    """Probability of "yes" for logits N(mean, variance): `σ(μ/√(1 + πs/8))`, or Monte Carlo."""
    choose(link, LINKS, "link for binary outputs")

    def sampled() -> BinaryPrediction:
        noise = torch.randn((samples, *mean.shape), generator=generator, dtype=mean.dtype, device=mean.device)
        return BinaryPrediction.mixture(mean + noise * variance.sqrt())

    if link == "mc":
        return sampled()
    logits = mean / (1 + math.pi / 8 * variance).sqrt()
    return BinaryPrediction(functional.logsigmoid(logits), functional.logsigmoid(-logits), lambda: sampled().sampled())


def _draw(mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """`samples` draws of N(mean, covariance): `[S, N, *output]`."""
    flat = mean.flatten(1)
    noise = torch.randn((samples, *flat.shape), generator=generator, dtype=flat.dtype, device=flat.device)
    return torch.unflatten(flat + torch.einsum("ncd,snd->snc", _root(covariance), noise), 2, mean.shape[1:])


def _root(covariance: Tensor) -> Tensor:
    """A lower triangular root of positive semi-definite matrices `[N, D, D]`.

    The jitter, at the level of rounding, makes the root exist (and differentiable) where the matrix
    is singular.
    """
    size = covariance.diagonal(dim1=1, dim2=2).amax(1, keepdim=True).clamp(min=torch.finfo(covariance.dtype).tiny)
    jitter = torch.diag_embed((4 * covariance.shape[1] * torch.finfo(covariance.dtype).eps * size).expand(
        -1, covariance.shape[1]
    ))  # fmt: skip
    root: Tensor = torch.linalg.cholesky(covariance + jitter)
    return root
