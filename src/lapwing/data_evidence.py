"""The log-evidence as a function of the data: its gradient in the inputs, and so in whatever made them.

Let the inputs depend on parameters η, say the strength of an augmentation, and let the curvature be fitted at one η.
With the weights held, `d ½ log det P = ½ (T/σ²) tr(P⁻¹ dH)` for `H = Σ_n J_nᵀ Λ_n J_n`. So

`S(η) = Σ_n { T·log p(y_n|f_n) − ½ (T/σ²) tr(Λ_n J_n P⁻¹ J_nᵀ) }`, with `P⁻¹` held,

has the gradient of the log-evidence in η, and takes predictions only: `J_n P⁻¹ J_nᵀ` is the covariance of the
linearized outputs. Since log det is concave, what S gains is a lower bound on what the evidence gains: a step in η
that raises S raises the evidence, also a long one.

At the Newton center `θ* = θ̃ + δ` is held too (it maximizes the terms it enters), and `log p(y_n|f_n)` becomes
`log p(y_n|f_n) + (∇_f log p·J_n δ − ½ δᵀJ_nᵀΛ_nJ_n δ)/σ²`. At the linear model's own mode it becomes
`log p(y_n|f_n + J_n δ)`, for every structure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.batches import check_targets
from lapwing.errors import InputError, positive
from lapwing.likelihoods import Likelihood
from lapwing.priors import FactoredDamping

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

_KINDS = ("ggn", "rademacher", "fisher", "kfra")  # H is the GGN or an estimate of it


def data_evidence(la: Laplace, x: Any, y: Tensor, scale: float | None) -> Tensor:
    """`scale · S` of the examples given, 0-d, float64. See `Laplace.data_evidence`."""
    _check(la)
    posterior = la.posterior
    outputs, covariance = la.latent(x, center="network")
    targets = y.to(outputs.device)
    check_targets("data_evidence", outputs, targets)
    la.likelihood.check(outputs.detach(), targets, "data_evidence")
    temperature, noise = posterior.temperature.detach(), posterior.noise.detach()
    fit = log_likelihood(la.likelihood, outputs, targets, noise)
    if posterior.center == "newton":
        step = la.latent(x, diagonal=True).mean - outputs  # J δ
        fit = fit + (gradients(la.likelihood, outputs, targets) * step).sum() / noise
        flat = step.reshape(len(step), -1)
        covariance = covariance + flat.unsqueeze(2) * flat.unsqueeze(1)
    elif posterior.center == "linear":
        fit = log_likelihood(la.likelihood, la.latent(x, diagonal=True).mean, targets, noise)
    spread = traces(la.likelihood, outputs, targets, covariance)
    factor = la.curvature.examples / len(outputs) if scale is None else float(positive(scale, "scale"))
    return factor * temperature * (fit - 0.5 * spread.double() / noise)


def _check(la: Laplace) -> None:
    """Raise where S would not have the gradient of this evidence."""
    if isinstance(la.prior, FactoredDamping):
        raise InputError("FactoredDamping is no prior, so it has no evidence. Set a number as prior.")
    if la.curvature_kind not in _KINDS:
        raise InputError(
            f"data_evidence differentiates the GGN, which curvature={la.curvature_kind!r} is not. Fit with one of "
            f"{', '.join(map(repr, _KINDS))}."
        )
    if la.center != "newton" or la.structure == "full":
        return
    raise InputError(
        f"data_evidence at center='newton' with structure={la.structure!r} is not supported: the step to the center is "
        "that of the structure's curvature, which has no per-example form. Use la.at(center='network'), "
        "la.find_mode(loader).at(center='linear'), or structure='full'."
    )


def traces(likelihood: Likelihood, outputs: Tensor, targets: Tensor, covariance: Tensor) -> Tensor:
    """`Σ_n tr(Λ_n C_n)` of covariances `[N, D, D]`; differentiable in outputs and covariance; 0-d."""
    columns = likelihood.hessian_columns(outputs, targets)
    roots = columns.part(0, columns.count).reshape(columns.count, len(outputs), -1)  # [K, N, D]
    return torch.einsum("knc,ncd,knd->", roots, covariance, roots)


def log_likelihood(likelihood: Likelihood, outputs: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
    """`Σ_n log p(y_n|f_n)` at a noise variance, differentiable in the outputs; 0-d, float64."""
    unit = likelihood.log_prob(outputs.double(), targets).sum()
    statistics = likelihood.statistics(outputs.detach(), targets)
    normalizer = statistics.log_likelihood_at(noise) - statistics.log_likelihood / noise
    return unit / noise + normalizer.detach()


def gradients(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """`∇_f log p(y_n|f_n)` at unit noise, `[N, *output]`, differentiable in the outputs."""
    leaf = outputs if outputs.requires_grad else outputs.detach().requires_grad_()
    with torch.enable_grad():
        total = likelihood.log_prob(leaf, targets).sum()
        (found,) = torch.autograd.grad(total, leaf, create_graph=outputs.requires_grad)
    return found
