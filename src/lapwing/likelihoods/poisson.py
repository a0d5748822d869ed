"""Counts, with the logarithm of their rate as output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.columns import Columns, diagonal, signed
from lapwing.errors import InputError, choose
from lapwing.likelihoods.base import GaussianOutputs, Statistics, check_finite, check_same_shape
from lapwing.predictive.counts import CountPrediction
from lapwing.predictive.draws import draw


@dataclass(frozen=True)
class Poisson:
    """`p(y|f) = Π_c Poisson(y_c; exp(f_c))` with counts 0, 1, 2, … in the outputs' shape.

    Links of `la.predict(x, link=...)`, log-rates being `N(m, s)`:

    - "exact" (default): the rate is log-normal, so its mean `exp(m + s/2)` and variance are closed forms;
      `log_prob` integrates over it by Gauss–Hermite quadrature, output by output.
    - "mc": the mixture over draws of the log-rates, jointly over the outputs of an example.
    """

    name = "poisson"
    noise = None

    def noise_scale(self, noise: float | Tensor) -> Tensor:
        raise InputError(f"The {self.name} likelihood has no noise to set: the variance of a count is its rate.")

    def check(self, outputs: Tensor, targets: Tensor, where: str) -> None:
        check_finite(outputs, "the model's outputs hold", where)
        check_same_shape(outputs, targets, where)
        check_finite(targets, "the targets hold", where)
        if not bool(((targets >= 0) & (targets == targets.round())).all()):
            raise InputError(f"{where}: counts must be whole numbers of at least 0.")
        if not bool(torch.isfinite(outputs.exp()).all()):
            raise InputError(
                f"{where}: an output of {float(outputs.max()):g} is the logarithm of a rate that overflows in "
                f"{outputs.dtype}. Outputs are log-rates, not rates."
            )

    def statistics(self, outputs: Tensor, targets: Tensor) -> Statistics:
        return Statistics(outputs.shape[0], float(self.log_prob(outputs.double(), targets).sum()))

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counts = targets.to(outputs.dtype)
        terms = counts * outputs - outputs.exp() - torch.lgamma(counts + 1)
        return terms.flatten(1).sum(1) if terms.dim() > 1 else terms

    def hessian_diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp()

    def hessian_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.diag(outputs.exp().sum(0).flatten())

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        return diagonal((0.5 * outputs).exp())

    def signed_columns(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Columns:
        return signed((0.5 * outputs).exp(), generator)

    def sampled_gradients(
        self, outputs: Tensor, targets: Tensor, samples: int, generator: torch.Generator | None
    ) -> Tensor:
        rates = outputs.exp().expand(samples, *outputs.shape)
        return torch.poisson(rates, generator=generator) - rates

    def predict_gaussian(
        self, f: GaussianOutputs, noise: Tensor, link: str | None, samples: int, generator: torch.Generator | None
    ) -> CountPrediction:
        link = choose(link or "exact", ("exact", "mc"), "link for counts")
        if link == "mc":
            return CountPrediction.mixture(draw(f, samples, generator))
        return CountPrediction.log_normal(f.mean, f.variance)

    def predict_samples(self, outputs: Tensor, noise: Tensor) -> CountPrediction:
        return CountPrediction.mixture(outputs)

    def config(self) -> dict[str, Any]:
        return {"name": self.name}
