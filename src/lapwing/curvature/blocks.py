"""Blocks of the curvature, and how a recorded pass reaches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.columns import Columns, given
from lapwing.curvature.accumulator import Accumulator
from lapwing.gradients import Gradients, Layer, Rows
from lapwing.slope import Slope
from lapwing.tape import Record


@dataclass(frozen=True)
class Block:
    """Layers that share one basis, and their accumulated curvature. Parameters in layer order: `[p]`."""

    layers: tuple[Layer, ...]
    accumulator: Accumulator

    @property
    def name(self) -> str:
        return self.layers[0].name if len(self.layers) == 1 else "all weights"

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for layer in self.layers for name in layer.parameters)

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    def pack(self, values: dict[str, Tensor]) -> Tensor:
        """Parameters by name `[*lead, *size]` to `[*lead, p]`."""
        return torch.cat([layer.pack(values) for layer in self.layers], dim=-1)

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """`[*lead, p]` to parameters by name."""
        values: dict[str, Tensor] = {}
        for layer, part in zip(self.layers, vector.split([layer.size for layer in self.layers], -1), strict=True):
            values |= layer.unpack(part)
        return values


def deliver(
    record: Record,
    columns: Columns,
    blocks: tuple[Block, ...],
    consume: Callable[[Block, Gradients], None],
    together: bool = False,
    slope: Slope | None = None,
) -> None:
    """Backpropagate `columns` and hand each block the gradients of its own layers.

    A block of several layers gets them side by side as rows; with `together`, all columns at once.
    """
    for block in blocks:
        if len(block.layers) > 1:
            size = record.examples * block.size * record.outputs.element_size()
            step = columns.count if together else max(1, record.tape.budget // (2 * size))
            for start in range(0, columns.count, step):
                stop = min(start + step, columns.count)
                consume(block, Rows(_gather(record, columns.part(start, stop), block), start))
    owners = {block.layers[0].name: block for block in blocks if len(block.layers) == 1}
    if owners:
        record.sweep(columns, lambda layer, gradients: consume(owners[layer.name], gradients), together, owners, slope)


def _gather(record: Record, columns: Tensor, block: Block) -> Tensor:
    """The gradients of all layers of a block side by side: `[K, N, p]`."""
    found: dict[str, list[tuple[int, Tensor]]] = {}

    def collect(layer: Layer, gradients: Gradients) -> None:
        rows = gradients.rows(0, gradients.examples).reshape(gradients.columns, gradients.examples, -1)
        found.setdefault(layer.name, []).append((gradients.start, rows))

    record.sweep(given(columns), collect, True, {layer.name for layer in block.layers})
    parts = []
    for layer in block.layers:
        if layer.name in found:
            parts.append(torch.cat([rows for _, rows in sorted(found[layer.name], key=lambda item: item[0])], dim=1))
        else:
            parts.append(columns.new_zeros(columns.shape[0], record.examples, layer.size))
    return torch.cat(parts, dim=-1)
