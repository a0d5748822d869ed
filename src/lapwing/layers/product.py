"""Products with a weight that are not written as `linear`: `matmul`, `addmm`, `einsum` and their kin.

Each is read as an Einstein sum. Letters of the weight that the input has and the result has not are inputs (I),
letters that only the result has are outputs (O), letters that both have are groups (Q), and all other letters of
the input are examples and positions.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.layers.rule import Call, ExampleAxis, Layout, PairRule
from lapwing.views import Owner, View


@dataclass(frozen=True)
class _Sum:
    """Two operands, their letters, and those of the result; `bias` is added along the result's last letter."""

    operands: tuple[Tensor, Tensor]
    letters: tuple[str, str]
    result: str
    bias: Tensor | None = None


class Product(PairRule):
    name = "product"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (
        torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum,
        Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.addmm,
    )  # fmt: skip

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        if not any(owner(value) for value in _tensors(args)):  # products of activations are many
            return None
        found = _as_sum(function, args, kwargs)
        if found is None:
            return None
        owners = [owner(operand) for operand in found.operands]
        if (owners[0] is None) == (owners[1] is None):
            return None
        at = 0 if owners[0] is not None else 1
        weight = owners[at]
        assert weight is not None
        return None if weight.rows is not None else _call(found, at, weight, owner)

    def arrange(self, call: Call, g: Tensor) -> Tensor:
        order = call.options["output"]
        return g.permute(0, *(axis + 1 for axis in order))

    def example_axes(self, call: Call, output: torch.Size) -> range:
        return range(call.options["lead"])

    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        groups, _, inputs = _shape(call)
        lead = call.options["lead"]
        x = axis.first(call.input, examples)[part].flatten(1, lead)  # [n, R, *Q, *I]
        return x.reshape(*x.shape[:2], groups, inputs).transpose(1, 2)

    def gradients_of_arranged(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        groups, outputs, _ = _shape(call)
        lead = call.options["lead"]
        g = axis.first(g, examples, skip=1).flatten(2, lead + 1)  # [K, N, R, *Q, *O]
        return g.reshape(*g.shape[:3], groups, outputs).transpose(2, 3)


def _shape(call: Call) -> tuple[int, int, int]:
    assert call.shape is not None
    return call.shape


def _call(found: _Sum, at: int, view: View, owner: Owner) -> Call | None:
    x, w = found.operands[1 - at], found.operands[at]
    of_x, of_w, result = found.letters[1 - at], found.letters[at], found.result
    if any(len(set(letters)) < len(letters) for letters in (of_x, of_w, result)):
        return None  # diagonals
    groups = [letter for letter in of_w if letter in of_x and letter in result]
    outputs = [letter for letter in of_w if letter not in of_x and letter in result]
    inputs = [letter for letter in of_w if letter in of_x and letter not in result]
    lead = [letter for letter in of_x if letter not in of_w]
    if len(groups) + len(outputs) + len(inputs) < len(of_w) or any(letter not in result for letter in lead):
        return None  # letters that are summed over one operand only
    sizes = dict(zip(of_w, w.shape, strict=True))
    if any(x.shape[i] != sizes.get(letter, x.shape[i]) for i, letter in enumerate(of_x)):
        return None  # broadcasting
    order = tuple(view.order[of_w.index(letter)] for letter in (*groups, *outputs, *inputs))
    own = tuple(w.shape[view.order.index(axis)] for axis in range(w.dim()))
    layout = None if order == tuple(range(len(order))) else Layout(own, order)
    bias = owner(found.bias)
    whole = bias is not None and bias.plain and not groups and outputs == [result[-1]]
    whole = whole and found.bias is not None and found.bias.numel() == sizes[result[-1]]
    options = {
        "lead": len(lead),
        "output": [result.index(letter) for letter in (*lead, *groups, *outputs)],
    }
    shape = tuple(prod(sizes[letter] for letter in letters) for letters in (groups, outputs, inputs))
    arranged = x.permute([of_x.index(letter) for letter in (*lead, *groups, *inputs)])
    return Call(
        arranged, view.name, bias.name if bias is not None and whole else None, (shape[0], shape[1], shape[2]),
        options, None, layout,
    )  # fmt: skip


def _tensors(args: tuple[Any, ...]) -> list[Any]:
    return [value for arg in args for value in (arg if isinstance(arg, list | tuple) else (arg,))]


def _as_sum(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Sum | None:
    if kwargs.get("out") is not None:
        return None
    if function is torch.einsum:
        return _einsum(args)
    if function in (torch.addmm, Tensor.addmm):
        if len(args) != 3 or any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            return None
        return _Sum((args[1], args[2]), ("ab", "bc"), "ac", args[0])
    if len(args) != 2 or kwargs:
        return None
    left, right = args if function is not Tensor.__rmatmul__ else (args[1], args[0])
    return _matmul(left, right)


def _matmul(left: Tensor, right: Tensor) -> _Sum | None:
    """Leading dimensions are aligned from the right; a vector has none."""
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.dim() == 0 or right.dim() == 0:
        return None
    lead = string.ascii_letters[3:]
    of_left = lead[: max(left.dim() - 2, 0)][::-1] + ("ab" if left.dim() > 1 else "b")
    of_right = lead[: max(right.dim() - 2, 0)][::-1] + ("bc" if right.dim() > 1 else "b")
    longer = lead[: max(left.dim() - 2, right.dim() - 2, 0)][::-1]
    result = longer + ("a" if left.dim() > 1 else "") + ("c" if right.dim() > 1 else "")
    return _Sum((left, right), (of_left, of_right), result)


def _einsum(args: tuple[Any, ...]) -> _Sum | None:
    if not args or not isinstance(args[0], str):
        return None  # the form of alternating operands and lists of axes
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    equation = args[0].replace(" ", "")
    if len(operands) != 2 or "->" not in equation:
        return None
    terms, result = equation.split("->")
    left, right = terms.split(",")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    sizes = [
        operand.dim() - len(term.replace("...", "")) for operand, term in zip(operands, (left, right), strict=True)
    ]
    if "..." in equation:
        dots = "".join(spare[: max(sizes)])
        left, right = (
            term.replace("...", dots[len(dots) - size :]) for term, size in zip((left, right), sizes, strict=True)
        )
        result = result.replace("...", dots)
    return _Sum((operands[0], operands[1]), (left, right), result)
