"""Mean and variance straight from the network: the naive counterpart of `Heteroscedastic`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import IndefiniteWarning, choose, warn
from lapwing.likelihoods import pairs


@dataclass(frozen=True)
class MeanVariance(pairs.PairLikelihood):
    """`p(y|f) = N(y; f1, s(f2))`, for comparison with `Heteroscedastic`, which is the one to use.

    Outputs `[N, ..., 2D]` for targets `[N, ..., D]`, first the D means f1, then the D outputs f2 of the variances.
    `∂² log p/∂v² = (v − 2(y − μ)²)/2v³` has either sign, so the Hessian is indefinite and the exact GGN of this
    parametrization does not exist. Here curvature "ggn" (and "rademacher", "kfra") is the Fisher information
    `diag(1/v, 1/2v²)` through the head, the Hessian's mean over targets drawn from p(y|f): positive semi-definite, but
    blind to how well mean and variance fit the targets. `curvature="hessian"` takes the true one and refuses where
    it is indefinite. A warning says so when the likelihood is made.

    Links of `la.predict` are those of `Heteroscedastic`; "delta" and "known" are the same here.

    Args:
        head: s, "softplus" or "exp".
    """

    head: str = "softplus"
    name = "mean-variance"

    def __post_init__(self) -> None:
        choose(self.head, pairs.HEADS, "head")
        warn(
            "MeanVariance: the Hessian of its negative log-likelihood is indefinite; the Fisher information takes its "
            "place. Use Heteroscedastic, whose natural parameters have a positive semi-definite one.",
            IndefiniteWarning,
        )

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        f1, f2 = pairs.split(outputs)
        return f1, pairs.head(self.head, f2)[0]

    def slopes(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        f1, _ = pairs.split(outputs)
        return torch.ones_like(f1), torch.zeros_like(f1)

    def roots(self, outputs: Tensor) -> Tensor:
        variance, slope = pairs.head(self.head, pairs.split(outputs)[1])
        nothing = torch.zeros_like(variance)
        first = torch.cat([variance.rsqrt(), nothing], -1)
        second = torch.cat([nothing, slope / (math.sqrt(2) * variance)], -1)
        return torch.stack([first, second])
