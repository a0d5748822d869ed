"""The exact Hessian of the negative log-likelihood, for dense structures."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.curvature.blocks import Block
from lapwing.curvature.dense import DenseAccumulator
from lapwing.errors import InputError
from lapwing.likelihoods import Likelihood
from lapwing.tape import Record


def add_hessian(record: Record, likelihood: Likelihood, targets: Tensor, blocks: tuple[Block, ...]) -> None:
    """Add `−∇²_θ Σ_n log p(y_n|f(x_n, θ))` of each block, row by row through the gradient's own graph."""
    loss = -likelihood.log_prob(record.outputs, targets).sum()
    parameters = record.parameters
    for block in blocks:
        assert isinstance(block.accumulator, DenseAccumulator)
        tensors = [parameters[name] for name in block.parameters]
        slopes = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
        filled = {
            name: torch.zeros_like(tensor) if slope is None else slope
            for name, tensor, slope in zip(block.parameters, tensors, slopes, strict=True)
        }
        packed = block.pack(filled)
        rows = torch.zeros_like(block.accumulator.sums)
        for i in range(block.size if packed.requires_grad else 0):
            row = _second(packed[i], tensors)
            values = {
                name: torch.zeros_like(tensor) if value is None else value
                for name, tensor, value in zip(block.parameters, tensors, row, strict=True)
            }
            rows[i] = block.pack(values)
        _check_symmetric(rows, block)
        block.accumulator.add(rows)


def _second(slope: Tensor, tensors: list[Tensor]) -> tuple[Tensor | None, ...]:
    try:
        return torch.autograd.grad(slope, tensors, retain_graph=True, allow_unused=True)
    except NotImplementedError as missing:
        raise InputError(
            f"PyTorch has no second derivative for an operation of this model ({missing}) Use curvature='ggn'."
        ) from missing


def _check_symmetric(rows: Tensor, block: Block) -> None:
    """Second derivatives commute. Where they do not, an operation's double backward is wrong."""
    gap = (rows - rows.T).abs()
    if bool(gap.amax() > torch.finfo(rows.dtype).eps ** 0.5 * rows.abs().amax()):
        culprit = next(name for name, part in block.unpack(gap.amax(1)).items() if bool((part == gap.amax()).any()))
        raise InputError(
            f"The second derivatives of {culprit!r} do not commute: PyTorch's double backward of an operation that "
            "it enters is wrong (known of weight normalization). Use curvature='ggn'."
        )
