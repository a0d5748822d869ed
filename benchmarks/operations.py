"""What is timed, and which cases there are. Data only: neither Lapwing nor a rival is imported here.

A case is named `workload/operation`, of a rival `workload/operation@rival`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.workloads import GROWING, MAIN

REPEATS = 7
"""Turns at most. A case takes fewer when they last longer than SECONDS; the table says how many."""
SECONDS = 8.0
LIMIT = {"lapwing": 300.0, "rivals": 240.0}
"""Seconds after which a case is stopped."""
RIVALS = ("laplace-curvlinops", "laplace-backpack", "laplace-asdl", "curvlinops", "nngeometry")
SAMPLES = 50


@dataclass(frozen=True)
class Operation:
    """`kind` says what is timed; the rest is how the posterior is fitted."""

    title: str
    kind: str
    structure: str = "kron"
    curvature: str = "ggn"
    weights: str = "all"
    options: Mapping[str, Any] = field(default_factory=dict)


_CURVATURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "exact": ("exact", "ggn", {}),
    "tol": ("exact to 1e-3", "ggn", {"rank_tolerance": 1e-3}),
    "mc": ("Monte Carlo", "fisher", {}),
    "empirical": ("empirical", "empirical", {}),
}
FITS: dict[str, Operation] = {
    f"{structure}-{short}": Operation(f"fit {structure}, {title}", "fit", structure, curvature, options=options)
    for structure in ("diag", "kron", "ekfac")
    for short, (title, curvature, options) in _CURVATURES.items()
}
USES: dict[str, Operation] = {
    "decompose": Operation("decomposition of the factors", "decompose"),
    "predict-linearized": Operation("linearized predictive", "linearized"),
    "predict-sampled": Operation(f"sampled predictive, {SAMPLES} samples", "sampled"),
    "tune": Operation("tuning the prior", "tune"),
}
LAST: dict[str, Operation] = {
    "last-fit": Operation("last layer: fit kron, exact", "fit", weights="last_layer"),
    "last-decompose": Operation("last layer: decomposition", "decompose", weights="last_layer"),
    "last-predict": Operation("last layer: linearized predictive", "linearized", weights="last_layer"),
    "last-tune": Operation("last layer: tuning the prior", "tune", weights="last_layer"),
}
OTHERS: dict[str, Operation] = {
    "last-diag-empirical": Operation("last layer: fit diag, empirical", "fit", "diag", "empirical", "last_layer"),
    "train": Operation("plain training step, alone", "train"),
    "reference": Operation("traces by plain autograd", "reference"),
}
OPERATIONS: dict[str, Operation] = FITS | USES | LAST | OTHERS


@dataclass(frozen=True)
class Case:
    workload: str
    operation: str
    tool: str = "lapwing"

    @property
    def name(self) -> str:
        return f"{self.workload}/{self.operation}" + ("" if self.tool == "lapwing" else f"@{self.tool}")


def _ours() -> list[Case]:
    cases = [Case(workload, operation) for workload in MAIN for operation in ("train", "reference", *FITS, *USES)]
    cases += [Case("mlp", "last-diag-empirical")]
    cases += [Case("classes3100", operation) for operation in LAST]
    cases += [Case(workload, "kron-exact") for workload in GROWING]
    cases += [Case(workload, "kron-mc") for workload in GROWING if "classes" in workload]
    return cases


def _theirs() -> list[Case]:
    backends = [rival for rival in RIVALS if rival.startswith("laplace-")]
    shared = [name for name, operation in FITS.items() if not operation.options]
    fits = {rival: [name for name in shared if not name.startswith("ekfac")] for rival in backends}
    fits["curvlinops"] = [name for name in shared if not name.startswith("diag")]
    fits["nngeometry"] = [name for name in shared if not name.endswith("empirical")]
    cases = []
    for workload in MAIN:
        for rival in RIVALS:
            if rival in backends or workload in ("mlp", "lenet5", "resnet18", "transformer"):
                cases += [Case(workload, operation, rival) for operation in fits[rival]]
        cases += [Case(workload, "predict-linearized", rival) for rival in backends]
        cases += [Case(workload, operation, backends[0]) for operation in ("decompose", "predict-sampled", "tune")]
    cases += [Case("mlp", "last-diag-empirical", rival) for rival in backends]
    cases += [Case("classes3100", operation, backends[0]) for operation in LAST]
    return cases


CASES: dict[str, Case] = {case.name: case for case in (*_ours(), *_theirs())}
