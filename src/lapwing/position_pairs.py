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
    first, second = torch.triu_indices(g.shape[3], g.shape[3], device=g.device)
    products = torch.zeros_like(g[0, :, :, first])
    for column in g:
        products += column[:, :, first] * column[:, :, second]
    products *= torch.where(first == second, 1, 2).to(g.dtype).unsqueeze(1)
    return torch.einsum("nqpo,nqpi->qoi", products, a[:, :, first] * a[:, :, second])


def variance(g: Tensor, a: Tensor, scale: Tensor) -> Tensor:
    """`Σ_oi D_oi (Σ_r g_knr a_nrᵀ)²` with `D: [Q, O, I]`: `[K, n]`."""
    return torch.einsum("knqro,knqro->kn", g, _weighed(g, a, scale))


def covariance(g: Tensor, a: Tensor, scale: Tensor) -> Tensor:
    """The same between the columns: `[n, K, K]`."""
    left, right = (x.flatten(2).transpose(0, 1) for x in (g, _weighed(g, a, scale)))
    return left @ right.mT


def _weighed(g: Tensor, a: Tensor, scale: Tensor) -> Tensor:
    """`Σ_s w_rso g_kso` with `w_rso = Σ_i a_ri a_si D_oi`: `[K, n, Q, R, O]`."""
    positions = g.shape[3]
    first, second = torch.triu_indices(positions, positions, device=g.device)
    upper = torch.einsum("nqpi,qoi->nqpo", a[:, :, first] * a[:, :, second], scale)
    place = torch.zeros(positions, positions, dtype=torch.long, device=g.device)
    number = torch.arange(len(first), device=g.device)
    place[first, second] = place[second, first] = number
    weights = upper[:, :, place]  # [n, Q, R, R, O]
    return torch.stack([torch.einsum("nqrso,nqso->nqro", weights, column) for column in g])
