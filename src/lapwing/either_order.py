"""Whether a model is the same function when images lie in memory with their channels last.

Almost every one is. One that looks at strides, writes through a view, or changes in place what is a copy in one order
and a view in the other is not, and some of torch's own derivatives are wrong in one order. So a few examples go through
the model in both, forward and backward, before any batch does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapwing.batches import Inputs
from lapwing.probe import agree

if TYPE_CHECKING:
    from lapwing.tape import Record

logger = logging.getLogger("lapwing")
Run = Callable[[Inputs, bool], "Record"]
_FEW = 4  # examples that tell as much as a whole batch
_GRADIENTS = 1e-2  # of the norm of a gradient: where rounding decides on which side of 0 a number is, a few differ


def same_in_either_order(run: Run, inputs: Inputs) -> bool:
    """Compare passes over copies of a few of these examples; `run` takes inputs and whether it may rearrange images.

    Where there is nothing to rearrange, or values decide which way the model takes, the answer is no. Where the model
    fails on a few, all are compared, and where it fails on those it keeps its own order.
    """
    examples = inputs.examples()
    parts = [inputs]
    if inputs.all_batched(examples) and examples > _FEW:
        parts.insert(0, inputs.split(examples).part(0, _FEW))
    for part in parts:
        try:
            return _same(run, part)
        except Exception as failure:  # whatever it is, the pass itself will tell
            logger.info("The model fails where the order of its images in memory is compared: %s", failure)
    return False


def _same(run: Run, inputs: Inputs) -> bool:
    other = run(inputs.copy(), True)
    if not other.rearranged or other.decides or not other.uses:
        return False
    draw = torch.Generator().manual_seed(0)
    v = torch.randn(other.outputs.shape, generator=draw, dtype=torch.float64, device="cpu").to(other.outputs)
    outputs, found = other.outputs.detach(), _gradients(other, v)
    del other  # its activations, before there are others
    own = run(inputs.copy(), False)
    if len(own.uses) != len(found) or not agree(outputs, own.outputs, own.outputs):
        return False
    return all(_close(expected, value) for expected, value in zip(_gradients(own, v), found, strict=True))


def _gradients(record: Record, v: Tensor) -> tuple[Tensor | None, ...]:
    """At the outputs of all uses."""
    return record.grad([use.edge for use in record.uses], v, batched=False)


def _close(expected: Tensor | None, found: Tensor | None) -> bool:
    if expected is None or found is None:
        return expected is found
    return bool((found - expected).norm() <= _GRADIENTS * expected.norm())
