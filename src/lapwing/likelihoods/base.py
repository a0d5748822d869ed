"""What a likelihood p(y|f) owns. Outputs are f: `[N, *output]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lapwing.columns import Columns
from lapwing.errors import InputError

if TYPE_CHECKING:
    from lapwing.predictive.prediction import Prediction


@dataclass(frozen=True)
class Statistics:
    """Sufficient statistics of the data at the trained weights, at unit noise; sums over the data.

    `log_likelihood` is Σ log p, `observations` counts the numbers, classes or answers observed, and `squared_error` is
    the weighted squared error of numbers (0 unless there is a noise to choose); `errors` holds the squared errors by
    the last dimension of the outputs.
    """

    examples: float = 0.0
    log_likelihood: float = 0.0
    observations: float = 0.0
    squared_error: float = 0.0
    errors: Tensor | None = None

    def __add__(self, other: Statistics) -> Statistics:
        if self.errors is None or other.errors is None:
            errors = other.errors if self.errors is None else self.errors
        else:
            errors = self.errors + other.errors
        return Statistics(
            self.examples + other.examples,
            self.log_likelihood + other.log_likelihood,
            self.observations + other.observations,
            self.squared_error + other.squared_error,
            errors,
        )

    def scale(self, factor: float) -> Statistics:
        return Statistics(
            self.examples * factor,
            self.log_likelihood * factor,
            self.observations * factor,
            self.squared_error * factor,
            None if self.errors is None else self.errors * factor,
        )

    def log_likelihood_at(self, noise: Tensor) -> Tensor:
        """`Σ log p` when the noise variance is `noise` times that of the fit; 0-d."""
        return self.log_likelihood - 0.5 * self.observations * noise.log() + 0.5 * self.squared_error * (1 - 1 / noise)


@dataclass(frozen=True)
class GaussianOutputs:
    """Outputs f ~ N: `mean` and `variance` `[N, *output]`, and where kept the `covariance` `[N, D, D]`."""

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None


class Likelihood(Protocol):
    """One object for all of p(y|f): factors of N, ½, reductions and masks live here and nowhere else.

    Curvature and gradients are at unit noise: `noise` multiplies the variance afterwards. It is 1
    for likelihoods without a noise.
    """

    name: str

    @property
    def noise(self) -> float | None:
        """The noise variance to start from, or None where there is none."""

    def noise_scale(self, noise: float | Tensor) -> Tensor:
        """The scalar σ² (0-d, autograd kept) that a noise variance means; an error where there is none to set."""

    def check(self, outputs: Tensor, targets: Tensor, where: str) -> None:
        """Raise `InputError` if the targets do not fit the outputs."""

    def statistics(self, outputs: Tensor, targets: Tensor) -> Statistics:
        """Sums over the batch."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`log p(y_n|f_n)` with all normalizers at unit noise: `[N]`."""

    def hessian_diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The diagonal of every `Λ_n`: `[N, *output]`."""

    def hessian_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`Σ_n Λ_n`, the D outputs of an example flat: `[D, D]`."""

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Columns:
        """`S_n` with `S_n S_nᵀ = Λ_n = −∇²_f log p(y_n|f_n)`, exactly."""

    def signed_columns(self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None) -> Columns:
        """Fewer columns `s_nk` with `E[Σ_k s_nk s_nkᵀ] = Λ_n`: sums with random signs of exact ones.

        One column where every position of the output has one or the output is a single position; else one for
        each column of a position, summed over the positions, whose cross terms vanish on average.
        """

    def sampled_gradients(
        self, outputs: Tensor, targets: Tensor, samples: int, generator: torch.Generator | None
    ) -> Tensor:
        """`∇_f log p(y'|f_n)` with y' drawn from p(y|f_n): `[S, N, *output]`."""

    def predict_gaussian(
        self, f: GaussianOutputs, noise: Tensor, link: str | None, samples: int, generator: torch.Generator | None
    ) -> Prediction:
        """Integrate p(y|f) over f ~ N(mean, covariance), in closed form or by Monte Carlo in f."""

    def predict_samples(self, outputs: Tensor, noise: Tensor) -> Prediction:
        """The equal mixture of p(y|f_s) over outputs `[S, N, *output]`."""

    def config(self) -> dict[str, Any]:
        """What a file must keep to build the likelihood again."""


def check_finite(values: Tensor, what: str, where: str) -> None:
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        raise InputError(f"{where}: {what} NaN or inf.")


def check_same_shape(outputs: Tensor, targets: Tensor, where: str) -> None:
    """Targets of a real value per output must have the shape of the outputs."""
    if targets.shape == outputs.shape:
        return
    fix = "Give targets the shape of the outputs."
    if targets.dim() == outputs.dim() - 1 and outputs.shape[-1] == 1:
        fix = "Use y.unsqueeze(-1) in the data set, or squeeze the model's output."
    raise InputError(
        f"{where}: targets of shape {list(targets.shape)} against outputs of shape {list(outputs.shape)}. {fix}"
    )
