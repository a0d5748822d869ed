"""What prior groups want to know of the network beyond its layers, read off a few examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lapwing.errors import InputError
from lapwing.examples import few_examples
from lapwing.guard import random_state_kept
from lapwing.scale_free import find_scale_free, first_weight

if TYPE_CHECKING:
    from lapwing.laplace import Laplace


def seen(la: Laplace, what: str, loader: Iterable[Any] | None) -> dict[str, str]:
    """For "auto" parameter name → label of its scale-free group or of the rest, for "input" the first weight → "".

    The examples are those on which the fit found the layers, or the first of a loader.
    """
    state = la._unchanged()
    with random_state_kept(), la._borrow(state.weights):
        inputs = few_examples(la, loader)
        if inputs is None:
            raise InputError(f"groups={what!r} looks at a few inputs, and a file keeps none: pass loader=... as well.")
        if what == "input":
            return {first_weight(state.tape, inputs): ""}
        found = find_scale_free(state.tape, inputs)
    if not found.groups:
        raise InputError(
            "groups='auto' found no scale-free group: scaling any layer, or all that write into one stream, changes "
            "the outputs. There is nothing to separate: use groups='scalar' or 'layer'."
        )
    return found.labels()
