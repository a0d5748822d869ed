"""A recorded forward pass as steps between activations `[N, D]`: linear maps and elementwise functions.

Read from autograd's graph, so that it does not matter which function, method or in-place variant made a step,
and derivatives are autograd's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.tape import Record

Activation = Any
"""A node of autograd's graph stands for the activation that it made."""

# By what autograd calls them. The views change the shape of an example only.
_ELEMENTWISE = {
    "Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Pow", "Lerp", "Addcmul", "Where", "Maximum", "Minimum",
    "Exp", "Expm1", "Log", "Log1P", "Sqrt", "Rsqrt", "Reciprocal", "Abs", "Sin", "Cos", "Erf",
    "Tanh", "Sigmoid", "LogSigmoid", "Relu", "LeakyRelu", "PreluKernel", "RreluWithNoise", "Elu", "Celu", "Gelu",
    "Silu", "Mish", "Softplus", "Hardtanh", "Hardswish", "Hardsigmoid", "Hardshrink", "Softshrink", "Threshold",
    "Clamp", "ClampMin", "ClampMax", "Clone", "ToCopy", "NativeBatchNorm",
    "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze",
}  # fmt: skip
_MATRIX_AT = {"Mm": 1, "Addmm": 2}  # which argument of a product is the matrix; the activation is the one before


@dataclass(frozen=True)
class LinearStep:
    """`y = x W`, `weight: [D_x, D_y]`; the same for every example, so that nothing is approximated."""

    inputs: tuple[Activation]
    weight: Tensor

    def pull(self, i: int, block: Tensor) -> Tensor:
        """`J_iᵀ B` for `B: [D_y, ·]`."""
        return self.weight @ block

    def pull_both(self, i: int, j: int, block: Tensor) -> Tensor:
        """`J_iᵀ B J_j` for `B: [D_y, D_y]`."""
        return self.weight @ block @ self.weight.T


@dataclass(frozen=True)
class ElementwiseStep:
    """`y_d = φ(x1_d, x2_d, ...)` with the derivatives of every example: `[N, D]` for each input."""

    inputs: tuple[Activation, ...]
    derivatives: tuple[Tensor, ...]

    def pull(self, i: int, block: Tensor) -> Tensor:
        """`J_iᵀ B` for `B: [D, ·]`, with the mean of J_i over the batch."""
        return self.derivatives[i].mean(0).unsqueeze(1) * block

    def pull_both(self, i: int, j: int, block: Tensor) -> Tensor:
        """The mean of `J_iᵀ B J_j` over the batch for `B: [D, D]`."""
        return self.derivatives[i].T @ self.derivatives[j] / len(self.derivatives[i]) * block


Step = LinearStep | ElementwiseStep


def walk_back(record: Record, layers: Mapping[Activation, str]) -> Iterator[tuple[Activation, Step]]:
    """Every activation between the outputs of `layers` (these included) and the model's, and its step.

    An activation comes after all that were made of it. `layers` has names, for errors.
    """
    behind = _layers_behind(record.outputs.grad_fn, layers)
    for node in reversed(behind):
        if behind[node] is not None:
            yield node, _read(record, node, behind)


def _layers_behind(root: Activation, layers: Mapping[Activation, str]) -> dict[Activation, str | None]:
    """For each node, inputs first, the name of a layer whose output it is or depends on."""
    found: dict[Activation, str | None] = {}
    stack: list[tuple[Activation, bool]] = [(root, False)]
    while stack:
        node, children_done = stack.pop()
        if node in found:
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        if children_done:
            found[node] = next((found[child] for child in children if found[child] is not None), layers.get(node))
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in children if child not in found)
    return found


def _read(record: Record, node: Activation, behind: Mapping[Activation, str | None]) -> Step:
    inputs = [(i, child) for i, (child, _) in enumerate(node.next_functions) if behind.get(child) is not None]
    if not inputs:
        return ElementwiseStep((), ())
    name, layer = _operation(node), behind[node]
    for child, output in node.next_functions:
        if output and behind.get(child) is not None:  # an activation is a node, so it must be the only one of its
            raise refusal(f"the operation {_spoken(_operation(child))!r} past layer {behind[child]!r}")
    matrix_at = _MATRIX_AT.get(name)
    shapes = [list(_shape(node)), *(list(_shape(child)) for _, child in inputs)]
    if any(shape[:1] != [record.examples] for shape in shapes):
        raise refusal(f"the operation {_spoken(name)!r} past layer {layer!r}, between tensors of shapes {shapes}")
    if matrix_at is not None and [i for i, _ in inputs] == [matrix_at - 1]:
        scale = node._saved_alpha if name == "Addmm" else 1
        return LinearStep((inputs[0][1],), scale * node._saved_mat2.detach().to(record.dtype))
    if name == "MkldnnLinearBackward" and [i for i, _ in inputs] == [0]:
        return LinearStep((inputs[0][1],), node.saved_tensors[1].detach().T.to(record.dtype))
    if name not in _ELEMENTWISE or len({math.prod(shape) for shape in shapes}) > 1:
        raise refusal(f"the operation {_spoken(name)!r} past layer {layer!r}")
    if name == "NativeBatchNorm" and node._saved_training:
        raise refusal(f"the batch norm without running statistics past layer {layer!r}")
    return _elementwise(node, inputs, record)


def _elementwise(node: Activation, inputs: list[tuple[int, Activation]], record: Record) -> ElementwiseStep:
    """The derivatives of an elementwise function are what its backward formula makes of ones."""
    found = node(torch.ones(_shape(node), dtype=node._input_metadata[0].dtype, device=record.outputs.device))
    found = found if isinstance(found, tuple) else (found,)
    derivatives: dict[Activation, Tensor] = {}
    for i, child in inputs:
        derivative = found[i].detach().to(record.dtype).reshape(record.examples, -1)
        derivatives[child] = derivatives[child] + derivative if child in derivatives else derivative
    return ElementwiseStep(tuple(derivatives), tuple(derivatives.values()))


def _shape(node: Activation) -> torch.Size:
    return torch.Size(node._input_metadata[0].shape)


def _operation(node: Activation) -> str:
    """`LeakyReluBackward0` as `LeakyRelu`. The names of functions that users wrote end without a digit."""
    name: str = node.name()
    return re.sub(r"Backward\d+$", "", name)


def _spoken(name: str) -> str:
    if name in ("AsStrided", "CopySlices"):
        return "in-place change of a view"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Backward")).lower()


def refusal(what: str) -> InputError:
    return InputError(
        "curvature='kfra' passes curvature back through linear layers, elementwise functions and sums of activations "
        f"[N, D], not through {what}. Use curvature='ggn' (exact), 'rademacher' or 'fisher' (few backward passes, "
        "unbiased)."
    )
