"""One case of a rival, in a process of its own inside `.venv-rivals`: prints the result as JSON.

Each first tries all weights. What then fails is tried with the linear and convolutional layers alone, and the
result says so. Nothing of Lapwing is imported here. Plain passes go through a second network, which has neither
frozen weights nor the hooks that some rivals leave behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.case import Task, reason, run_case
from benchmarks.measure import Result, Stopwatch, forget_peak, megabytes
from benchmarks.operations import SAMPLES
from benchmarks.workloads import Batch, Problem, dense_modules, dense_parameters

JACOBIAN = 2e7
"""Numbers of a Jacobian that a prediction of laplace-torch may form; it sees as many inputs as that allows, or two."""
MANY = 1000
"""Classes beyond which a fit of laplace-torch, with a backward pass for each, sees one batch once."""
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


def run(load: Callable[[], Problem], task: Callable[[Problem, nn.Module], Task]) -> Result:
    """With all weights, or else with those that every library has in Kronecker form."""
    plain = load().model
    given = task(load(), plain)
    if given.tool.startswith("laplace-"):
        attempt = LAPLACE[given.operation.kind]
    else:
        attempt = {"curvlinops": curvlinops_fit, "nngeometry": nngeometry_fit}[given.tool]
    dense = dense_parameters(plain)
    if given.operation.weights != "all" or all(name in dense for name, _ in plain.named_parameters()):
        return attempt(given)
    refused = ""
    if given.tool != "nngeometry":  # which is told its layers one by one
        try:
            return attempt(given)
        except Exception as error:
            refused = reason(error)
        given = task(load(), plain)
        forget_peak()
    for name, parameter in given.problem.model.named_parameters():
        parameter.requires_grad_(name in dense)
    try:
        return attempt(given) | {"only": "linear and convolutional layers", "refused": refused}
    except Exception as error:
        both = f"{refused}; with linear and convolutional layers only: " if refused else ""
        raise RuntimeError(both + reason(error)) from error


def fit_in_turns(
    task: Task, fit: Callable[[list[Batch]], Any], apart: tuple[Any, str] | None = None
) -> tuple[Result, Any]:
    """Time a fit, without the calls of the method that `apart` names, and hand back the last one."""
    watch = Stopwatch()
    fitted: list[Any] = []

    def call() -> None:
        fitted.clear()
        fitted.append(fit(task.problem.batches))

    with watch.around(*apart) if apart else nullcontext():
        result = task.time(call, apart=watch)
    return result, fitted[0]


# ------------------------------------------------------------------------------------- laplace-torch


def laplace_posterior(task: Task, batches: list[Batch], curvature_kind: str = "fisher") -> Any:
    """Monte Carlo, unless the fit itself is what counts: what comes after it costs the same."""
    import laplace
    from laplace import curvature

    operation = task.operation
    family = {"laplace-curvlinops": "Curvlinops", "laplace-backpack": "BackPack", "laplace-asdl": "Asdl"}[task.tool]
    backend = getattr(curvature, family + ("EF" if curvature_kind == "empirical" else "GGN"))
    la = laplace.Laplace(
        task.problem.model, "classification", subset_of_weights=operation.weights,
        hessian_structure=operation.structure, backend=backend,
        backend_kwargs={"stochastic": True} if curvature_kind == "fisher" else {},
    )  # fmt: skip
    la.fit(Ready(batches))
    return la


def laplace_fit(task: Task) -> Result:
    """Its kron decomposes at the end of every fit, for up to a minute; that is measured once, in `decompose`."""
    from laplace.utils.matrix import Kron

    def fit(batches: list[Batch]) -> Any:
        return laplace_posterior(task, batches, task.operation.curvature)

    many = task.plain(task.few[0][0]).shape[1] > MANY
    with mock.patch.object(Kron, "decompose", return_value=None):
        if many:
            task = replace(task, problem=replace(task.problem, batches=task.problem.batches[:1]), repeats=1)
        else:
            fit(task.few)
        result, la = fit_in_turns(task, fit)
    result |= laplace_curvature(task.problem.model, la)
    return result | ({"scaled": "from one batch"} if many else {})


def laplace_curvature(model: nn.Module, la: Any) -> Result:
    """Bytes of the factors, and the trace over linear and convolutional layers."""
    if hasattr(la, "H_facs"):
        groups = la.H_facs.kfacs
        traces = [
            [float(factor.double().trace() if factor.dim() > 1 else factor.sum()) for factor in g] for g in groups
        ]
        total = sum(sides[0] * (sides[1] if len(sides) > 1 else 1.0) for sides in traces)
        return {"trace": total, "factors_mb": megabytes(factor for group in groups for factor in group)}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    total = float(la.H.double().sum())
    if la.H.numel() == sum(parameter.numel() for _, parameter in named):  # otherwise the last layer alone
        parts = la.H.split([parameter.numel() for _, parameter in named])
        dense = dense_parameters(model)
        total = sum(float(part.double().sum()) for part, (name, _) in zip(parts, named, strict=True) if name in dense)
    return {"trace": total, "factors_mb": megabytes([la.H])}


def laplace_decompose(task: Task) -> Result:
    """Every fit of laplace-torch decomposes; that part of it is taken."""
    from laplace.utils.matrix import Kron

    result, _ = fit_in_turns(task, lambda batches: laplace_posterior(task, batches), (Kron, "decompose"))
    taken = result["decompose_s"]
    return {
        "plain_s": result["plain_s"], "seconds": taken, "ratio": taken / result["plain_s"], "runs": result["runs"],
    }  # fmt: skip


def laplace_predict(task: Task) -> Result:
    la = laplace_posterior(task, task.problem.batches[:1])
    inputs, targets = task.problem.inputs, task.problem.targets
    classes = task.plain(inputs[:1]).shape[1]
    count = len(inputs)
    options: dict[str, Any] = {"pred_type": "nn", "link_approx": "mc", "n_samples": SAMPLES}
    if task.operation.kind == "linearized":
        count = int(max(2, min(count, JACOBIAN / (classes * la.n_params))))  # plain passes with batch norms need two
        options = {"pred_type": "glm", "link_approx": "probit"}
    x, y = inputs[:count], targets[:count]
    result = task.time(lambda: la(x, **options), [(x, y)])
    result |= {"inputs": count, "per_1000_s": result["seconds"] * 1000 / count}
    return result | ({"scaled": f"from {count} inputs to 1,000"} if count < len(inputs) else {})


def laplace_tune(task: Task) -> Result:
    la = laplace_posterior(task, task.problem.batches)

    def call(steps: int = STEPS) -> None:
        la.optimize_prior_precision(pred_type="glm", method="marglik", n_steps=steps, prior_structure="scalar")

    call(1)
    result, scale = task.time(call), 100 / STEPS
    return result | {
        "seconds": result["seconds"] * scale, "ratio": result["ratio"] * scale, "scaled": f"from {STEPS} steps to 100",
    }  # fmt: skip


LAPLACE: dict[str, Callable[[Task], Result]] = {
    "fit": laplace_fit,
    "decompose": laplace_decompose,
    "linearized": laplace_predict,
    "sampled": laplace_predict,
    "tune": laplace_tune,
}


# --------------------------------------------------------------------------- curvlinops and nngeometry


def curvlinops_fit(task: Task) -> Result:
    import curvlinops

    model, operation = task.problem.model, task.operation
    kind = {"ggn": "type-2", "fisher": "mc", "empirical": "empirical"}[operation.curvature]
    build = {"kron": curvlinops.KFACLinearOperator, "ekfac": curvlinops.EKFACLinearOperator}[operation.structure]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def fit(batches: list[Batch]) -> Any:
        operator = build(
            model, nn.CrossEntropyLoss(reduction="sum"), parameters, batches, fisher_type=kind,
            separate_weight_and_bias=False, check_deterministic=False, num_per_example_loss_terms=1,
            num_data=sum(len(y) for _, y in batches),
        )  # fmt: skip
        operator.compute_kronecker_factors()
        if operation.structure == "ekfac":
            operator.compute_eigenvalue_correction()
        return operator

    fit(task.few)
    result, operator = fit_in_turns(task, fit, (curvlinops.EKFACLinearOperator, "_compute_eigenvectors"))
    factors = [*operator._input_covariances.values(), *operator._gradient_covariances.values()]
    return result | {"factors_mb": megabytes(factors), "trace": float(operator.trace)}


def nngeometry_fit(task: Task) -> Result:
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM, FIM_MonteCarlo
    from nngeometry.object import pspace

    model, operation = task.problem.model, task.operation
    wanted = {"diag": pspace.PMatDiag, "kron": pspace.PMatKFAC, "ekfac": pspace.PMatEKFAC}[operation.structure]
    layers = LayerCollection()
    for part in dense_modules(model).values():
        layers.add_layer_from_model(model, part)
    make = FIM_MonteCarlo if operation.curvature == "fisher" else FIM

    def fit(batches: list[Batch]) -> Any:
        loader = Ready(batches)
        matrix = make(model, loader, wanted, "classif_logits", device="cpu", layer_collection=layers)
        if operation.structure == "ekfac":
            matrix.update_diag(loader)
        return matrix

    fit(task.few)
    result, matrix = fit_in_turns(task, fit, (pspace.PMatKFAC, "compute_eigendecomposition"))
    return result | {"trace": float(matrix.trace()) * task.problem.examples}


if __name__ == "__main__":
    run_case(run, Path(__file__).stem)
