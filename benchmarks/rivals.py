"""One case of a rival, in a process of its own inside `.venv-rivals`: prints the result as JSON.

Each first tries all weights. What then fails is tried with the linear and convolutional layers alone, and the
result says so. Nothing of Lapwing is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.case import reason, run_case
from benchmarks.measure import Result, Stopwatch, in_turns, megabytes, peak_mb, plain_pass
from benchmarks.operations import SAMPLES, Operation
from benchmarks.workloads import Batch, Problem, dense_parameters

JACOBIAN = 2e8
"""Numbers of a Jacobian that a prediction of laplace-torch may form; it sees as many inputs as that allows."""
STEPS = 10
"""Of the 100 that laplace-torch takes to tune a prior; the time is scaled."""


class Ready(DataLoader[Any]):
    """A loader whose batches are made beforehand, so that nobody is charged for collating."""

    def __init__(self, batches: list[Batch]) -> None:
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        super().__init__(TensorDataset(x, y), batch_size=len(batches[0][1]))
        self.ready = batches

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        return iter(self.ready)


def run(load: Callable[[], Problem], operation: Operation, tool: str, repeats: int, budget: float) -> Result:
    """With all weights, or else with those that every library has in Kronecker form."""
    problem = load()
    others = [name for name, _ in problem.model.named_parameters() if name not in dense_parameters(problem.model)]
    if tool.startswith("laplace-"):
        attempt = LAPLACE[operation.kind]
    else:
        attempt = {"curvlinops": curvlinops_fit, "nngeometry": nngeometry_fit}[tool]
    refused = ""
    if others and operation.weights == "all" and tool != "nngeometry":
        try:
            return attempt(problem, operation, tool, repeats, budget)
        except Exception as error:
            refused = reason(error)
        problem = load()  # without the hooks that the attempt may have left behind
    if others and operation.weights == "all":
        for name, parameter in problem.model.named_parameters():
            parameter.requires_grad_(name not in others)
    result = attempt(problem, operation, tool, repeats, budget)
    return result | ({"only": "linear and convolutional layers", "refused": refused} if others else {})


# ------------------------------------------------------------------------------------- laplace-torch


def laplace_posterior(problem: Problem, operation: Operation, tool: str, batches: list[Batch]) -> Any:
    import laplace
    from laplace import curvature

    family = {"laplace-curvlinops": "Curvlinops", "laplace-backpack": "BackPack", "laplace-asdl": "Asdl"}[tool]
    backend = getattr(curvature, family + ("EF" if operation.curvature == "empirical" else "GGN"))
    la = laplace.Laplace(
        problem.model, "classification", subset_of_weights=operation.weights, hessian_structure=operation.structure,
        backend=backend, backend_kwargs={"stochastic": True} if operation.curvature == "fisher" else {},
    )  # fmt: skip
    la.fit(Ready(batches))
    return la


def laplace_fit(problem: Problem, operation: Operation, tool: str, repeats: int, budget: float) -> Result:
    from laplace.utils.matrix import Kron

    base = peak_mb()
    watch = Stopwatch()
    fitted: list[Any] = []

    def call() -> None:
        fitted.clear()
        fitted.append(laplace_posterior(problem, operation, tool, problem.batches))

    with watch.around(Kron, "decompose"):
        few = [(x[:4], y[:4]) for x, y in problem.batches[:1]]
        plain_pass(problem.model, few)
        if operation.structure != "kron" or max(p.numel() for p in problem.model.parameters()) < 2**21:
            laplace_posterior(problem, operation, tool, few)  # a large kron would decompose for a minute
        result = in_turns(lambda: plain_pass(problem.model, problem.batches), call, repeats, budget, watch)
    return result | {"base_mb": base, "peak_mb": peak_mb()} | laplace_curvature(problem, fitted[0])


def laplace_curvature(problem: Problem, la: Any) -> Result:
    """Bytes of the factors, and the trace over linear and convolutional layers."""
    if hasattr(la, "H_facs"):
        groups = la.H_facs.kfacs
        sides = [[float(factor.double().trace() if factor.dim() > 1 else factor.sum()) for factor in g] for g in groups]
        trace = sum(side[0] * (side[1] if len(side) > 1 else 1.0) for side in sides)
        return {"trace": trace, "factors_mb": megabytes(factor for group in groups for factor in group)}
    dense, start, total = dense_parameters(problem.model), 0, 0.0
    named = [(name, p) for name, p in problem.model.named_parameters() if p.requires_grad]
    if la.H.numel() != sum(p.numel() for _, p in named):  # the last layer
        return {"trace": float(la.H.double().sum()), "factors_mb": megabytes([la.H])}
    for name, parameter in named:
        part = la.H[start : start + parameter.numel()]
        total += float(part.double().sum()) if name in dense else 0.0
        start += parameter.numel()
    return {"trace": total, "factors_mb": megabytes([la.H])}


def laplace_decompose(problem: Problem, operation: Operation, tool: str, repeats: int, budget: float) -> Result:
    from laplace.utils.matrix import Kron

    base = peak_mb()
    watch = Stopwatch()
    with watch.around(Kron, "decompose"):  # every fit decomposes, so one fit is the measurement
        plain = in_turns(
            lambda: plain_pass(problem.model, problem.batches),
            lambda: laplace_posterior(problem, operation, tool, problem.batches), min(repeats, 3), budget, watch,
        )  # fmt: skip
    taken = plain["decompose_s"]
    return {
        "plain_s": plain["plain_s"], "seconds": taken, "ratio": taken / plain["plain_s"], "runs": plain["runs"],
        "base_mb": base, "peak_mb": peak_mb(),
    }  # fmt: skip


def laplace_predict(problem: Problem, operation: Operation, tool: str, repeats: int, budget: float) -> Result:
    base = peak_mb()
    la = laplace_posterior(problem, operation, tool, problem.batches[:1])
    classes = problem.model(problem.inputs[:1]).shape[1]
    count = len(problem.inputs)
    options: dict[str, Any] = {"pred_type": "nn", "link_approx": "mc", "n_samples": SAMPLES}
    if operation.kind == "linearized":
        count = int(max(1, min(count, JACOBIAN / (classes * la.n_params))))
        options = {"pred_type": "glm", "link_approx": "probit"}
    x, y = problem.inputs[:count], problem.targets[:count]
    result = in_turns(
        lambda: plain_pass(problem.model, [(x, y)]), lambda: la(x, **options), repeats, budget
    )  # fmt: skip
    per_1000 = result["seconds"] * 1000 / count
    return result | {"base_mb": base, "peak_mb": peak_mb(), "inputs": count, "per_1000_s": per_1000}


def laplace_tune(problem: Problem, operation: Operation, tool: str, repeats: int, budget: float) -> Result:
    base = peak_mb()
    la = laplace_posterior(problem, operation, tool, problem.batches)

    def call() -> None:
        la.optimize_prior_precision(pred_type="glm", method="marglik", n_steps=STEPS, prior_structure="scalar")

    result = in_turns(lambda: plain_pass(problem.model, problem.batches), call, repeats, budget)
    scale = 100 / STEPS
    return result | {
        "seconds": result["seconds"] * scale, "ratio": result["ratio"] * scale, "scaled": f"from {STEPS} steps to 100",
        "base_mb": base, "peak_mb": peak_mb(),
    }  # fmt: skip


LAPLACE: dict[str, Callable[[Problem, Operation, str, int, float], Result]] = {
    "fit": laplace_fit,
    "decompose": laplace_decompose,
    "linearized": laplace_predict,
    "sampled": laplace_predict,
    "tune": laplace_tune,
}


# --------------------------------------------------------------------------- curvlinops and nngeometry


def curvlinops_fit(problem: Problem, operation: Operation, tool: str, repeats: int, budget: float) -> Result:
    import curvlinops

    kind = {"ggn": "type-2", "fisher": "mc", "empirical": "empirical"}[operation.curvature]
    build = {"kron": curvlinops.KFACLinearOperator, "ekfac": curvlinops.EKFACLinearOperator}[operation.structure]
    parameters = [parameter for parameter in problem.model.parameters() if parameter.requires_grad]

    def fit(batches: list[Batch]) -> Any:
        operator = build(
            problem.model, nn.CrossEntropyLoss(reduction="sum"), parameters, batches, fisher_type=kind,
            separate_weight_and_bias=False, check_deterministic=False, num_per_example_loss_terms=1,
            num_data=sum(len(y) for _, y in batches),
        )  # fmt: skip
        operator.compute_kronecker_factors()
        if operation.structure == "ekfac":
            operator.compute_eigenvalue_correction()
        return operator

    watch = Stopwatch()
    fitted: list[Any] = []

    def call() -> None:
        fitted.clear()
        fitted.append(fit(problem.batches))

    base = peak_mb()
    _warm(problem, fit)
    with watch.around(curvlinops.EKFACLinearOperator, "_compute_eigenvectors"):
        result = in_turns(lambda: plain_pass(problem.model, problem.batches), call, repeats, budget, watch)
    factors = [*fitted[0]._input_covariances.values(), *fitted[0]._gradient_covariances.values()]
    trace = fitted[0].trace
    return result | {
        "base_mb": base, "peak_mb": peak_mb(), "factors_mb": megabytes(factors),
        "trace": float(trace() if callable(trace) else trace),
    }  # fmt: skip


def nngeometry_fit(problem: Problem, operation: Operation, tool: str, repeats: int, budget: float) -> Result:
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM, FIM_MonteCarlo
    from nngeometry.object import pspace

    wanted = {"diag": pspace.PMatDiag, "kron": pspace.PMatKFAC, "ekfac": pspace.PMatEKFAC}[operation.structure]
    layers = LayerCollection()
    for part in problem.model.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            layers.add_layer_from_model(problem.model, part)
    make = FIM_MonteCarlo if operation.curvature == "fisher" else FIM

    def fit(batches: list[Batch]) -> Any:
        loader = Ready(batches)
        matrix = make(problem.model, loader, wanted, "classif_logits", device="cpu", layer_collection=layers)
        if operation.structure == "ekfac":
            matrix.update_diag(loader)
        return matrix

    watch = Stopwatch()
    fitted: list[Any] = []

    def call() -> None:
        fitted.clear()
        fitted.append(fit(problem.batches))

    base = peak_mb()
    _warm(problem, fit)
    with watch.around(pspace.PMatKFAC, "compute_eigendecomposition"):
        result = in_turns(lambda: plain_pass(problem.model, problem.batches), call, repeats, budget, watch)
    trace = float(fitted[0].trace()) * problem.examples
    return result | {"base_mb": base, "peak_mb": peak_mb(), "trace": trace}


def _warm(problem: Problem, call: Callable[[list[Batch]], object]) -> None:
    few = [(x[:4], y[:4]) for x, y in problem.batches[:1]]
    plain_pass(problem.model, few)
    call(few)


if __name__ == "__main__":
    run_case(run, Path(__file__).stem)
