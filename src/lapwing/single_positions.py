"""Variances of layers with one position per example, such as linear ones: `g_kᵀ U_G diag(w_n) U_Gᵀ g_l`.

`w_no = Σ_i â_ni² D_oi` are the weights of an example. Where the curvature of an output direction vanishes, D is
constant and so is w, at its ceiling `w₀ = ‖â‖² max D`. There is no need to rotate into such directions: with
`Σ_o ĝ_k ĝ_l = g_k·g_l` the rest is `w₀ g_k·g_l − Σ_top ĝ_k ĝ_l (w₀ − w)`. Of an input direction without curvature
only `Σ â²` is needed, which is what the others leave of `‖a‖²`.

Examples for which these are differences of much larger numbers are rotated anew, into all directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.gradients import Pair, parts
from lapwing.matmul import times

if TYPE_CHECKING:
    from lapwing.basis import KroneckerBasis

_LOST = 1e-4  # of a variance, about, by a difference of larger numbers
_CHUNK = 2**23  # bytes of gradients that stay in the cache: what follows a rotation is elementwise


def variance(basis: KroneckerBasis, pair: Pair, scale: Tensor) -> Tensor:
    """`g_knᵀ U diag(scale) Uᵀ g_kn`: `[K, n]`."""
    return _contracted(basis, pair, scale, _squares).T


def covariance(basis: KroneckerBasis, pair: Pair, scale: Tensor) -> Tensor:
    """The same between the columns: `[n, K, K]`."""
    return _contracted(basis, pair, scale, _outer)


def _contracted(
    basis: KroneckerBasis, pair: Pair, scale: Tensor, contract: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    skipped = without_curvature(basis, scale, 0), without_curvature(basis, scale, 1)
    found = []
    for start, stop in parts(pair, basis.shape[0] * basis.shape[1], _CHUNK):
        g, a = pair.g[:, start:stop], pair.inputs.part(start, stop)
        single = _weighed(basis, g, a, pair.inputs.bias, scale, skipped)
        values = contract(single.rotated, single.weights)
        lost = single.lost
        if single.plain is not None:
            whole = contract(single.plain, single.ceiling.unsqueeze(-1))
            values = whole - values
            lost = lost | (_variances(values) < _few_digits(scale) * _variances(whole)).any(1)
        if bool(lost.any()):
            index = lost.nonzero().squeeze(1)
            again = _weighed(basis, g[:, index], a[index], pair.inputs.bias, scale, (0, 0))
            values = values.index_copy(0, index, contract(again.rotated, again.weights))
        found.append(values)
    return torch.cat(found)


def without_curvature(basis: KroneckerBasis, scale: Tensor, side: int) -> int:
    """How many directions of the outputs (0) or inputs (1), from the first, may be left out of a rotation: those in
    which `scale` is at its height; none where few are.
    """
    if not (isinstance((basis.output, basis.input)[side], Tensor) and basis.orthonormal[side]):
        return 0
    flat = scale.amin((0, 2 - side)) >= (1 - 32 * torch.finfo(scale.dtype).eps) * scale.amax()
    count = int(flat.to(torch.int8).cumprod(0).sum())  # eigenvalues ascend
    return count if 4 * count >= len(flat) else 0


@dataclass(frozen=True)
class _Weighed:
    """A few examples: `ĝ: [K, n, Q, O']`, their weights `[n, Q, O']`, and which of them lost digits in these, `[n]`.

    Where output directions were left out, the weights are what they lack of their ceiling `[n, Q]`, and `plain` are
    the gradients themselves, `[K, n, Q, O]`.
    """

    rotated: Tensor
    weights: Tensor
    lost: Tensor
    plain: Tensor | None = None
    ceiling: Tensor = field(default_factory=lambda: torch.zeros(()))


def _weighed(
    basis: KroneckerBasis, g: Tensor, a: Tensor, bias: bool, scale: Tensor, skipped: tuple[int, int]
) -> _Weighed:
    """Of `g: [K, n, Q, 1, O]` and `a: [n, Q, 1, I]`, without the first so many directions of either side."""
    highest, (skip, inner) = scale.amax(), skipped
    top = replace(
        basis,
        output=basis.output[..., skip:] if isinstance(basis.output, Tensor) else basis.output,
        input=basis.input[..., inner:] if isinstance(basis.input, Tensor) else basis.input,
    )
    rotated, inside = top.rotate(g, a, bias)
    rotated, squares = rotated.squeeze(3), inside.squeeze(2).square()
    size, weights = squares.sum(2), times(squares.unsqueeze(2), scale[:, skip:, inner:].mT).squeeze(2)
    if inner:
        whole = a.squeeze(2).to(g.dtype).square().sum(2) + bias
        weights = weights + (highest * _not_negative(whole - size)).unsqueeze(2)
        size = whole
    ceiling = highest * size
    lost = (weights < _few_digits(scale) * ceiling.unsqueeze(2)).flatten(1).any(1) & bool(inner)
    if not skip:
        return _Weighed(rotated, weights, lost)
    return _Weighed(rotated, _not_negative(ceiling.unsqueeze(2) - weights), lost, g.squeeze(3), ceiling)


def _not_negative(values: Tensor) -> Tensor:
    """At least 0, as they are up to rounding; derivatives stay those of the values."""
    return values + (values.clamp(min=0) - values).detach()


def _few_digits(like: Tensor) -> float:
    """A difference this many times as small as what it is a difference of may be off by `_LOST` of itself."""
    return torch.finfo(like.dtype).eps / _LOST


def _squares(g: Tensor, weights: Tensor) -> Tensor:
    """`Σ_qo w_nqo g_knqo²`: `[n, K]`."""
    return torch.einsum("knqo,nqo->nk", g.square(), weights.expand(*g.shape[1:]))


def _outer(g: Tensor, weights: Tensor) -> Tensor:
    """`Σ_qo w_nqo g_knqo g_lnqo`: `[n, K, K]`."""
    left, right = (x.flatten(2).transpose(0, 1) for x in (g, g * weights))
    return left @ right.mT


def _variances(values: Tensor) -> Tensor:
    """Variances `[n, K]`, given as such or among covariances `[n, K, K]`."""
    return values if values.dim() == 2 else values.diagonal(dim1=1, dim2=2)
