"""Real targets with Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.columns import Columns, diagonal, signed
from lapwing.errors import InputError, choose, positive
from lapwing.likelihoods.base import GaussianOutputs, Statistics, check_finite, check_same_shape
from lapwing.predictive.components import Components
from lapwing.predictive.prediction import RegressionPrediction


@dataclass(frozen=True, eq=False)
class Gaussian:
    """`p(y|f) = N(y; f, σ² diag(r))`.

    `noise` is the variance σ²; a sequence or tensor, one per output, fixes the ratios r between the
    outputs at the fit, and one scalar σ² (from 1) is chosen on top.
    """

    noise: float = 1.0
    ratios: Tensor | None = None
    name = "gaussian"

    def __init__(self, noise: float | Sequence[float] | Tensor = 1.0, ratios: Tensor | None = None) -> None:
        value = positive(noise, "Gaussian(noise=...)")
        if value.numel() > 1 and ratios is None:
            value, ratios = torch.ones(()), value
        object.__setattr__(self, "noise", float(value))
        object.__setattr__(self, "ratios", None if ratios is None else positive(ratios, "Gaussian noise ratios"))

    def _ratios(self, like: Tensor) -> Tensor:
        if self.ratios is None:
            return torch.ones_like(like[0])
        if self.ratios.shape != like.shape[1:]:
            raise InputError(
                f"Gaussian(noise=...) has variances of shape {list(self.ratios.shape)} for outputs of shape "
                f"{list(like.shape[1:])}. Give one variance per output."
            )
        return self.ratios.to(like)

    def noise_scale(self, noise: float | Tensor) -> Tensor:
        value = positive(noise, "noise")
        if value.numel() == 1:
            return value.reshape(())
        same = self.ratios is not None and self.ratios.shape == value.shape
        scale = value / self.ratios.to(value) if self.ratios is not None and same else None
        if scale is None or not torch.allclose(scale, scale.flatten()[0].expand_as(scale), rtol=1e-9):
            raise InputError(
                "The ratios of the noise variances between outputs are part of the fitted curvature. Refit with "
                "Laplace(model, Gaussian(noise=...)) to change them; here noise is one number on top."
            )
        return scale.flatten()[0]

    def check(self, outputs: Tensor, targets: Tensor, where: str) -> None:
        check_finite(outputs, "the model's outputs hold", where)
        if not targets.is_floating_point():
            raise InputError(f"{where}: regression targets of dtype {targets.dtype}; convert them to floating point.")
        check_same_shape(outputs, targets, where)
        check_finite(targets, "the targets hold", where)
        self._ratios(outputs)

    def statistics(self, outputs: Tensor, targets: Tensor) -> Statistics:
        squares = (outputs.double() - targets.double()).square()
        weighted = squares / self._ratios(outputs).double()
        errors = squares.sum() if squares.dim() == 1 else squares.flatten(0, -2).sum(0)
        total = float(self.log_prob(outputs.double(), targets.double()).sum())
        return Statistics(outputs.shape[0], total, targets.numel(), float(weighted.sum()), errors)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        ratios = self._ratios(outputs)
        densities = -0.5 * ((targets - outputs).square() / ratios + ratios.log() + math.log(2 * math.pi))
        return densities.flatten(1).sum(1) if densities.dim() > 1 else densities

    def hessian_diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._ratios(outputs).reciprocal().expand_as(outputs)

    def hessian_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.diag(self.hessian_diagonal(outputs, targets).sum(0).flatten())

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        return diagonal(self._ratios(outputs).rsqrt().expand_as(outputs))

    def signed_columns(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Columns:
        return signed(self._ratios(outputs).rsqrt().expand_as(outputs), generator)

    def sampled_gradients(
        self, outputs: Tensor, targets: Tensor, samples: int, generator: torch.Generator | None
    ) -> Tensor:
        shape = (samples, *outputs.shape)
        draws = torch.randn(shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
        return draws * self._ratios(outputs).rsqrt()

    def predict_gaussian(
        self, f: GaussianOutputs, noise: Tensor, link: str | None, samples: int, generator: torch.Generator | None
    ) -> RegressionPrediction:
        choose(link or "exact", ["exact"], "link for regression")
        return RegressionPrediction(f.mean, self._noise_of(f.mean, noise), f.variance, covariance=f.covariance)

    def predict_samples(self, outputs: Tensor, noise: Tensor) -> RegressionPrediction:
        mean = outputs.mean(0)
        spread, variance = outputs.var(0, correction=0), self._noise_of(mean, noise)
        return RegressionPrediction(mean, variance, spread, components=Components.equal(outputs, variance))

    def _noise_of(self, mean: Tensor, noise: Tensor) -> Tensor:
        return (noise.to(mean) * self._ratios(mean)).expand_as(mean)

    def config(self) -> dict[str, Any]:
        ratios = None if self.ratios is None else self.ratios.tolist()
        return {"name": self.name, "noise": self.noise, "ratios": ratios}
