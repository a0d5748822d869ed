"""The exact fallback: per-example gradients of any parameter of any network.

By `torch.func.vmap` over the examples; where vmap refuses (recurrent layers, in-place writes,
branches on data), a loop over the examples with plain autograd.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lapwing.batches import Inputs, SplitInputs
from lapwing.errors import InputError
from lapwing.layers.rule import tolerance

logger = logging.getLogger("lapwing")
Forward = Callable[[dict[str, Tensor], Inputs], Tensor]


@dataclass
class PerExample:
    """Per-example gradients of the parameters `names`; remembers whether vmap works for this network."""

    forward: Forward
    names: tuple[str, ...]
    method: str = field(default="vmap", init=False)

    def rows(
        self,
        inputs: Inputs,
        outputs: Tensor,
        parameters: dict[str, Tensor],
        columns: Tensor,
        examples_at_once: int,
        create_graph: bool,
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield `(start, {name: [K, n, *size]})`: gradients of `columns[k, n] · f_n` by parameter.

        `outputs` `[N, ...]` are those of the batch; they must agree with the outputs of its parts,
        which shows that the inputs were split along the right axis and examples do not interact.
        """
        examples = outputs.shape[0]
        split = inputs.split(examples)
        for start in range(0, examples, examples_at_once):
            part = slice(start, min(start + examples_at_once, examples))
            # Derivatives of vmapped gradients are wrong for some operations (layer_norm in torch 2.13).
            looped = create_graph or self.method == "loop"
            if not looped:
                try:
                    values, gradients = self._vmapped(split, part, parameters, columns[:, part])
                    self._check(values, outputs[part])
                except (RuntimeError, ValueError, NotImplementedError, TypeError, IndexError) as refusal:
                    self.method, looped = "loop", True
                    logger.info("vmap refused, looping over examples instead: %s", refusal)
            if looped:
                values, gradients = self._looped(split, part, parameters, columns[:, part], create_graph)
                self._check(values, outputs[part])
            yield start, gradients

    def _vmapped(
        self, split: SplitInputs, part: slice, parameters: dict[str, Tensor], columns: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        fixed = {name: value.detach() for name, value in parameters.items()}
        moving = {name: fixed.pop(name) for name in self.names}

        def one(column: Tensor, *leaves: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            example = split.join([leaf.unsqueeze(0) for leaf in leaves])
            value, pull, *_ = torch.func.vjp(lambda moved: self.forward(fixed | moved, example)[0], moving)
            return value, torch.func.vmap(pull)(column)[0]

        leaves = [leaf[part] for leaf in split.examples()]
        # vmap knows the plain attention kernel only, and says of some operations that it loops over them.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), RefuseData(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            mapped = torch.func.vmap(one, in_dims=(1, *(0 for _ in leaves)), out_dims=(0, 1))
            values, gradients = mapped(columns, *leaves)
        return values, gradients

    def _looped(
        self, split: SplitInputs, part: slice, parameters: dict[str, Tensor], columns: Tensor, create_graph: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tensors = [parameters[name] for name in self.names]
        values, rows = [], []
        for n in range(part.start, part.stop):
            value = self.forward(parameters, split.part(n, n + 1))
            values.append(value if create_graph else value.detach())
            row = []
            for column in columns[:, n - part.start]:
                gradients = torch.autograd.grad(
                    value, tensors, column.unsqueeze(0), retain_graph=True, create_graph=create_graph,
                    allow_unused=True,
                )  # fmt: skip
                row.append([_filled(g, t) for g, t in zip(gradients, tensors, strict=True)])
            rows.append(row)
        stacked = {
            name: torch.stack([torch.stack([gradients[i] for gradients in row]) for row in rows], dim=1)
            for i, name in enumerate(self.names)
        }
        return torch.cat(values), stacked

    def _check(self, values: Tensor, outputs: Tensor) -> None:
        scale = outputs.detach().abs().amax().clamp(min=1e-30)
        if values.shape != outputs.shape or bool(
            ((values - outputs).detach().abs() > 10 * tolerance(outputs.dtype) * scale).any()
        ):
            raise InputError(
                "The outputs of single examples differ from those of the batch, so per-example gradients "
                "do not exist or an input without example axis was split. Examples must be independent in "
                "eval mode, and each batched input needs its examples along dimension 0."
            )


class RefuseData(TorchFunctionMode):
    """Raises where `.data` is assigned, as `module.to(dtype)` does: under vmap torch would crash the process."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise RuntimeError("the model assigns the data of a tensor in its forward pass")
        return func(*args, **(kwargs or {}))


def _filled(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
