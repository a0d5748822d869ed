"""Brute force: dense algebra in float64 by plain autograd. Slow, obvious, and independent of the library's
tape, structures and spectra."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapwing import Laplace
from lapwing.likelihoods import Likelihood

_JACOBIANS: dict[Any, dict[str, Tensor]] = {}


def jacobian(model: nn.Module, x: Any, names: list[str]) -> dict[str, Tensor]:
    """`{name: [N, D, *shape]}`, one backward pass for every output of every example; remembered by values."""
    values = (*model.state_dict().values(), x)
    plain = tuple(str(v) for part in model.modules() for v in vars(part).values() if isinstance(v, int | float | str))
    key = (repr(model), plain, tuple(names), tuple((value.shape, value.cpu().numpy().tobytes()) for value in values))
    if key not in _JACOBIANS:
        _JACOBIANS[key] = _jacobian(model, x, names)
    return _JACOBIANS[key]


def _jacobian(model: nn.Module, x: Any, names: list[str]) -> dict[str, Tensor]:
    parameters = [model.get_parameter(name) for name in names]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    outputs = model(x).flatten(1)
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for value in outputs.flatten():
        found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        for name, parameter, gradient in zip(names, parameters, found, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    for module, mode in modes:
        module.training = mode
    return {name: torch.stack(values).unflatten(0, outputs.shape) for name, values in rows.items()}


def packed_jacobian(la: Laplace, x: Any) -> Tensor:
    """`[N, D, p]` with the parameters in the order of the blocks."""
    found = jacobian(la.model, x, list(la.curvature.parameters))
    return torch.cat([block.pack(found) for block in la.curvature.blocks], dim=-1)


def output_hessians(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """`Λ_n = −∇²_f log p(y_n|f_n)`: `[N, D, D]`, by double autograd."""
    found = []
    for n in range(outputs.shape[0]):
        target = targets[n : n + 1]

        def negative(f: Tensor, target: Tensor = target) -> Tensor:
            return -likelihood.log_prob(f.unsqueeze(0), target).sum()

        hessian = torch.autograd.functional.hessian(negative, outputs[n].detach())
        size = outputs[n].numel()
        found.append(hessian.reshape(size, size))  # type: ignore[union-attr]
    return torch.stack(found)


def output_gradients(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """`∇_f log p`: `[N, D]`."""
    leaf = outputs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(likelihood.log_prob(leaf, targets).sum(), leaf)
    return gradient.flatten(1)


def evaluate(model: nn.Module, x: Any) -> Tensor:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        outputs: Tensor = model(x)
    for module, mode in modes:
        module.training = mode
    return outputs


def curvature(la: Laplace, batches: list[tuple[Any, Tensor]], generator: torch.Generator | None = None) -> Tensor:
    """H of the Laplace object's kind over all its parameters, dense: `[p, p]`."""
    size = la.curvature.size
    total = torch.zeros(size, size, dtype=torch.float64)
    for x, y in batches:
        outputs = evaluate(la.model, x)
        if la.curvature_kind == "hessian":
            total += exact_hessian(la, x, y)
            continue
        rows = packed_jacobian(la, x)
        if la.curvature_kind == "ggn":
            middle = output_hessians(la.likelihood, outputs, y)
        elif la.curvature_kind == "rademacher":
            draws = [la.likelihood.signed_columns(outputs, y, generator) for _ in range(la.fisher_samples)]
            signed = torch.cat([draw.part(0, draw.count) for draw in draws]).flatten(2)
            middle = torch.einsum("snc,snd->ncd", signed, signed) / la.fisher_samples
        elif la.curvature_kind == "fisher":
            drawn = la.likelihood.sampled_gradients(outputs, y, la.fisher_samples, generator).flatten(2)
            middle = torch.einsum("snc,snd->ncd", drawn, drawn) / la.fisher_samples
        else:
            slopes = output_gradients(la.likelihood, outputs, y)
            middle = torch.einsum("nc,nd->ncd", slopes, slopes)
        total += torch.einsum("nci,ncd,ndj->ij", rows, middle, rows)
    return total


def exact_hessian(la: Laplace, x: Any, y: Tensor) -> Tensor:
    names = list(la.curvature.parameters)
    parameters = [la.model.get_parameter(name) for name in names]
    modes = [(module, module.training) for module in la.model.modules()]
    la.model.eval()
    with sdpa_kernel(SDPBackend.MATH):
        loss = -la.likelihood.log_prob(la.model(x), y).sum()
    slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    filled = [torch.zeros_like(p) if s is None else s for p, s in zip(parameters, slopes, strict=True)]
    blocks = la.curvature.blocks
    packed = torch.cat([block.pack(dict(zip(names, filled, strict=True))) for block in blocks])
    rows = []
    for entry in packed:
        found: Any = [None] * len(names)
        if entry.requires_grad:
            found = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True)
        values = {n: torch.zeros_like(p) if f is None else f for n, p, f in zip(names, parameters, found, strict=True)}
        rows.append(torch.cat([block.pack(values) for block in blocks]))
    for module, mode in modes:
        module.training = mode
    return torch.stack(rows)


def gradient(la: Laplace, batches: list[tuple[Any, Tensor]]) -> Tensor:
    """`Σ_n J_nᵀ ∇_f log p`: `[p]`."""
    total = torch.zeros(la.curvature.size, dtype=torch.float64)
    for x, y in batches:
        slopes = output_gradients(la.likelihood, evaluate(la.model, x), y)
        total += torch.einsum("ncp,nc->p", packed_jacobian(la, x), slopes)
    return total


def layer_slices(la: Laplace) -> list[slice]:
    slices, start = [], 0
    for block in la.curvature.blocks:
        for layer in block.layers:
            slices.append(slice(start, start + layer.size))
            start += layer.size
    return slices


def block_diagonal(matrix: Tensor, slices: list[slice]) -> Tensor:
    kept = torch.zeros_like(matrix)
    for part in slices:
        kept[part, part] = matrix[part, part]
    return kept


def kron_factors(
    model: nn.Module, module: nn.Module, x: Tensor, columns: Callable[[Tensor], Tensor], reduce: bool
) -> Tensor:
    """`G ⊗ A` of one `nn.Linear` or `nn.Conv*` (one group), from forward hooks and loops over examples.

    `columns(outputs)` gives `[K, 1, *output]` for one example. The bias is the last input.
    """
    inputs_sum: Tensor | None = None
    outputs_sum: Tensor | None = None
    count = 0
    for n in range(x.shape[0]):
        seen: list[tuple[Tensor, Tensor]] = []
        handle = module.register_forward_hook(
            lambda _, args, out, seen=seen: seen.append((args[0], out)) or out.clone()
        )
        outputs = model(x[n : n + 1])
        handle.remove()
        a = torch.cat([_positions(module, a) for a, _ in seen])  # [R, I]
        if module.bias is not None:
            a = torch.cat([a, a.new_ones(a.shape[0], 1)], dim=1)
        for column in columns(outputs.detach()):
            found = torch.autograd.grad(outputs, [out for _, out in seen], column, retain_graph=True)
            g = torch.cat([_flat_output(module, grad) for grad in found])  # [R, O]
            g = g.sum(0, keepdim=True) if reduce else g
            outputs_sum = g.T @ g if outputs_sum is None else outputs_sum + g.T @ g
        a = a.detach().mean(0, keepdim=True) if reduce else a.detach()
        inputs_sum = a.T @ a if inputs_sum is None else inputs_sum + a.T @ a
        count += a.shape[0]
    assert inputs_sum is not None
    assert outputs_sum is not None
    return torch.kron(outputs_sum, inputs_sum / count)


def _positions(module: nn.Module, a: Tensor) -> Tensor:
    """What every position of the layer sees, by convolving with the identity: `[R, I]`."""
    if isinstance(module, nn.Linear):
        return a.reshape(-1, a.shape[-1])
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    size = module.weight[0].numel()
    probe = torch.eye(size, dtype=a.dtype).view(size, *module.weight.shape[1:])
    seen = module._conv_forward(a, probe, None)  # type: ignore[operator]
    return seen.flatten(2).transpose(1, 2).reshape(-1, size)


def _flat_output(module: nn.Module, g: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        return g.reshape(-1, g.shape[-1])
    return g.flatten(2).transpose(1, 2).reshape(-1, g.shape[1])


def log_evidence(
    log_likelihood: float,
    matrix: Tensor,
    precision: Tensor,
    distance: Tensor,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> float:
    """`T·log p(D) + log N(θ; μ₀, Π⁻¹) + (p/2) log 2π − ½ log det(scale·H + Π)` with Π diagonal `[p]`."""
    size = precision.numel()
    log_prior = 0.5 * (precision.log().sum() - size * math.log(2 * math.pi) - (precision * distance.square()).sum())
    log_det = torch.linalg.slogdet(scale * matrix + torch.diag(precision))[1]
    return float(temperature * log_likelihood + log_prior + 0.5 * size * math.log(2 * math.pi) - 0.5 * log_det)
