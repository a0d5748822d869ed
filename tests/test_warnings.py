"""A warning points at the user's line, not into the library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lapwing import Laplace, Mixture, compare
from lapwing.likelihoods import MeanVariance
from tests import networks

DATA = [(networks.inputs("mlp", 12), networks.targets("classification", 12))]


def fitted(structure: str = "kron", **options: Any) -> Laplace:
    return Laplace(networks.make("mlp"), "classification", structure, **options).fit(DATA)


def stale() -> None:
    la = fitted().find_mode(DATA)
    la.at(prior=100.0, center="linear").log_evidence()


def other_data() -> None:
    fitted().find_mode([(3 * x, y) for x, y in DATA])


def zero_group() -> None:
    model = networks.make("mlp")
    with torch.no_grad():
        next(model.parameters()).zero_()
    Laplace(model, "classification", "diag").fit(DATA).tune_prior(groups="parameter")


NEWS: dict[str, Callable[[], Any]] = {
    "mode": lambda: fitted("diag").find_mode(DATA, tolerance=1e-12, max_steps=1),
    "stale mode": stale,
    "other data": other_data,
    "evidence": zero_group,
    "linear evidence": lambda: fitted("diag").tune_prior(method="linear-evidence", loader=DATA, max_rounds=1),
    "validation": lambda: fitted().tune_prior(method="validation", loader=DATA, candidates=[1e3, 1e4, 1e5]),
    "comparison": lambda: compare({"one": fitted("diag"), "two": fitted("kron")}),
    "mixture": lambda: Mixture([fitted("diag"), fitted("kron")], weights="evidence"),
    "likelihood": MeanVariance,
}


@pytest.mark.parametrize("case", NEWS)
def test_warnings_point_at_this_file(case: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        NEWS[case]()
    assert {warning.filename for warning in caught if "lapwing" in warning.category.__module__} == {__file__}
