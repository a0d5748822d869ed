"""A training run between two epochs as one file: safetensors with a JSON header, no pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapwing import io
from lapwing.errors import FileError
from lapwing.version import __version__

FORMAT = 1
HOLDS = "a training run"


def write(path: Path, config: dict[str, Any], state: dict[str, Any]) -> None:
    """Replace the file at once: whenever the process ends, there is a whole one."""
    tensors: dict[str, Tensor] = {}
    header = {
        "holds": HOLDS,
        "format": FORMAT,
        "lapwing": __version__,
        "config": flatten(config, tensors, "config"),
        "state": flatten(state, tensors, "state"),
    }
    partial = path.with_name(path.name + ".partial")
    io.write(partial, header, tensors)
    os.replace(partial, path)


def read(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The state in a file, refused by name if it was written by another run than `config` describes."""
    header, tensors = io.read(path)
    if header.get("holds") != HOLDS:
        raise FileError(f"{str(path)!r} holds no training run. Give checkpoint= another name.")
    _compare(path, unflatten(header["config"], tensors), config)
    state: dict[str, Any] = unflatten(header["state"], tensors)
    return state


def _compare(path: Path, written: dict[str, Any], now: dict[str, Any]) -> None:
    for name in [*written, *(name for name in now if name not in written)]:
        before, after = written.get(name, "nothing"), now.get(name, "nothing")
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            _compare(path, {f"{name}: {key}": value for key, value in before.items()},
                     {f"{name}: {key}": value for key, value in after.items()})  # fmt: skip
        elif not _equal(before, after):
            raise FileError(
                f"{str(path)!r} is the checkpoint of another run: it was written with {name} = {before!r}, this run "
                f"has {after!r}. Give the same, or checkpoint= another name."
            )


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left.cpu(), right.cpu())
    return bool(left == right)


def flatten(value: Any, tensors: dict[str, Tensor], at: str) -> Any:
    """A nested state as JSON; its tensors go to `tensors`, and what JSON has not is told by a tag."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[at] = io.plain_copy(value)
        return {"tensor": at}
    if isinstance(value, list | tuple):
        items = [flatten(item, tensors, f"{at}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        return {"items": [[flatten(key, tensors, f"{at}/key {i}"), flatten(item, tensors, f"{at}/{key}")]
                          for i, (key, item) in enumerate(value.items())]}  # fmt: skip
    raise FileError(
        f"The checkpoint cannot hold {at}: a {type(value).__name__}, where only numbers, text, lists, mappings and "
        "tensors go into a file without pickle. Train without checkpoint=, or take another optimizer or scheduler."
    )


def unflatten(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, inside),) = value.items()
    if tag == "tensor":
        return tensors[inside]
    if tag == "tuple":
        return tuple(unflatten(item, tensors) for item in inside)
    return {unflatten(key, tensors): unflatten(item, tensors) for key, item in inside}
