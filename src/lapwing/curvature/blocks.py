"""Blocks of the curvature, and how a recorded pass reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.columns import Columns, given
from lapwing.curvature.accumulator import Accumulator
from lapwing.gradients import Gradients, Layer, Rows, rows_at
from lapwing.slope import Slope
from lapwing.tape import Record


@dataclass(frozen=True)
class Block:
    """Layers that share one basis, and their accumulated curvature. Parameters in layer order: `[p]`.

    Of a subnetwork only those `chosen`, indices into all of them `[k]`, count, and p is k; the others are held.
    """

    layers: tuple[Layer, ...]
    accumulator: Accumulator
    chosen: Tensor | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return self.layers[0].name if len(self.layers) == 1 else "all weights"

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for layer in self.layers for name in layer.parameters)

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers) if self.chosen is None else self.chosen.numel()

    def pack(self, values: dict[str, Tensor]) -> Tensor:
        """Parameters by name `[*lead, *size]` to `[*lead, p]`."""
        packed = torch.cat([layer.pack(values) for layer in self.layers], dim=-1)
        return packed if self.chosen is None else packed[..., self.chosen.to(packed.device)]

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """`[*lead, p]` to parameters by name; 0 where a weight is held."""
        if self.chosen is not None:
            whole = vector.new_zeros(*vector.shape[:-1], sum(layer.size for layer in self.layers))
            vector = whole.index_copy(-1, self.chosen.to(vector.device), vector)
        values: dict[str, Tensor] = {}
        for layer, part in zip(self.layers, vector.split([layer.size for layer in self.layers], -1), strict=True):
            values |= layer.unpack(part)
        return values

    def chosen_of(self, layer: Layer) -> Tensor | None:
        """The chosen parameters of one of the layers, in its own order; None where all are."""
        if self.chosen is None:
            return None
        start = sum(one.size for one in self.layers[: self.layers.index(layer)])
        return self.chosen[(self.chosen >= start) & (self.chosen < start + layer.size)] - start


def choose(layers: tuple[Layer, ...], elements: Mapping[str, Tensor]) -> Tensor:
    """Elements of flat parameters by name as indices into the parameters of some layers, in layer order: `[k]`."""
    masks: dict[str, Tensor] = {}
    for layer in layers:
        for name, size in zip(layer.parameters, layer.sizes, strict=True):
            mask = torch.zeros(size.numel(), dtype=torch.bool)
            mask[elements[name]] = True
            masks[name] = mask.reshape(size)
    return torch.cat([layer.pack(masks) for layer in layers]).nonzero().squeeze(1)


def update(block: Block, gradients: Gradients) -> None:
    """Add gradients to a block."""
    block.accumulator.update(gradients)


def deliver(
    record: Record,
    columns: Columns,
    blocks: tuple[Block, ...],
    consume: Callable[[Block, Gradients], None] = update,
    at_once: int | None = None,
    slope: Slope | None = None,
    in_parts: bool = False,
) -> None:
    """Backpropagate `columns` and hand each block the gradients of its own layers; they are added to it, unless said
    otherwise.

    A block of several layers gets them side by side as rows; with `at_once`, so many columns together, `in_parts` those
    of large images a few examples at a time.
    """
    for block in blocks:
        if len(block.layers) > 1 or block.chosen is not None:
            size = record.examples * block.size * record.outputs.element_size()
            step = max(1, record.tape.budget // (2 * size)) if at_once is None else at_once
            for start in range(0, columns.count, step):
                stop = min(start + step, columns.count)
                consume(block, Rows(_gather(record, columns.part(start, stop), block), start))
    owners = {block.layers[0].name: block for block in blocks if len(block.layers) == 1 and block.chosen is None}
    if owners:
        record.sweep(
            columns, lambda layer, gradients: consume(owners[layer.name], gradients), at_once, owners, slope, in_parts
        )


def _gather(record: Record, columns: Tensor, block: Block) -> Tensor:
    """The gradients of all layers of a block side by side: `[K, N, p]`."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    chosen = {layer.name: block.chosen_of(layer) for layer in block.layers}

    def collect(layer: Layer, gradients: Gradients) -> None:
        elements = chosen[layer.name]
        if elements is None:
            rows = gradients.rows(0, gradients.examples).reshape(gradients.columns, gradients.examples, -1)
        else:
            rows = rows_at(gradients, elements.to(columns.device), layer.size, record.tape.budget // 4)
        found.setdefault(layer.name, []).append((gradients.start, rows))

    record.sweep(given(columns), collect, len(columns), {layer.name for layer in block.layers})
    parts = []
    for layer in block.layers:
        if layer.name in found:
            parts.append(torch.cat([rows for _, rows in sorted(found[layer.name], key=lambda item: item[0])], dim=1))
        else:
            elements = chosen[layer.name]
            width = layer.size if elements is None else elements.numel()
            parts.append(columns.new_zeros(columns.shape[0], record.examples, width))
    return torch.cat(parts, dim=-1)
