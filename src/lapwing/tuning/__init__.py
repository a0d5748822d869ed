"""Choosing prior and noise: by the evidence, or by validation. A new way is a new file and a line in `tune`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lapwing.errors import InputError, choose
from lapwing.tuning.by_evidence import tune_by_evidence
from lapwing.tuning.by_linear_evidence import tune_by_linear_evidence
from lapwing.tuning.by_validation import tune_by_validation
from lapwing.tuning.groups import Group, Groups, resolve
from lapwing.tuning.result import Round, Tuning
from lapwing.tuning.seen import seen

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

METHODS: dict[str, Callable[..., tuple[Laplace, Tuning]]] = {
    "evidence": tune_by_evidence,
    "linear-evidence": tune_by_linear_evidence,
    "validation": tune_by_validation,
}


def tune(
    la: Laplace, method: str, groups: Groups, loader: Iterable[Any] | None, options: dict[str, Any]
) -> tuple[Laplace, Tuning]:
    """Run the method of this name; what does not belong to it is an error, not ignored."""
    chosen = METHODS[choose(method, METHODS, "method")]
    known = {*inspect.signature(chosen).parameters} - {"la", "groups", "loader"}
    for name in options:
        choose(name, known, f"option of tune_prior(method={method!r})")
    if method == "validation":
        if loader is None:
            raise InputError("tune_prior(method='validation') needs loader=..., a validation set.")
        if groups != "scalar":
            raise InputError("tune_prior(method='validation') takes candidates=[...] in place of groups.")
        return tune_by_validation(la, loader, **options)
    if method == "evidence" and loader is not None and groups not in ("auto", "input"):
        raise InputError(
            "tune_prior(method='evidence') reads no data; loader= belongs to the other methods, or to groups='auto'."
        )
    chosen_groups = resolved(la, groups, loader)
    if method == "evidence":
        return tune_by_evidence(la, chosen_groups, **options)
    if loader is None:
        raise InputError("tune_prior(method='linear-evidence') needs loader=..., the data of the fit.")
    return tune_by_linear_evidence(la, chosen_groups, loader, **options)


def resolved(la: Laplace, groups: Groups, loader: Iterable[Any] | None = None) -> tuple[Group, ...]:
    """The groups of a fitted posterior; "auto" and "input" look at a few inputs, of the fit or of the loader."""
    layers = [layer for block in la.curvature.blocks for layer in block.layers]
    return resolve(groups, layers, lambda what: seen(la, what, loader))


__all__ = [
    "Group", "Groups", "Round", "Tuning", "resolved", "tune", "tune_by_evidence", "tune_by_linear_evidence",
    "tune_by_validation",
]  # fmt: skip
