"""Which weights share a prior precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lapwing.errors import InputError, choose
from lapwing.gradients import Layer

Groups = str | Mapping[str, str]
NAMES = ("scalar", "layer", "parameter", "input", "auto")


@dataclass(frozen=True)
class Group:
    """Parameters with the precisions they share: one for all of them, or `[*shape]` for the entries of a single one.

    `along` is the shape in which those precisions meet their parameter: `(1, I)` for one per input of a weight
    `[O, I]`.
    """

    label: str
    sizes: dict[str, torch.Size]
    shape: torch.Size = field(default_factory=torch.Size)
    along: tuple[int, ...] = ()

    def expand(self, precisions: Tensor) -> dict[str, Tensor]:
        """Precisions `[*shape]` by parameter name: 0-d, or in the parameter's shape."""
        if not self.shape:
            return dict.fromkeys(self.sizes, precisions)
        return {name: precisions.reshape(self.along).expand(size) for name, size in self.sizes.items()}

    def total(self, values: Mapping[str, Tensor]) -> Tensor:
        """Sums over the weights that share a precision, `[*shape]`, of values by parameter name and element.

        Where one precision is shared by all, a value may be the sum over its parameter already.
        """
        if not self.shape:
            return torch.stack([values[name].sum() for name in self.sizes]).sum()
        (name,) = self.sizes
        folded = [i for i, size in enumerate(self.along) if size == 1]
        value = values[name].sum(folded) if folded else values[name]
        return value.reshape(self.shape)

    def counts(self) -> Tensor:
        """How many weights share each precision: `[*shape]`, float64."""
        return self.total({name: torch.ones(size, dtype=torch.float64) for name, size in self.sizes.items()})


def resolve(groups: Groups, layers: Iterable[Layer], found: Callable[[str], dict[str, str]]) -> tuple[Group, ...]:
    """The groups "scalar", "layer", "parameter" (each weight its own), "input", "auto", or those of `{glob: label}`.

    `found` reads those of the network that the layers do not tell: for "auto" parameter name → label, for "input" the
    weight of the first layer → "".
    """
    layers = tuple(layers)
    sizes = {name: size for layer in layers for name, size in zip(layer.parameters, layer.sizes, strict=True)}
    if isinstance(groups, Mapping):
        return _labeled(sizes, _by_glob(groups, sizes))
    choose(groups, NAMES, "groups")
    if groups == "scalar":
        return _labeled(sizes, dict.fromkeys(sizes, "all"))
    if groups == "layer":
        return _labeled(sizes, {name: layer.name for layer in layers for name in layer.parameters})
    if groups == "parameter":
        return tuple(Group(name, {name: size}, size, tuple(size)) for name, size in sizes.items())
    if groups == "auto":
        return _labeled(sizes, found("auto"))
    (first,) = found("input")
    size = sizes[first]
    along = tuple(length if axis == 1 else 1 for axis, length in enumerate(size))
    inputs = Group(f"inputs of {first}", {first: size}, torch.Size((size[1],)), along)
    others = {name: size for name, size in sizes.items() if name != first}
    return (inputs, Group("rest", others)) if others else (inputs,)


def _labeled(sizes: Mapping[str, torch.Size], labels: Mapping[str, str]) -> tuple[Group, ...]:
    return tuple(
        Group(label, {name: size for name, size in sizes.items() if labels[name] == label})
        for label in dict.fromkeys(labels[name] for name in sizes)
    )


def _by_glob(groups: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        label = next((label for glob, label in groups.items() if fnmatchcase(name, glob)), None)
        if label is None:
            raise InputError(f"groups has no label for parameter {name!r}. Add a pattern, or a last one '*'.")
        found[name] = str(label)
    return found
