"""A second device on machines without one: tensors that are computed here and say that they are elsewhere.

Within `second_device()`, `x.to(ELSEWHERE)` gives such a tensor, and a function of tensors here and there raises, as it
does between real devices (numbers, which are 0-d tensors here, go with everything).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = torch.device("meta")  # the one other device that every build of torch knows the name of


class Away(Tensor):
    """Holds a tensor here, and says that it is elsewhere."""

    held: Tensor

    def __new__(cls, held: Tensor) -> Away:
        made: Away = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=ELSEWHERE)  # type: ignore[attr-defined]
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError("A tensor elsewhere was used after second_device() had ended.")


class _Apart(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        away = any(isinstance(one, Away) for one in tensors)
        if away and any(not isinstance(one, Away) and one.dim() for one in tensors):
            raise RuntimeError(f"{func}: tensors on two devices.")
        if kwargs.get("device") is not None:
            away, kwargs["device"] = torch.device(kwargs["device"]) == ELSEWHERE, torch.device("cpu")
        args, kwargs = tree_map(lambda one: one.held if isinstance(one, Away) else one, (args, kwargs))
        found = func(*args, **kwargs)
        return tree_map(lambda one: Away(one) if away and isinstance(one, Tensor) else one, found)


@contextmanager
def second_device() -> Iterator[None]:
    """For as long as there is an elsewhere."""
    with _Apart():
        yield
