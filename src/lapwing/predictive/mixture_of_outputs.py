"""The equal mixture of p(y|f) over drawn outputs, for a likelihood that says no more than its log-probability."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.predictive.prediction import Prediction


@dataclass(frozen=True)
class OutputMixture(Prediction):
    """`p(y) = (1/S) Σ_s p(y|f_s)` over draws `outputs: [S, N, *output]`.

    `mean`, `epistemic` and, with the likelihood's `variance` as well, `aleatoric`, `variance` and `std` are there if
    the likelihood has the methods they need.
    """

    outputs: Tensor
    likelihood: Any = field(repr=False)

    def log_prob(self, targets: Tensor) -> Tensor:
        """The logarithm of the mean probability over the draws: `[N]`."""
        each = torch.stack([self.likelihood.log_prob(one, targets) for one in self.outputs])
        return each.logsumexp(0) - math.log(len(each))

    def _of(self, method: str) -> Tensor:
        function = getattr(self.likelihood, method, None)
        if function is None:
            raise InputError(
                f"The {self.likelihood.name} likelihood has no method {method}(outputs), which this attribute of a "
                "prediction needs. Write it, or use log_prob."
            )
        found: Tensor = function(self.outputs)
        return found

    @property
    def mean(self) -> Tensor:
        """Of the targets."""
        return self._of("mean").mean(0)

    @property
    def epistemic(self) -> Tensor:
        """The variance over the draws of the targets' mean given f."""
        return self._of("mean").var(0, correction=0)

    @property
    def aleatoric(self) -> Tensor:
        """The mean over the draws of the targets' variance given f."""
        return self._of("variance").mean(0)

    @property
    def variance(self) -> Tensor:
        """`aleatoric + epistemic`."""
        return self.aleatoric + self.epistemic

    @property
    def std(self) -> Tensor:
        """Its square root."""
        return self.variance.sqrt()
