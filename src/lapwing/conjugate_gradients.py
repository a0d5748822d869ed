"""Solutions of `P x = b` for many right-hand sides at once, where P is known by its products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lapwing.products import Operator
from lapwing.progress import bar

Product = Callable[[Tensor], Tensor]
Measure = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Precision:
    """`P = scale·H + Π` with a diagonal Π, `prior: [p]`, and an operator H."""

    operator: Operator
    scale: float
    prior: Tensor

    def matmul(self, vectors: Tensor) -> Tensor:
        """`P V` for `[p, k]`; one product with H."""
        return self.scale * self.operator.matmul(vectors) + self.prior.unsqueeze(1) * vectors

    def relax(self, vectors: Tensor) -> Tensor:
        """`Π⁻¹ V`: the preconditioner that is always there."""
        return vectors / self.prior.unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Solution:
    """`vectors: [p, k]`, what is left of the right-hand sides, `residuals: [p, k]`, and by how much each misses its

    aim, `errors: [k]` (as measured by the caller). `products` counts passes over the data.
    """

    vectors: Tensor
    residuals: Tensor
    errors: Tensor
    products: int
    converged: bool


def solve(
    matmul: Product,
    right: Tensor,
    start: Tensor,
    precondition: Product,
    measure: Measure,
    tolerance: float,
    max_products: int,
    title: str,
    show: bool,
) -> Solution:
    """Preconditioned conjugate gradients, one recursion for each column of `right: [p, k]`, the products shared.

    A column rests once `measure(x, r, e) ≤ tolerance`, where `e = √(rᵀ M⁻¹ r)`, `[k]`, with the preconditioner M, says
    how far off it is in the norm of P: at most so far if `M ≤ P`, as a prior is; about so far if M is close to P.
    In the end residuals are computed anew, and where rounding of the products had led the recursion astray it starts
    again from there.
    """
    x = start.clone()
    residual = right - matmul(x)
    directions = precondition(residual)
    slopes = (residual * directions).sum(0)
    exact = True
    steps = 1
    for _ in bar(range(1, max_products), title, show):
        active = (measure(x, residual, slopes.sqrt()) > tolerance).nonzero().squeeze(1)
        if not len(active) and exact:
            break
        steps += 1
        if not len(active):
            residual = right - matmul(x)
            directions = precondition(residual)
            slopes, exact = (residual * directions).sum(0), True
            continue
        along = directions[:, active]
        image = matmul(along)
        length = slopes[active] / (along * image).sum(0)
        x[:, active] += length * along
        residual[:, active] -= length * image
        relaxed = precondition(residual[:, active])
        after = (residual[:, active] * relaxed).sum(0)
        directions[:, active] = relaxed + (after / slopes[active]) * along
        slopes[active], exact = after, False
    errors = measure(x, residual, slopes.sqrt())
    return Solution(x, residual, errors, steps, bool((errors <= tolerance).all()))
