"""Priors over the weights: everything is a precision, everything positive."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lapwing.errors import InputError, positive

Value = float | Tensor


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """`p(θ) = N(θ; μ₀, Π⁻¹)` with a diagonal precision Π.

    `precision` is one number, or `{glob: number or tensor}` over parameter names: a 0-d value for all
    of a parameter's elements, or a tensor of its shape. The first matching glob counts, and every
    Bayesian parameter must match one. `mean` likewise (default 0), but unmatched names keep 0.

    Examples:
        >>> GaussianPrior({"*.bias": 0.1, "*": 1.0})
        GaussianPrior({'*.bias': 0.1, '*': 1})
    """

    precision: Value | Mapping[str, Value] = 1.0
    mean: Value | Mapping[str, Value] = 0.0

    def __post_init__(self) -> None:
        values = self.precision.items() if isinstance(self.precision, Mapping) else [("*", self.precision)]
        resolved = {glob: positive(value, f"The prior precision of {glob!r}") for glob, value in values}
        object.__setattr__(self, "precision", resolved)
        means = self.mean.items() if isinstance(self.mean, Mapping) else [("*", self.mean)]
        means_resolved = {glob: torch.as_tensor(value, dtype=torch.float64) for glob, value in means}
        for glob, value in means_resolved.items():
            if not bool(torch.isfinite(value).all()):
                raise InputError(f"The prior mean of {glob!r} holds NaN or inf.")
        object.__setattr__(self, "mean", means_resolved)

    def __repr__(self) -> str:
        assert isinstance(self.precision, Mapping)
        shown = {glob: _Shown(torch.as_tensor(value)) for glob, value in self.precision.items()}
        inside = repr(shown["*"]) if list(shown) == ["*"] else repr(shown)
        return f"GaussianPrior({inside}{'' if _is_zero(self.mean) else ', mean=...'})"

    def precisions(self, sizes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Precision by parameter name, 0-d or in the parameter's shape; float64, autograd kept."""
        assert isinstance(self.precision, Mapping)
        found = {}
        for name, size in sizes.items():
            glob = next((glob for glob in self.precision if glob == name or fnmatchcase(name, glob)), None)
            if glob is None:
                near = difflib.get_close_matches(name, list(self.precision), n=1, cutoff=0)
                raise InputError(
                    f"The prior has no precision for parameter {name!r}"
                    f"{f' (nearest pattern: {near[0]!r})' if near else ''}. Add it, or a last pattern '*'."
                )
            found[name] = _fit_shape(torch.as_tensor(self.precision[glob]), size, name, "precision")
        return found

    def means(self, sizes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Mean by parameter name, 0-d or in the parameter's shape; float64."""
        assert isinstance(self.mean, Mapping)
        found = {}
        for name, size in sizes.items():
            glob = next((glob for glob in self.mean if glob == name or fnmatchcase(name, glob)), None)
            value = torch.zeros((), dtype=torch.float64) if glob is None else torch.as_tensor(self.mean[glob])
            found[name] = _fit_shape(value, size, name, "mean")
        return found

    def to(self, device: torch.device) -> GaussianPrior:
        assert isinstance(self.precision, Mapping)
        assert isinstance(self.mean, Mapping)
        precision, mean = (
            {glob: torch.as_tensor(value, device=device) for glob, value in values.items()}
            for values in (self.precision, self.mean)
        )
        return GaussianPrior(precision, mean)


@dataclass(frozen=True)
class FactoredDamping:
    """The prior added to each Kronecker factor (Ritter et al. 2018, Eq. 9).

    In the factors' basis the posterior precision is `(√(T n/σ²) q_i + √τ)(√(T n/σ²) h_j + √τ)`, with q and h
    the eigenvalues of the per-example averages `E[Σ_r a aᵀ]` and `E[Σ_r g gᵀ]/R`. n and τ are
    hyperparameters for sampling and for tuning by validation; there is no prior behind them, so no
    evidence. Blocks without Kronecker form get `T n/σ² · s/N + τ`.
    """

    n: float
    tau: float

    def __post_init__(self) -> None:
        positive(self.n, "FactoredDamping(n=...)")
        positive(self.tau, "FactoredDamping(tau=...)")


Prior = GaussianPrior | FactoredDamping


def resolve(prior: Value | Mapping[str, Value] | Prior) -> Prior:
    """A prior from a number, a 0-d tensor, a mapping of globs, or a prior object."""
    if isinstance(prior, GaussianPrior | FactoredDamping):
        return prior
    if isinstance(prior, Tensor) and prior.numel() != 1:
        raise InputError(
            f"prior is a tensor of shape {list(prior.shape)}; give one number, or {{glob: number or tensor}}."
        )
    if not isinstance(prior, int | float | Tensor | Mapping):
        raise InputError(f"prior must be a number, {{glob: number}} or a prior object, got {type(prior).__name__}.")
    return GaussianPrior(prior.reshape(()) if isinstance(prior, Tensor) else prior)


def from_weight_decay(weight_decay: float, n: int) -> float:
    """The prior precision `n · weight_decay` that a weight decay means under a loss averaged over n examples.

    Examples:
        >>> from_weight_decay(5e-4, 50_000)
        25.0
    """
    return float(positive(weight_decay, "weight_decay") * positive(n, "n"))


def _fit_shape(value: Tensor, size: torch.Size, name: str, what: str) -> Tensor:
    if value.numel() == 1 and value.dim() == 0:
        return value
    if value.numel() == 1 and math.prod(size) != 1:
        return value.reshape(())
    if value.shape != size:
        raise InputError(f"The prior {what} of {name!r} has shape {list(value.shape)}, the parameter {list(size)}.")
    return value


def _is_zero(mean: Value | Mapping[str, Value]) -> bool:
    assert isinstance(mean, Mapping)
    return all(bool((torch.as_tensor(value) == 0).all()) for value in mean.values())


@dataclass(frozen=True)
class _Shown:
    value: Tensor

    def __repr__(self) -> str:
        if self.value.numel() == 1:
            return f"{self.value.item():.4g}"
        return f"tensor{list(self.value.shape)}"
