"""The structures by name: how layers are grouped into blocks, and which accumulator a block gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.basis import DenseBasis, KroneckerBasis
from lapwing.curvature.accumulator import Accumulator, sum_dtype
from lapwing.curvature.dense import DenseAccumulator
from lapwing.curvature.diagonal import DiagonalAccumulator
from lapwing.curvature.kronecker import KroneckerAccumulator
from lapwing.curvature.lowrank import LowRankAccumulator
from lapwing.curvature.tied import TiedAccumulator
from lapwing.errors import InputError
from lapwing.gradients import Layer
from lapwing.gram import Gram


@dataclass(frozen=True)
class StructureOptions:
    """`kron`: "expand" or "reduce". `max_dense`: largest dense block of a layer without Kronecker form.
    `max_factor`: a Kronecker side above it is diagonal. `budget`: bytes for intermediate results. `rank`: eigenpairs
    of a low-rank curvature.
    """

    kron: str = "expand"
    max_dense: int = 1024
    max_factor: int = 16384
    budget: int = 2**30
    rank: int = 32


_ROLES = {"pair": (False,), "tokens": (True,), "tied": (False, True)}  # which sides hold the inputs, by form
Build = Callable[[tuple[Layer, ...], StructureOptions, Tensor], Accumulator]


def _diag(layers: tuple[Layer, ...], options: StructureOptions, like: Tensor) -> Accumulator:
    (layer,) = layers
    basis = DenseBasis((layer.size,)) if layer.shape is None else KroneckerBasis(layer.shape)
    return DiagonalAccumulator(basis, like.new_zeros(basis.shape), options.budget)


def _kron(layers: tuple[Layer, ...], options: StructureOptions, like: Tensor) -> Accumulator:
    (layer,) = layers
    exact = layer.form == "tied" and layer.size <= options.max_dense  # no single Kronecker product is exact
    if layer.shape is not None and not exact:
        reduce = options.kron == "reduce"
        parts = [
            KroneckerAccumulator.zeros(layer.shape, reduce, options.max_factor, options.budget, like, turned)
            for turned in _ROLES[layer.form]
        ]
        return parts[0] if len(parts) == 1 else TiedAccumulator(parts[0], parts[1])
    return (_dense if layer.size <= options.max_dense else _diag)(layers, options, like)


def _dense(layers: tuple[Layer, ...], options: StructureOptions, like: Tensor) -> Accumulator:
    return _dense_of(sum(layer.size for layer in layers), layers, options, like)


def _dense_of(size: int, layers: tuple[Layer, ...], options: StructureOptions, like: Tensor) -> Accumulator:
    if size * size * like.element_size() > 2**34:
        raise InputError(
            f"A dense block of {layers[0].name!r}{' and others' if len(layers) > 1 else ''} needs a matrix of {size} × "
            f"{size} numbers. Use structure='kron', 'ekfac' or 'diag', or make fewer weights Bayesian "
            "(weights='last_layer' or a glob)."
        )
    return DenseAccumulator(Gram.zeros(1, size, True, like), options.budget)


def _lowrank(layers: tuple[Layer, ...], options: StructureOptions, like: Tensor) -> Accumulator:
    return LowRankAccumulator.zeros(sum(layer.size for layer in layers), options.rank, like)


STRUCTURES: dict[str, Build] = {
    "diag": _diag, "kron": _kron, "ekfac": _kron, "block": _dense, "full": _dense, "lowrank": _lowrank
}  # fmt: skip
DENSE = ("block", "full")


def arrange(structure: str, layers: tuple[Layer, ...], options: StructureOptions) -> tuple[Layer, ...]:
    """Split layers that come as rows and are too large for one dense block into their parameters."""
    if structure not in ("kron", "ekfac"):
        return layers
    arranged: list[Layer] = []
    for layer in layers:
        if layer.shape is not None or layer.size <= options.max_dense or len(layer.parameters) == 1:
            arranged.append(layer)
            continue
        for name, size in zip(layer.parameters, layer.sizes, strict=True):
            arranged.append(replace(layer, name=name, parameters=(name,), sizes=(size,)))
    return tuple(arranged)


def group(structure: str, layers: tuple[Layer, ...]) -> list[tuple[Layer, ...]]:
    """The layers of each block: one a block, or all in one for the full and the low-rank structure."""
    return [layers] if structure in ("full", "lowrank") else [(layer,) for layer in layers]


def build(
    structure: str,
    layers: tuple[Layer, ...],
    options: StructureOptions,
    like: Tensor,
    kind: str | None = None,
    chosen: Tensor | None = None,
) -> Accumulator:
    """An empty accumulator for a block of these layers; `like` gives device and dtype.

    `kind` "ekfac" is that of a block in its second phase, whose basis is filled in by `load`. Where only some
    parameters are `chosen`, `[k]`, the block is dense.
    """
    like = torch.empty(0, dtype=sum_dtype(like.dtype), device=like.device)
    if kind == "ekfac":
        assert layers[0].shape is not None
        return DiagonalAccumulator(KroneckerBasis(layers[0].shape), like, options.budget, "ekfac")
    if chosen is not None:
        return _dense_of(chosen.numel(), layers, options, like)
    return STRUCTURES[structure](layers, options, like)
