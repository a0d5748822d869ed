"""Many inputs in parts whose forward passes fit into memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lapwing.batches import Inputs
from lapwing.jvp import REFUSALS
from lapwing.probe import agree
from lapwing.tape import Tape

logger = logging.getLogger("lapwing")
_THOUSAND = 1024


def portions(tape: Tape, inputs: Inputs) -> list[Inputs]:
    """The inputs in parts, each of as many examples as keep their activations within half of the budget.

    They stay together where they fit, where a gradient in them is wanted, and where a few of them alone do not come
    out as they do in company: then examples interact, or the first dimension of an input does not count them.
    """
    examples = next((tensor.shape[0] for tensor in inputs.tensors() if tensor.dim() > 0), 0)
    if examples < 2 or inputs.requires_grad() or _small(inputs, tape.budget):
        return [inputs]
    split = inputs.split(examples)
    try:
        step = max(1, tape.budget // max(1, 2 * _footprint(tape, split.part(0, 1))))
        if step >= examples:
            return [inputs]
        with torch.no_grad():
            alone, beside = (tape.forward({}, split.part(0, count)) for count in (1, 2))
    except REFUSALS as failure:
        logger.info("The model fails on a part of the inputs (%s); they go through it together", failure)
        return [inputs]
    if len(beside) != 2 or not agree(alone, beside[:1], beside):
        logger.info("A part of the inputs gives other outputs; they go through the model together")
        return [inputs]
    return [split.part(start, start + step) for start in range(0, examples, step)]


def _small(inputs: Inputs, budget: int) -> bool:
    """Whether activations would fit if they were a thousand times as large as the inputs. Tokens tell nothing."""
    tensors = list(inputs.tensors())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return 2 * _THOUSAND * size <= budget and all(tensor.is_floating_point() for tensor in tensors)


def _footprint(tape: Tape, example: Inputs) -> int:
    """Bytes that a forward pass over one example keeps for its backward pass, without what is there anyway."""
    shapes = tuple(tensor.shape for tensor in example.tensors())
    if shapes not in tape.footprints:
        there = {value.untyped_storage().data_ptr() for value in (*tape.model.parameters(), *example.tensors())}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in there:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            tape.forward({}, example)
        tape.footprints[shapes] = sum(kept.values())
    return tape.footprints[shapes]


def stacked(samples: Iterable[Tensor], count: int) -> Tensor:
    """`count` samples as one tensor `[S, ...]` that is there once, filled sample by sample."""
    found: Tensor | None = None
    for i, sample in enumerate(samples):
        found = sample.new_empty(count, *sample.shape) if found is None else found
        found[i] = sample
    assert found is not None
    return found
