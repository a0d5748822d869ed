"""What is removed together: single weights, output units (neurons, filters) or inputs of layers.

A unit has a number; every element of a parameter carries that of its unit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lapwing.errors import InputError, choose
from lapwing.gradients import Layer

UNITS = ("weight", "output", "input")
_KEPT = -1  # the number of elements that belong to no unit
_WINDOWS = ("convolution", "transposed convolution")


@dataclass(frozen=True)
class Units:
    """`numbers` by parameter name, `[*shape]` (−1: of no unit), and the index of the layer of each unit `[U]`."""

    numbers: dict[str, Tensor]
    layers: Tensor

    @property
    def count(self) -> int:
        return self.layers.numel()

    def total(self, values: dict[str, Tensor]) -> Tensor:
        """The sum over the elements of each unit: `[U]`, float64."""
        found = torch.zeros(self.count, dtype=torch.float64, device=self.layers.device)
        for name, numbers in self.numbers.items():
            inside = numbers != _KEPT
            found.index_add_(0, numbers[inside], values[name].expand_as(numbers)[inside].double())
        return found

    def sizes(self) -> Tensor:
        """How many elements each has: `[U]`."""
        return self.total({name: torch.ones_like(numbers) for name, numbers in self.numbers.items()})

    def masks(self, kept: Tensor) -> dict[str, Tensor]:
        """True for the elements of units with `kept: [U]`, and of none."""
        with_rest = torch.cat([kept, kept.new_ones(1)])  # −1 reads the last
        return {name: with_rest[numbers] for name, numbers in self.numbers.items()}


def units_of(
    layers: Sequence[Layer],
    kind: str,
    only: str | Sequence[str] | None,
    device: torch.device,
    outputs: Collection[str] = (),
) -> Units:
    """The units of layers with a weight matrix, filters included, or of the parameters that `only` names.

    By default those of kind "weight" leave out biases and what else is no matrix, and those of kind "output" the layers
    whose weight is one of `outputs`: their units are the model's outputs.
    """
    choose(kind, UNITS, "units")
    chosen = [layer for layer in layers if kind == "weight" or (layer.shape is not None and layer.form == "pair")]
    if only is not None:
        chosen = _named(chosen, kind, only)
    elif kind == "weight":
        chosen = [layer for layer in chosen if _matrices(layer)]
    elif kind == "output":
        chosen = [layer for layer in chosen if layer.parameters[0] not in outputs]
    if not chosen:
        raise InputError(f"There is nothing to prune: no layer has units of kind {kind!r} that may go.")
    numbers: dict[str, Tensor] = {}
    owners: list[Tensor] = []
    start = 0
    for place, layer in enumerate(chosen):
        found, count = _elements(layer, only) if kind == "weight" else _parts(layer, kind)
        for name, local in found.items():
            if bool((local == _KEPT).all()):  # the bias of a layer whose inputs go
                continue
            numbers[name] = torch.where(local == _KEPT, _KEPT, local + start).to(device)
        owners.append(torch.full((count,), place, device=device))
        start += count
    return Units(numbers, torch.cat(owners))


def _elements(layer: Layer, only: str | Sequence[str] | None) -> tuple[dict[str, Tensor], int]:
    """Every element of the layer's matrices, or of the parameters that `only` names, as a unit of its own."""
    sizes = dict(zip(layer.parameters, layer.sizes, strict=True))
    names = _matrices(layer) if only is None else [name for name in sizes if _matches(name, only)]
    flat = torch.arange(sum(sizes[name].numel() for name in names)).split([sizes[name].numel() for name in names])
    parts = zip(names, flat, strict=True)
    return {name: part.reshape(sizes[name]) for name, part in parts}, sum(part.numel() for part in flat)


def _matrices(layer: Layer) -> list[str]:
    """The weight of a layer with a Kronecker form; of others (recurrent, normalized) what has two dimensions."""
    if layer.shape is not None:
        return [layer.parameters[0]]
    sizes = zip(layer.parameters, layer.sizes, strict=True)
    return [name for name, size in sizes if sum(length > 1 for length in size) > 1]


def _parts(layer: Layer, kind: str) -> tuple[dict[str, Tensor], int]:
    """The rows of the layer's weight, each with its bias, or its columns without."""
    assert layer.shape is not None
    groups, outputs, inputs = layer.shape
    if kind == "output":
        numbers = torch.arange(groups * outputs).repeat_interleave(inputs)
        return layer.unpack(numbers), groups * outputs
    biases = len(layer.parameters) - 1
    window = layer.sizes[0][2:].numel() if layer.path in _WINDOWS else 1
    channels = (inputs - biases) // window
    columns = torch.arange(groups * channels).repeat_interleave(window).unflatten(0, (groups, -1))
    columns = torch.cat([columns, torch.full((groups, biases), _KEPT)], dim=1)
    return layer.unpack(columns.unsqueeze(1).expand(groups, outputs, inputs).flatten()), groups * channels


def _named(layers: Sequence[Layer], kind: str, only: str | Sequence[str]) -> list[Layer]:
    """The layers that `only` names: by any parameter, or where units are rows or columns by the weight."""
    names = {layer.name: layer.parameters if kind == "weight" else layer.parameters[:1] for layer in layers}
    known = [name for parameters in names.values() for name in parameters]
    for pattern in [only] if isinstance(only, str) else only:
        if not any(fnmatchcase(name, pattern) for name in known):
            what = "parameters" if kind == "weight" else f"weights with units of kind {kind!r}"
            raise InputError(f"only={pattern!r} matches none of the {what} that can be pruned: {', '.join(known)}.")
    return [layer for layer in layers if any(_matches(name, only) for name in names[layer.name])]


def first_names(model: nn.Module, only: str | Sequence[str] | None) -> list[str] | None:
    """The patterns, and for each the first names of tied parameters that it calls by another."""
    if only is None:
        return None
    patterns = [only] if isinstance(only, str) else list(only)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = [(name, first[id(value)]) for name, value in model.named_parameters(remove_duplicate=False)]
    found: list[str] = []
    for pattern in patterns:
        tied = [name for alias, name in aliases if alias != name and fnmatchcase(alias, pattern)]
        direct = any(fnmatchcase(name, pattern) for name in first.values())
        found += tied if tied and not direct else [pattern, *tied]
    return found


def _matches(name: str, only: str | Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ([only] if isinstance(only, str) else only))
