"""A basis of all p directions that is known by the k it singles out.

A tall matrix with orthonormal columns is completed to an orthogonal one `Q: [p, p]` by Householder reflectors, which
are as tall. Products with Q cost O(pk) and are exact to rounding; Q itself is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapwing.basis import Basis
from lapwing.gradients import Gradients, Pair, Rows, parts


@dataclass(frozen=True, eq=False)
class LowRankBasis(Basis):
    """`U = M^{-1/2} Q`, coordinates in ascending order of eigenvalues: the last k belong to `vectors`, up to sign.

    `vectors`, in descending order, are `tall` `[p, k]` itself, or `M^{-1/2} tall rotation` where there is a shape M:
    `root` `[p]` is the diagonal of `M^{-1/2}`, `rotation` `[k, k]` makes the columns orthonormal. One of eigenvalue 0
    may be 0 instead.
    """

    shape: tuple[int]
    tall: Tensor
    rotation: Tensor | None = None
    root: Tensor | None = None

    @property
    def rank(self) -> int:
        """The number k of directions singled out."""
        return self.tall.shape[1]

    @cached_property
    def vectors(self) -> Tensor:
        """The first k columns of Q, up to sign: `[p, k]`. Made when needed; a prior is tuned without."""
        if self.root is None or self.rotation is None:
            return self.tall
        return self.root.unsqueeze(1) * (self.tall @ self.rotation)

    @cached_property
    def columns(self) -> Tensor:
        """The last k columns of U, in descending order: `[p, k]`."""
        return self.vectors if self.root is None else self.root.unsqueeze(1) * self.vectors

    @cached_property
    def _reflectors(self) -> tuple[Tensor, Tensor]:
        return torch.geqrf(self.vectors)

    def coordinates(self, gradients: Gradients, start: int, stop: int) -> Tensor:
        return self.reduce(gradients.rows(start, stop).reshape(gradients.columns, stop - start, -1))

    def expand(self, coordinates: Tensor) -> Tensor:
        vector = self._reflect(coordinates.flip(-1), transpose=True)
        return vector if self.root is None else vector * self.root

    def reduce(self, vector: Tensor) -> Tensor:
        vector = vector if self.root is None else vector * self.root
        return self._reflect(vector, transpose=False).flip(-1)

    def _reflect(self, rows: Tensor, transpose: bool) -> Tensor:
        """`rows Q`, or `rows Qᵀ`: `[*lead, p]`."""
        flat = rows.reshape(-1, self.shape[0]).to(self.tall.dtype)
        return torch.ormqr(*self._reflectors, flat, left=False, transpose=transpose).reshape(rows.shape)

    def split(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """`scale` `[p]` as that of all directions, 0-d, and what it is more in the k singled out, `[k]`:

        `U diag(scale) Uᵀ = floor·M⁻¹ + columns diag(more) columnsᵀ`.
        """
        common, own = scale[: scale.numel() - self.rank], scale[scale.numel() - self.rank :].flip(0)
        floor = common[0] if common.numel() else own[-1]
        if not bool((common == floor).all()):
            raise ValueError("A low-rank basis takes one scale for all directions outside its columns.")
        return floor, own - floor

    def marginal(self, scale: Tensor) -> Tensor:
        floor, more = self.split(scale)
        inside = self.columns.square() @ more.to(self.tall.dtype)
        return inside + (floor if self.root is None else floor * self.root.square()).to(inside.dtype)

    def to(self, dtype: torch.dtype) -> LowRankBasis:
        if dtype == self.tall.dtype:
            return self
        rotation, root = (None if part is None else part.to(dtype) for part in (self.rotation, self.root))
        return LowRankBasis(self.shape, self.tall.to(dtype), rotation, root)


def project(gradients: Gradients, vectors: Tensor, budget: int) -> Tensor:
    """Inner products of each gradient of a layer with the columns of `vectors` `[p, k]`: `[K, n, k]`.

    Either `Σ_r g_r · (V_j a_r)`, or the gradients themselves in chunks and then their products, whichever is less work.
    """
    if isinstance(gradients, Rows):
        return gradients.values @ vectors
    if not isinstance(gradients, Pair):
        return torch.stack([gradients.contract(vector) for vector in vectors.T], dim=2)
    size, count = vectors.shape
    outputs, positions = gradients.g.shape[4], gradients.positions
    through = positions * count * (size + gradients.columns * outputs)
    formed = gradients.columns * size * (positions + count)
    if formed < through:
        chunks = [
            gradients.rows(start, stop).flatten(2) @ vectors for start, stop in parts(gradients, 2 * size, budget)
        ]
        return torch.cat(chunks, dim=1)
    each = gradients.examples * gradients.g[0, 0].numel() * gradients.g.element_size()
    step = max(1, budget // max(1, 2 * each))
    return torch.cat([_through(gradients, part) for part in vectors.split(step, dim=1)], dim=2)


def _through(pair: Pair, vectors: Tensor) -> Tensor:
    matrices = vectors.T.unflatten(1, (pair.g.shape[2], pair.g.shape[4], -1))  # [k, Q, O, I]
    weights = matrices[..., :-1] if pair.inputs.bias else matrices
    a = pair.inputs.part(0, pair.examples).to(pair.g.dtype)
    change = torch.einsum("nqri,jqoi->njqro", a, weights)
    if pair.inputs.bias:
        change = change + matrices[..., -1].unsqueeze(2)
    return torch.einsum("knqro,njqro->knj", pair.g, change)
