"""Which vectors to backpropagate: what distinguishes GGN, Fisher and empirical Fisher."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapwing.columns import Columns, given
from lapwing.likelihoods import Likelihood

KINDS = ("ggn", "fisher", "empirical", "hessian")


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
    if kind == "ggn":
        return likelihood.hessian_columns(outputs, targets)
    if kind == "fisher":
        gradients = likelihood.sampled_gradients(outputs, targets, samples, generator)
        return given(gradients / math.sqrt(samples))
    return given(output_gradient(likelihood, outputs, targets).unsqueeze(0))


def output_gradient(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """`∇_f log p(y_n|f_n)` at unit noise: `[N, *output]`."""
    outputs = outputs.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(likelihood.log_prob(outputs, targets).sum(), outputs)
    return gradient
