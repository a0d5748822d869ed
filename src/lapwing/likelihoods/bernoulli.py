"""Yes or no for each output: binary and multi-label classification."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.columns import Columns, diagonal, signed
from lapwing.errors import InputError
from lapwing.likelihoods.base import GaussianOutputs, Statistics, check_finite, check_same_shape
from lapwing.predictive.links import bernoulli_link
from lapwing.predictive.prediction import BinaryPrediction


@dataclass(frozen=True)
class Bernoulli:
    """`p(y|f) = Π_c σ(f_c)^{y_c} (1 − σ(f_c))^{1−y_c}` with targets 0 or 1 in the outputs' shape."""

    name = "bernoulli"
    noise = None

    def noise_scale(self, noise: float | Tensor) -> Tensor:
        raise InputError(f"The {self.name} likelihood has no noise to set.")

    def check(self, outputs: Tensor, targets: Tensor, where: str) -> None:
        check_finite(outputs, "the model's outputs hold", where)
        check_same_shape(outputs, targets, where)
        check_finite(targets, "the targets hold", where)
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise InputError(f"{where}: binary targets must be 0 or 1; soft targets are not supported.")

    def statistics(self, outputs: Tensor, targets: Tensor) -> Statistics:
        total = float(self.log_prob(outputs.double(), targets).sum())
        return Statistics(outputs.shape[0], total, targets.numel())

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        terms = -functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
        return terms.flatten(1).sum(1) if terms.dim() > 1 else terms

    def hessian_diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.sigmoid(outputs) * torch.sigmoid(-outputs)

    def hessian_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.diag(self.hessian_diagonal(outputs, targets).sum(0).flatten())

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        return diagonal(self._root(outputs))

    def signed_columns(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Columns:
        return signed(self._root(outputs), generator)

    def _root(self, outputs: Tensor) -> Tensor:
        """The diagonal of `Λ_n^{1/2}`: `[N, *output]`; in logarithms, so that its derivative is finite everywhere."""
        return (0.5 * (functional.logsigmoid(outputs) + functional.logsigmoid(-outputs))).exp()

    def sampled_gradients(
        self, outputs: Tensor, targets: Tensor, samples: int, generator: torch.Generator | None
    ) -> Tensor:
        probs = torch.sigmoid(outputs).expand(samples, *outputs.shape)
        return torch.bernoulli(probs, generator=generator) - probs

    def predict_gaussian(
        self, f: GaussianOutputs, noise: Tensor, link: str | None, samples: int, generator: torch.Generator | None
    ) -> BinaryPrediction:
        return bernoulli_link(f.mean, f.variance, link or "probit", samples, generator)

    def predict_samples(self, outputs: Tensor, noise: Tensor) -> BinaryPrediction:
        prediction = BinaryPrediction.mixture(outputs, joint=True)
        return replace(prediction, latent_variance=outputs.var(0, correction=0))

    def config(self) -> dict[str, Any]:
        return {"name": self.name}
