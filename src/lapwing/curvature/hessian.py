"""The exact Hessian of the negative log-likelihood, for dense structures."""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.curvature.blocks import Block
from lapwing.curvature.dense import DenseAccumulator
from lapwing.likelihoods import Likelihood
from lapwing.tape import Record


def add_hessian(record: Record, likelihood: Likelihood, targets: Tensor, blocks: tuple[Block, ...]) -> None:
    """Add `−∇²_θ Σ_n log p(y_n|f(x_n, θ))` of each block, row by row through the gradient's own graph."""
    loss = -likelihood.log_prob(record.outputs, targets).sum()
    parameters = record.tape.parameters
    for block in blocks:
        assert isinstance(block.accumulator, DenseAccumulator)
        tensors = [parameters[name] for name in block.parameters]
        slopes = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
        filled = {
            name: torch.zeros_like(tensor) if slope is None else slope
            for name, tensor, slope in zip(block.parameters, tensors, slopes, strict=True)
        }
        packed = block.pack(filled)
        for i in range(block.size):
            if not packed.requires_grad:
                break
            row = torch.autograd.grad(packed[i], tensors, retain_graph=True, allow_unused=True)
            values = {
                name: torch.zeros_like(tensor) if value is None else value
                for name, tensor, value in zip(block.parameters, tensors, row, strict=True)
            }
            block.accumulator.sums[i] += block.pack(values).to(block.accumulator.sums.dtype)
