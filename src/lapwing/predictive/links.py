"""Integrals of class probabilities over Gaussian logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.errors import InputError, choose
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Entropies

LINKS = ("probit", "mc")


def categorical_link(
    mean: Tensor,
    variance: Tensor,
    covariance: Tensor | None,
    dim: int,
    link: str,
    samples: int,
    generator: torch.Generator | None,
) -> ClassPrediction:
    """Class probabilities for logits N(mean, covariance), classes along `dim`.

    "probit": `softmax(μ_i / √(1 + πΣ_ii/8))`. "mc": the mean of softmax over `samples` draws, with
    noise of its own for every input.
    """
    choose(link, LINKS, "link for classification")
    if link == "mc":
        if covariance is None:
            raise InputError("link='mc' needs the covariance of the outputs.")
        return ClassPrediction.mixture(_draw(mean, covariance, samples, generator).softmax(dim + 1), dim)
    log_probs = (mean / (1 + math.pi / 8 * variance).sqrt()).log_softmax(dim)
    if covariance is None:
        return ClassPrediction(log_probs, dim)

    def entropies() -> Entropies:
        return ClassPrediction.mixture(_draw(mean, covariance, samples, generator).softmax(dim + 1), dim).sampled()

    return ClassPrediction(log_probs, dim, entropies)


def bernoulli_link(
    mean: Tensor, variance: Tensor, link: str, samples: int, generator: torch.Generator | None
) -> BinaryPrediction:
    """Probability of "yes" for logits N(mean, variance): `σ(μ/√(1 + πs/8))`, or Monte Carlo."""
    choose(link, LINKS, "link for binary outputs")

    def sampled() -> BinaryPrediction:
        noise = torch.randn((samples, *mean.shape), generator=generator, dtype=mean.dtype, device=mean.device)
        return BinaryPrediction.mixture(torch.sigmoid(mean + noise * variance.sqrt()))

    if link == "mc":
        return sampled()
    probs = torch.sigmoid(mean / (1 + math.pi / 8 * variance).sqrt())
    return BinaryPrediction(probs, lambda: sampled().sampled())


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
