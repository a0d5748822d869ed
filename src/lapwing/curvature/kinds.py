"""Which vectors to backpropagate: what distinguishes GGN, its estimates, and the empirical Fisher."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lapwing.columns import Columns, averaged, given
from lapwing.errors import InputError
from lapwing.likelihoods import Likelihood

KINDS = ("ggn", "rademacher", "fisher", "empirical", "kfra", "hessian")
RANDOM = ("rademacher", "fisher")


def columns(
    kind: str,
    likelihood: Likelihood,
    outputs: Tensor,
    targets: Tensor,
    samples: int,
    generator: torch.Generator | None,
) -> Columns:
    """Columns `S_n` whose outer products `Σ_k S_nk S_nkᵀ` are (on average) the curvature in f."""
    outputs = outputs.detach()
    if kind in ("ggn", "kfra"):
        return likelihood.hessian_columns(outputs, targets)
    if kind == "rademacher":
        return averaged([likelihood.signed_columns(outputs, targets, generator) for _ in range(samples)])
    if kind == "fisher":
        gradients = likelihood.sampled_gradients(outputs, targets, samples, generator)
        return given(gradients / math.sqrt(samples))
    gradient = output_gradient(likelihood, outputs, targets)
    return replace(given(gradient.unsqueeze(0)), slope=torch.ones_like(gradient.flatten(1)[:, 0]))


def check_count(kind: str, count: int, outputs: Tensor, limit: int) -> None:
    """Raise, and name the ways out, where a batch would take more than `limit` backward passes."""
    if count <= max(limit, 1):
        return
    cheaper = {
        "ggn": "curvature='rademacher' (random signs, unbiased), 'fisher' (sampled labels, unbiased) or 'empirical' "
        "(true labels, biased), set rank_tolerance to drop columns that add little",
        "kfra": "curvature='rademacher', 'fisher' or 'empirical'; or make only linear layers Bayesian (weights=...), "
        "as the others take exact columns",
        "rademacher": "curvature='fisher' or 'empirical', lower fisher_samples",
        "fisher": "curvature='empirical', lower fisher_samples",
    }[kind]
    raise InputError(
        f"curvature={kind!r} for outputs of shape {list(outputs.shape)} takes {count} backward passes per batch, more "
        f"than max_columns={limit}. Use {cheaper}, or raise max_columns."
    )


def output_gradient(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """`∇_f log p(y_n|f_n)` at unit noise: `[N, *output]`."""
    outputs = outputs.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(likelihood.log_prob(outputs, targets).sum(), outputs)
    return gradient
