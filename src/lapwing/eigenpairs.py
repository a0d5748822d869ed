"""The largest eigenvalues of a matrix that is known by its products only, with their eigenvectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.products import Operator

_SPARE = 8  # vectors of a block beyond the wanted ones


@dataclass(frozen=True)
class Eigenpairs:
    """Orthonormal `vectors: [p, k]` and `values: [k]` in float64, descending.

    `residual` is the largest `‖H v − v θ‖` among them, relative to the largest value, after `passes` products.
    """

    vectors: Tensor
    values: Tensor
    residual: float
    converged: bool
    passes: int


def top_eigenpairs(
    operator: Operator, rank: int, dtype: torch.dtype, max_passes: int = 40, budget: int = 2**30
) -> Eigenpairs:
    """The `rank` largest eigenpairs of a positive semidefinite operator, by block Lanczos with restarts.

    A random block of a few more than `rank` vectors (so that eigenvalues of any multiplicity are found) grows into
    the space that its images under H span, `A Q = Q T + X C Eᵀ`, where E picks the last block. Eigenpairs of
    the small T are those of H up to a residual `‖C s‖`, s their part in the last block. When Q exceeds `budget`
    bytes, it shrinks to its best vectors and grows again. It has converged when all residuals are below `√ε` of the
    largest eigenvalue (ε is the rounding of `dtype`), and below a twentieth of their own where that is above rounding:
    the error of an eigenvalue is about the square of its residual over the gap to the next. So it has when Q
    holds the whole range of H. After `max_passes` products it ends in any case.
    """
    rank = min(rank, operator.size)
    width = min(operator.size, rank + _SPARE)
    rounding = torch.finfo(dtype).eps
    at_once = budget // (operator.size * dtype.itemsize)
    room = min(operator.size, max(2 * width, at_once))
    rows = torch.empty(room, operator.size, dtype=dtype, device=operator.device)  # Qᵀ
    block = _random(operator, width, dtype)
    held, small, coupled, largest = 0, torch.zeros(0, 0).double(), torch.zeros(0, width).double(), 0.0
    for step in range(1, max_passes + 1):
        fresh = block.shape[0]
        image = operator.matmul(block.T).T.to(dtype)
        rows[held : held + fresh] = block
        basis = rows[: held + fresh]
        across = basis @ image.T
        rest = image - across.T @ basis
        products = across.double().cpu()  # Qᵀ H X
        _check_same_data(products[:held], coupled, rounding**0.5 * largest)
        own = 0.5 * (products[held:] + products[held:].T)
        small = torch.cat([
            torch.cat([small, products[:held]], 1),
            torch.cat([products[:held].T, own], 1),
        ])  # fmt: skip
        held += fresh
        values, vectors = torch.linalg.eigh(small)
        largest = max(float(values[-1]), torch.finfo(torch.float32).tiny)
        block, coupling = _next_block(basis, rest, 100 * rounding * largest, operator.size - held)
        residuals = (coupling @ vectors[-fresh:, -rank:]).norm(dim=0)
        fine = torch.maximum(0.05 * values[-rank:], torch.tensor(100 * rounding * largest).double())
        converged = bool((residuals <= fine.clamp(max=rounding**0.5 * largest)).all())
        if converged or step == max_passes:
            break
        if held + block.shape[0] > room:
            kept = min(width, room - block.shape[0])
            rows[:kept] = vectors[:, -kept:].T.to(rows) @ basis
            small, held = torch.diag(values[-kept:]), kept
            coupled = (coupling @ vectors[-fresh:, -kept:]).T
        else:
            coupled = torch.zeros(held, block.shape[0]).double()
            coupled[-fresh:] = coupling.T
    chosen = vectors[:, -rank:].flip(1)
    residual = float(residuals.max()) / largest
    return Eigenpairs(basis.T @ chosen.to(basis), values[-rank:].flip(0).clamp(min=0), residual, converged, step)


def _random(operator: Operator, count: int, dtype: torch.dtype) -> Tensor:
    """Orthonormal rows `[count, p]`, always the same."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(operator.size, count, generator=generator, dtype=dtype).to(operator.device)
    columns: Tensor = torch.linalg.qr(drawn).Q
    return columns.T


def _next_block(basis: Tensor, rest: Tensor, negligible: float, left: int) -> tuple[Tensor, Tensor]:
    """Orthonormal rows X `[c, p]` of the span of `rest` `[b, p]`, and `C = X restᵀ` `[c, b]`.

    `rest` is orthogonal to `basis` `[m, p]` as far as one subtraction goes; X is, to rounding. Directions shorter than
    `negligible` are rounding, and there are no more than `left`.
    """
    columns, triangle = torch.linalg.qr(rest.T)
    outer, lengths, _ = torch.linalg.svd(triangle.double().cpu())
    count = min(left, int((lengths > negligible).sum()))
    block = outer[:, :count].T.to(columns) @ columns.T
    if count:  # short directions are rounding in part: once more, now that they are long
        block = block - (block @ basis.T) @ basis
        root = torch.linalg.cholesky((block @ block.T).double())
        block = torch.linalg.solve_triangular(root, torch.eye(count).to(root), upper=False).to(block) @ block
    return block, (block @ rest.T).double().cpu()


def _check_same_data(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """H is symmetric, so `Qᵀ H X` is known from the passes before. If it is not so, H changed in between."""
    if found.numel() and float((found - expected).abs().max()) > tolerance:
        raise InputError(
            "The curvature changed between passes over the data, which structure='lowrank' reads many times. Show "
            "the same examples in every pass: no random augmentation, no random subset. (Shuffling is fine.)"
        )
