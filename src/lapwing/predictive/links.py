"""Integrals of class probabilities over Gaussian logits: `E[softmax(f)]` for f ~ N(μ, Σ), and of `σ(f)`.

Only Monte Carlo is right everywhere. Each closed form says where it holds; the guide on links shows where it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.errors import InputError, choose
from lapwing.likelihoods.base import GaussianOutputs
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction

_PAIRS = 2**22  # numbers held at once where classes are compared in pairs


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    """Log of `softmax(μ_i / √(1 + πΣ_ii/8))` (MF0), classes last: `[..., C]` and `[..., C]` to `[..., C]`.

    For independent logits of one variance: there within 0.08 of the integral, however large it is. It is no function of
    differences of logits: variance that all share flattens it, and where variances differ a logit of large variance is
    pulled to 0, wherever the others are, so that the wrong class may win and a constant added to all changes it.
    """
    return (mean / (1 + math.pi / 8 * variance).sqrt()).log_softmax(-1)


def mf1(mean: Tensor, variance: Tensor) -> Tensor:
    """Log of `1 / Σ_j exp(−(μ_i − μ_j)/√(1 + π/8 (Σ_ii + Σ_jj)))`, renormalized (Lu et al. 2021): as `probit`.

    For independent logits, up to 10 classes: within 0.08 of the integral for variances up to 1, 0.12 beyond if they are
    similar. It sees differences of means, but takes every pair of logits to be uncorrelated: with variance that they
    share it is too uncertain. Cost `C²` in time; memory is bounded.
    """
    return _mean_field(mean, lambda rows: variance[..., rows].unsqueeze(-1) + variance.unsqueeze(-2))


def mf2(mean: Tensor, covariance: Tensor) -> Tensor:
    """Log of MF1 with `Var(f_i − f_j) = Σ_ii + Σ_jj − 2Σ_ij`, renormalized: `[..., C]` and `[..., C, C]`.

    For any covariance: a function of differences of logits alone, as softmax is, and for two classes the binary probit.
    Up to 10 classes within 0.05 of the integral for variances of differences up to 1, 0.1 up to 4; too flat for more.
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)

    def spread(rows: slice) -> Tensor:
        return variance[..., rows].unsqueeze(-1) + variance.unsqueeze(-2) - 2 * covariance[..., rows, :]

    return _mean_field(mean, spread)


def _mean_field(mean: Tensor, spread: Callable[[slice], Tensor]) -> Tensor:
    """`spread(rows)` gives the variances of `f_i − f_j` for the classes i in `rows`: `[..., rows, C]`."""
    step = max(1, _PAIRS // max(1, mean.numel()))
    logs = []
    for start in range(0, mean.shape[-1], step):
        rows = slice(start, start + step)
        gaps = mean[..., rows].unsqueeze(-1) - mean.unsqueeze(-2)
        logs.append(-(-gaps / (1 + math.pi / 8 * spread(rows)).sqrt()).logsumexp(-1))
    return torch.cat(logs, -1).log_softmax(-1)


def bridge(mean: Tensor, variance: Tensor) -> Tensor:
    """Log mean of the Dirichlet with `α_i = [1 − 2/K + e^{μ_i} Σ_j e^{−μ_j}/K²]/Σ_ii` (MacKay 1998): as `probit`.

    Logits are taken as they are, not projected to zero sum. Exact up to O(1/α) where the variances have the shape of
    a Dirichlet's, `Σ_ii ∝ (1 − 2/K) e^{−μ_i} + Σ_j e^{−μ_j}/K²`: large where the class is improbable. Only ratios of
    variances matter, so that their size does not soften the probabilities, and with equal variances and K > 2 it is too
    flat even as they vanish. Needs positive variances.
    """
    if not bool((variance > 0).all()):
        raise InputError("The links 'bridge' and 'bridge-norm' divide by the variances, and one is 0. Use link='mf2'.")
    classes = mean.shape[-1]
    first = torch.full_like(mean, 1 - 2 / classes).log()
    second = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(classes)
    return (torch.logaddexp(first, second) - variance.log()).log_softmax(-1)


def bridge_norm(mean: Tensor, covariance: Tensor) -> Tensor:
    """The bridge of logits projected to zero sum and, where they vary much, scaled down: `[..., C]`, `[..., C, C]`.

    `f − mean(f)` has the same softmax; its variances are those of `PΣP`, `P = I − 11ᵀ/K`. With
    `c = mean_i(PΣP)_ii/√(K/2)` the bridge is that of `N(Pμ/√c, PΣP/c)` where c > 1 (Hobbhahn et al. 2022), and of
    `N(Pμ, PΣP)` where not: there the correction would sharpen. Holds where `bridge` does, and fades towards uniform
    for large variances, where `bridge` does not.
    """
    classes = mean.shape[-1]
    rows = covariance.mean(-1)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
    scale = (variance.mean(-1, keepdim=True) / math.sqrt(classes / 2)).clamp(min=1)
    return bridge((mean - mean.mean(-1, keepdim=True)) / scale.sqrt(), variance / scale)


def delta(mean: Tensor, covariance: Tensor) -> Tensor:
    """Log of `p_i [1 + pᵀΣp − (Σp)_i + ½Σ_ii − ½Σ_j p_j Σ_jj]`, p = softmax(μ): `[..., C]` and `[..., C, C]`.

    The second-order expansion around μ. Its error is of fourth order, at most `0.05 Var(f_i − f_j)²` for variances of
    differences up to 0.5. It sums to 1 exactly, but beyond its range terms turn negative: then it is
    refused, not clipped.
    """
    log_p = mean.log_softmax(-1)
    p, variance = log_p.exp(), covariance.diagonal(dim1=-2, dim2=-1)
    mixed = (covariance @ p.unsqueeze(-1)).squeeze(-1)
    factor = 1 - mixed + variance / 2 + (p * (mixed - variance / 2)).sum(-1, keepdim=True)
    return log_p + _logs(factor)


def _logs(factor: Tensor) -> Tensor:
    """The logarithm of what must be positive for an expansion to be a probability."""
    wrong = factor <= 0
    if bool(wrong.any()):
        worst = float(factor.detach().min())
        inputs = int(wrong.flatten(1).any(1).sum())
        raise InputError(
            f"link='delta' is an expansion for small variances of the logits: at {inputs} of "
            f"{len(wrong)} inputs it leaves [0, 1] (a probability times {worst:.3g}). Use link='mc', or 'probit', "
            "which hold for large ones."
        )
    return factor.log()


@dataclass(frozen=True)
class Link:
    """A closed form: log probabilities from mean and variances, or the `covariances` between the logits."""

    log_probs: Callable[[Tensor, Tensor], Tensor]
    covariances: bool = False


CATEGORICAL: dict[str, Link] = {
    "probit": Link(probit),
    "mf1": Link(mf1),
    "mf2": Link(mf2, covariances=True),
    "bridge": Link(bridge),
    "bridge-norm": Link(bridge_norm, covariances=True),
    "delta": Link(delta, covariances=True),
}
BERNOULLI = ("probit", "delta")
MONTE_CARLO = "mc"


def needs_covariances(link: str | None) -> bool:
    """Whether a link integrates over the logits of an example jointly, and not one at a time."""
    return link == MONTE_CARLO or (link in CATEGORICAL and CATEGORICAL[link].covariances)


def categorical_link(
    f: GaussianOutputs, dim: int, link: str, samples: int, generator: torch.Generator | None
) -> ClassPrediction:
    """Class probabilities for logits N(mean, covariance), classes along `dim`, at every position.

    A closed form by its name in `CATEGORICAL`, or "mc": the mean of softmax over `samples` draws, with noise of its own
    for every input. Closed forms take their split into aleatoric and epistemic from such draws.
    """
    choose(link, (*CATEGORICAL, MONTE_CARLO), "link for classification")

    def sampled() -> ClassPrediction:
        if f.covariance is None:
            raise InputError(
                "The mutual information needs the covariance between outputs, which the closed-form link left out "
                "for so many outputs. Use la.predict(x, link='mc')."
            )
        drawn = draw(f.mean, f.covariance, samples, generator)
        return replace(ClassPrediction.mixture(drawn, dim), latent_variance=f.variance)

    if link == MONTE_CARLO:
        return sampled()
    log_probs = _closed_form(CATEGORICAL[link], f, dim)
    return ClassPrediction(
        log_probs, dim, sampled=lambda: sampled().parts.in_output_space(), latent_variance=f.variance
    )  # fmt: skip


def _closed_form(link: Link, f: GaussianOutputs, dim: int) -> Tensor:
    """Log probabilities `[N, *output]` of every position's own logits."""
    if not link.covariances:
        found = link.log_probs(f.mean.movedim(dim, -1), f.variance.movedim(dim, -1))
        return found.movedim(-1, dim)
    assert f.covariance is not None
    place = torch.arange(f.mean[0].numel(), device=f.mean.device).reshape(f.mean.shape[1:])
    place = place.movedim(dim - 1, -1).flatten(0, -2) if place.dim() > 1 else place.unsqueeze(0)  # [E, C]
    blocks = f.covariance[:, place.unsqueeze(2), place.unsqueeze(1)]  # [N, E, C, C]
    mean = f.mean.movedim(dim, -1)
    found = link.log_probs(mean.reshape(blocks.shape[:-1]), blocks)
    return found.reshape(mean.shape).movedim(-1, dim)


def bernoulli_link(
    mean: Tensor, variance: Tensor, link: str, samples: int, generator: torch.Generator | None
) -> BinaryPrediction:
    """Probability of "yes" for logits N(mean, variance), each output for itself.

    "probit": `σ(μ/√(1 + πs/8))`, which MF1 and MF2 come to as well, within 0.02 everywhere. "delta":
    `p + ½ s p(1−p)(1−2p)`, for s up to about 0.25, refused where it leaves [0, 1]. "mc". (The bridge has the mean σ(μ)
    whatever s is, so it is not one of them.)
    """
    choose(link, (*BERNOULLI, MONTE_CARLO), "link for binary outputs")

    def sampled() -> BinaryPrediction:
        noise = torch.randn((samples, *mean.shape), generator=generator, dtype=mean.dtype, device=mean.device)
        return replace(BinaryPrediction.mixture(mean + noise * variance.sqrt()), latent_variance=variance)

    if link == MONTE_CARLO:
        return sampled()
    yes, no = _binary_delta(mean, variance) if link == "delta" else _binary_probit(mean, variance)
    return BinaryPrediction(yes, no, lambda: sampled().parts.in_output_space(), latent_variance=variance)


def _binary_probit(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    logits = mean / (1 + math.pi / 8 * variance).sqrt()
    return functional.logsigmoid(logits), functional.logsigmoid(-logits)


def _binary_delta(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    p, q = torch.sigmoid(mean), torch.sigmoid(-mean)
    bend = variance / 2 * (q - p)
    factors = _logs(torch.stack([1 + bend * q, 1 - bend * p], dim=1))
    return functional.logsigmoid(mean) + factors[:, 0], functional.logsigmoid(-mean) + factors[:, 1]


def draw(mean: Tensor, covariance: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """`samples` draws of N(mean, covariance): `[S, N, *output]`, independent for every example."""
    flat = mean.flatten(1)
    noise = torch.randn((samples, *flat.shape), generator=generator, dtype=flat.dtype, device=flat.device)
    return torch.unflatten(flat + torch.einsum("ncd,snd->snc", root(covariance), noise), 2, mean.shape[1:])


def root(covariance: Tensor) -> Tensor:
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
