"""The gradient `∇ = Σ_n J_nᵀ ∇_f log p` that a fit keeps besides the curvature, by layer and in its layout."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.columns import given
from lapwing.curvature.accumulator import sum_dtype
from lapwing.slope import Slope
from lapwing.tape import Record, Tape


def multiples(of: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """How many times those `of` the vectors are, `[N]` from `[N, D]` each, and whether they are, up to rounding (little
    of that in half precision); 1 where they are not.
    """
    rounding = min(64 * torch.finfo(of.dtype).eps, 1e-3)
    size = of.abs().amax(1)
    unit = of / size.clamp(min=torch.finfo(of.dtype).tiny).unsqueeze(1)  # so that no square underflows
    times = (unit * vectors).sum(1) / (unit.square().sum(1) * size)
    times = torch.where((size == 0) | ((times - 1).abs() <= rounding), torch.ones_like(times), times)
    gap = (vectors - times.unsqueeze(1) * of).abs().amax(1)
    along = gap <= rounding * vectors.abs().amax(1)
    return torch.where(along, times, torch.ones_like(times)), along


def add_gradient(record: Record, vectors: Tensor, slopes: dict[str, Tensor]) -> None:
    """Add `Σ_n J_nᵀ v_n`, `vectors: [N, *output]`, by a backward pass: to the recorded outputs, which is less work,
    where all layers are read there and no graph of the gradients is made.
    """
    layers = record.tape.layers or ()
    read = not any(layer.path == "fallback" or layer.name in record.lost for layer in layers)
    if read and not record.create_graph:
        record.sweep(given(vectors.unsqueeze(0)), None, None, {layer.name for layer in layers}, Slope(slopes))
        return
    found = record.gradient(vectors)
    for layer in layers:
        packed = layer.pack({name: found[name] for name in layer.parameters})
        packed = packed.to(sum_dtype(packed.dtype))
        slopes[layer.name] = slopes[layer.name] + packed if layer.name in slopes else packed


def by_parameter(tape: Tape, slopes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients in the layout of each layer by the names of its parameters; 0 where no batch reached a layer."""
    found: dict[str, Tensor] = {}
    for layer in tape.layers or ():
        like = tape.parameters[layer.parameters[0]].detach()
        packed = slopes.get(layer.name)
        if packed is None:
            packed = torch.zeros(layer.size, dtype=sum_dtype(like.dtype), device=like.device)
        found |= layer.unpack(packed)
    return {name: found[name] for name in tape.parameters}
