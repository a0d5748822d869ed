"""Choosing prior and noise: by the evidence, or by validation. A new way is a new file and a line in `tune`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lapwing.errors import InputError, choose
from lapwing.tuning.by_evidence import tune_by_evidence
from lapwing.tuning.by_validation import tune_by_validation
from lapwing.tuning.groups import Groups
from lapwing.tuning.result import Tuning

if TYPE_CHECKING:
    from lapwing.laplace import Laplace


def tune(
    la: Laplace, method: str, groups: Groups, loader: Iterable[Any] | None, options: dict[str, Any]
) -> tuple[Laplace, Tuning]:
    """Run the method of this name; what does not belong to it is an error, not ignored."""
    choose(method, ("evidence", "validation"), "method")
    chosen = tune_by_evidence if method == "evidence" else tune_by_validation
    known = {*inspect.signature(chosen).parameters} - {"la", "groups", "loader", "predict"}
    if method == "validation":
        known |= {*inspect.signature(la.predict).parameters} - {"x", "method"}
    for name in options:
        choose(name, known, f"option of tune_prior(method={method!r})")
    if method == "evidence":
        if loader is not None:
            raise InputError("tune_prior(method='evidence') reads no data; loader= belongs to method='validation'.")
        return tune_by_evidence(la, groups, **options)
    if loader is None:
        raise InputError("tune_prior(method='validation') needs loader=..., a validation set.")
    if groups != "scalar":
        raise InputError("tune_prior(method='validation') takes candidates=[...] in place of groups.")
    return tune_by_validation(la, loader, **options)


__all__ = ["Groups", "Tuning", "tune", "tune_by_evidence", "tune_by_validation"]
