"""Linear layers: `x Wᵀ + b` with any number of leading dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from lapwing import matmul
from lapwing.layers.rule import Call, ExampleAxis, Layout, PairRule
from lapwing.views import Owner
from lapwing.zero_rows import nonzero_rows


class Linear(PairRule):
    name = "linear"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (functional.linear,)

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        x, w, b = _bind(*args, **kwargs)
        weight, bias = owner(w), owner(b)
        if weight is None or 0 not in weight.order:  # a single row is no matrix
            return None
        transposed = weight.order == (1, 0)
        if transposed and weight.rows is not None:
            return None
        outputs, inputs = w.shape
        layout = Layout((inputs, outputs), (1, 0)) if transposed else None
        fits = bias is not None and bias.rows == weight.rows and b is not None and b.numel() == outputs
        added = bias.name if bias is not None and fits else None
        return Call(x, weight.name, added, (1, outputs, inputs), {}, weight.rows, layout)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return matmul.linear(*_bind(*args, **kwargs))

    def broadcast(self, call: Call, output: torch.Size) -> Call | None:
        return replace(call, input=call.input.expand(*output[:-1], -1)) if _same_width(call, output) else None

    def bias_align(self, output: Tensor, weight: Tensor) -> tuple[int, ...] | None:
        return (*[1] * (output.dim() - 1), output.shape[-1])

    def example_axes(self, call: Call, output: torch.Size) -> range:
        return range(len(output) - 1)

    def add_total(
        self, call: Call, g: Tensor, axis: ExampleAxis, examples: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        flat, x = g.flatten(0, -2), call.input.flatten(0, -2)
        kept = nonzero_rows(flat)
        flat, x = (flat, x) if kept is None else (flat.index_select(0, kept), x.index_select(0, kept))
        matmul.add_across(weight, flat, x.to(g.dtype))
        if bias is not None:
            bias += flat.sum(0)

    def inputs(self, call: Call, axis: ExampleAxis, examples: int, part: slice) -> Tensor:
        return axis.first(call.input, examples)[part].flatten(1, -2).unsqueeze(1)

    def gradients_of_arranged(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        return axis.first(g, examples, skip=1).flatten(2, -2).unsqueeze(2)


def _same_width(call: Call, output: torch.Size) -> bool:
    return call.shape is not None and output[-1] == call.shape[1]


def _bind(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias
