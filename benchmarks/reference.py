"""Traces of the curvature by plain autograd and hooks, without Lapwing: what every library's fit must have.

With inputs `a: [N, R, I]` (the bias as one more input that is 1) and gradients `g: [N, R, O]` at the output of a
layer, for each column of `Λ_n^{1/2}`: diag and ekfac have the trace `Σ_n ‖Σ_r g aᵀ‖²` of the matrix itself, kron
(expand) `(Σ_nr |a|² / N R) · Σ_nr |g|²`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import Result
from benchmarks.workloads import Problem, dense_modules

Traces = dict[str, dict[str, float]]


def reference(problem: Problem) -> Result:
    """`{"traces": {structure-curvature: {layer: trace}}}` over all batches of the fit."""
    return {"traces": {f"{s}-{k}": v for k in ("ggn", "empirical") for s, v in _traces(problem, k).items()}}


def _traces(problem: Problem, kind: str) -> Traces:
    layers = dense_modules(problem.model)
    diag, squares, norms, counts = (dict.fromkeys(layers, 0.0) for _ in range(4))
    for x, y in problem.batches:
        inputs, outputs, logits = _record(problem.model, layers, x)
        rows = {name: _rows(layers[name], inputs[name]) for name in outputs}
        for name, a in rows.items():
            norms[name] += float(a.square().sum(dtype=torch.float64))
            counts[name] += a.shape[0] * a.shape[1]
        for column in _columns(logits.detach(), y, kind):
            found = torch.autograd.grad(logits, list(outputs.values()), column, retain_graph=True)
            for (name, layer), gradient in zip(((n, layers[n]) for n in outputs), found, strict=True):
                g = (
                    gradient.flatten(2).mT
                    if isinstance(layer, nn.Conv2d)
                    else gradient.reshape(len(y), -1, gradient.shape[-1])
                )
                diag[name] += _squared_norm(g, rows[name])
                squares[name] += float(g.square().sum(dtype=torch.float64))
    kron = {name: norms[name] / max(counts[name], 1) * squares[name] for name in layers}
    return {"diag": diag, "kron": kron}


def _record(
    model: nn.Module, layers: dict[str, nn.Linear | nn.Conv2d], x: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Inputs and outputs of the layers in one forward pass, and the logits."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers.items():

        def keep(_: nn.Module, given: tuple[Any, ...], output: Tensor, name: str = name) -> None:
            if name in outputs:
                raise NotImplementedError(f"{name} is used twice")
            inputs[name], outputs[name] = given[0].detach(), output

        handles.append(layer.register_forward_hook(keep))
    try:
        logits: Tensor = model(x)
    finally:
        for handle in handles:
            handle.remove()
    return inputs, outputs, logits


def _rows(layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
    """`a: [N, R, I]`, with a 1 for the bias."""
    if isinstance(layer, nn.Conv2d):
        assert layer.groups == 1
        assert not isinstance(layer.padding, str)
        a = functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
    else:
        a = x.reshape(x.shape[0], -1, x.shape[-1])
    return a if layer.bias is None else functional.pad(a, (0, 1), value=1.0)


def _squared_norm(g: Tensor, a: Tensor) -> float:
    """`Σ_n ‖Σ_r g aᵀ‖²`, by products between positions where they are few."""
    positions, outputs, inputs = g.shape[1], g.shape[2], a.shape[2]
    if positions * (outputs + inputs) < outputs * inputs:
        return float(((g @ g.mT) * (a @ a.mT)).sum(dtype=torch.float64))
    return float((g.mT @ a).square().sum(dtype=torch.float64))


def _columns(logits: Tensor, y: Tensor, kind: str) -> Iterator[Tensor]:
    """Vectors `[N, C]` whose outer products add up to `Λ_n`, or the gradient of the loss itself."""
    p = logits.softmax(1)
    if kind == "empirical":
        yield p - functional.one_hot(y, p.shape[1])
        return
    for k in range(p.shape[1]):
        yield (functional.one_hot(torch.tensor(k), p.shape[1]) - p) * p[:, k : k + 1].sqrt()
