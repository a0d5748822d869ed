"""Real targets whose noise the network predicts as well: the Gaussian in its natural parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import choose
from lapwing.likelihoods import pairs


@dataclass(frozen=True)
class Heteroscedastic(pairs.PairLikelihood):
    """`p(y|f) = N(y; μ, v)` with both natural parameters from the network (Immer et al. 2023).

    Outputs `[N, ..., 2D]` for targets `[N, ..., D]`, first the D outputs f1, then the D outputs f2:
    `η1 = f1`, `η2 = −½ s(f2)` with the head s, and `μ = −η1/2η2 = f1/s(f2)`, `v = −1/2η2 = 1/s(f2)`.

    In η the log-likelihood is concave: its gradient is `(y − μ, y² − μ² − v)`, its negative Hessian
    `Λ_η = [[v, 2μv], [2μv, 4μ²v + 2v²]]`, free of y and equal to the Fisher information. The head counts as the last
    part of the network: `Λ_f = J_headᵀ Λ_η J_head` leaves out the head's own second derivative, as the
    generalized Gauss–Newton matrix leaves out that of the network. So `Λ_f` is positive semi-definite, and equals
    the mean of `−∇²_f log p` over targets drawn from p(y|f).

    Links of `la.predict(x, link=...)`, f being Gaussian:

    - "delta" (default): `N(μ, J_μ P⁻¹ J_μᵀ + v)` with `J_μ = v J_η1 + 2μv J_η2`, the mean to first order.
    - "known": `N(μ, v² J_η1 P⁻¹ J_η1ᵀ + v)`, as if η2 were known; the variance of f1 is all it needs.
    - "mc": draws of f through the head (η2 < 0 whatever f2), a mixture of Gaussians: the variance is uncertain too.

    The first two have the variance v of the network at its mean as aleatoric part. There is no `noise` to set or tune.
    `find_mode` works in f, where through the head the problem need not be convex: its mode is then a local one.

    Args:
        head: s, "softplus" or "exp".
    """

    head: str = "softplus"
    name = "heteroscedastic"

    def __post_init__(self) -> None:
        choose(self.head, pairs.HEADS, "head")

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        f1, f2 = pairs.split(outputs)
        precision, _ = pairs.head(self.head, f2)
        return f1 / precision, precision.reciprocal()

    def slopes(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.moments(outputs)
        _, slope = pairs.head(self.head, pairs.split(outputs)[1])
        return variance, -mean * variance * slope

    def roots(self, outputs: Tensor) -> Tensor:
        mean, variance = self.moments(outputs)
        through = -0.5 * pairs.head(self.head, pairs.split(outputs)[1])[1]  # ∂η2/∂f2
        first = torch.cat([variance.sqrt(), 2 * mean * variance.sqrt() * through], -1)
        second = torch.cat([torch.zeros_like(variance), math.sqrt(2) * variance * through], -1)
        return torch.stack([first, second])
