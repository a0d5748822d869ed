"""Which parameters share a prior precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from lapwing.errors import InputError, choose
from lapwing.gradients import Layer

Groups = str | Mapping[str, str]


def labels(groups: Groups, layers: Iterable[Layer]) -> dict[str, str]:
    """Parameter name → label of its group: "scalar", "layer", "parameter" (its own), or by `{glob: label}`."""
    owners = {name: layer.name for layer in layers for name in layer.parameters}
    if isinstance(groups, Mapping):
        found = {}
        for name in owners:
            label = next((label for glob, label in groups.items() if fnmatchcase(name, glob)), None)
            if label is None:
                raise InputError(f"groups has no label for parameter {name!r}. Add a pattern, or a last one '*'.")
            found[name] = str(label)
        return found
    choose(groups, ("scalar", "layer", "parameter"), "groups")
    if groups == "scalar":
        return dict.fromkeys(owners, "all")
    return dict(owners) if groups == "layer" else {name: name for name in owners}
