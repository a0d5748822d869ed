"""The direction of limited-memory BFGS: a metric that is known, improved by the last steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def direction(gradient: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], metric: Callable[[Tensor], Tensor]) -> Tensor:
    """`H g` by the two-loop recursion, for steps up a gradient `[p]` of a function that is to be maximized.

    `pairs` are the last steps and how much the gradient fell along each, `(x₊ − x, g − g₊)`; those along which it did
    not fall are left out. `metric` is `g ↦ H₀ g`, symmetric and positive definite.
    """
    kept = [(moved, bent, float(moved @ bent)) for moved, bent in pairs if float(moved @ bent) > 0]
    found, factors = gradient.clone(), []
    for moved, bent, product in reversed(kept):
        factors.append(float(moved @ found) / product)
        found = found - factors[-1] * bent
    found = metric(found)
    for (moved, bent, product), factor in zip(kept, reversed(factors), strict=True):
        found = found + (factor - float(bent @ found) / product) * moved
    return found
