"""Squares of gradients that are sums over few positions, without the gradients.

`(Σ_r g_r a_rᵀ)²`, elementwise, is `Σ_rs (g_r ∘ g_s)(a_r ∘ a_s)ᵀ`: a product of two matrices with one row for every
pair of positions. That is less work than forming `Σ_r g_r a_rᵀ` for every column where R < 2K, and takes no memory
for it. `g: [K, n, Q, R, O]` and `a: [n, Q, R, I]` are in the coordinates of a basis.
"""

from __future__ import annotations

import torch
from torch import Tensor


def squares(g: Tensor, a: Tensor) -> Tensor:
    """`Σ_kn (Σ_r g_knr a_nrᵀ)²`: `[Q, O, I]`."""
    products, positions = _products(g[0]), g.shape[3]
    for column in g[1:]:
        products += _products(column)
    products[:, :, positions:] *= 2  # (r, s) and (s, r)
    return torch.einsum("nqpo,nqpi->qoi", products, _products(a))


def variance(g: Tensor, a: Tensor, scale: Tensor) -> Tensor:
    """`Σ_oi D_oi (Σ_r g_knr a_nrᵀ)²` with `D: [Q, O, I]`: `[K, n]`."""
    return torch.einsum("knqro,knqro->kn", g, _weighed(g, a, scale))


def covariance(g: Tensor, a: Tensor, scale: Tensor) -> Tensor:
    """The same between the columns: `[n, K, K]`."""
    left, right = (x.flatten(2).transpose(0, 1) for x in (g, _weighed(g, a, scale)))
    return left @ right.mT


def _products(x: Tensor) -> Tensor:
    """`x_r ∘ x_{r+d}` of `x: [n, Q, R, D]`, all r of d = 0 first, then of d = 1, and so on: `[n, Q, R(R + 1)/2, D]`."""
    positions = x.shape[2]
    return torch.cat([x[:, :, : positions - d] * x[:, :, d:] for d in range(positions)], dim=2)


def _weighed(g: Tensor, a: Tensor, scale: Tensor) -> Tensor:
    """`Σ_s w_rso g_kso` with `w_rso = Σ_i a_ri a_si D_oi`: `[K, n, Q, R, O]`."""
    upper = torch.einsum("nqpi,qoi->nqpo", _products(a), scale)
    row = torch.arange(g.shape[3], device=g.device)
    first, gap = torch.minimum(row, row.unsqueeze(1)), (row - row.unsqueeze(1)).abs()
    weights = upper[:, :, gap * len(row) - gap * (gap - 1) // 2 + first]  # [n, Q, R, R, O]
    return torch.stack([torch.einsum("nqrso,nqso->nqro", weights, column) for column in g])
