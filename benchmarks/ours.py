"""One case of Lapwing, in a process of its own: prints the result as JSON on the last line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.case import Task, run_case
from benchmarks.measure import Result, Stopwatch, in_turns, megabytes
from benchmarks.operations import SAMPLES
from benchmarks.reference import reference
from benchmarks.workloads import Batch, Problem, dense_parameters
from lapwing import Laplace
from lapwing.curvature import Block
from lapwing.curvature.kronecker import KroneckerAccumulator


def posterior(task: Task, batches: list[Batch]) -> Laplace:
    operation = task.operation
    options: dict[str, Any] = dict(operation.options)
    la = Laplace(
        task.problem.model, "classification", operation.structure, operation.curvature, operation.weights,
        progress=False, **options,
    )  # fmt: skip
    return la.fit(batches, generator=torch.Generator().manual_seed(0))


def fit(task: Task) -> Result:
    """A fit ÷ a plain pass over the same data; decompositions inside it (ekfac) apart."""
    posterior(task, task.few)
    fitted: list[Laplace] = []

    def call() -> None:
        fitted.clear()  # one posterior at a time
        fitted.append(posterior(task, task.problem.batches))

    watch = Stopwatch()
    with watch.around(KroneckerAccumulator, "decompose"):
        result = task.time(call, apart=watch)
    blocks = fitted[0].curvature.blocks
    comparable = dense_parameters(task.problem.model)
    return result | {
        "parameters": fitted[0].curvature.size,
        "factors_mb": sum(megabytes(block.accumulator.tensors().values()) for block in blocks),
        "trace": sum(trace(block) for block in blocks if comparable.issuperset(block.parameters)),
    }


def trace(block: Block) -> float:
    accumulator = block.accumulator
    if isinstance(accumulator, KroneckerAccumulator):
        sides = [
            (side.diagonal(dim1=1, dim2=2) if side.dim() == 3 else side).double().sum(1)
            for side in (accumulator.outputs, accumulator.inputs)
        ]
        return float((sides[0] * sides[1] / accumulator.positions).sum())
    if accumulator.kind in ("diag", "ekfac"):
        return float(accumulator.tensors()["sums"].double().sum())
    return float(accumulator.decompose(None).eigenvalues.sum())


def decompose(task: Task) -> Result:
    """All eigendecompositions of a fit, ÷ a plain pass over its data."""
    la = posterior(task, task.problem.batches)
    return task.time(lambda: [block.accumulator.decompose(None) for block in la.curvature.blocks])


def predict(task: Task) -> Result:
    """A prediction ÷ a plain pass over the same inputs; fit and decomposition came before."""
    la = posterior(task, task.problem.batches)
    options: dict[str, Any] = {"method": "linearized"}
    if task.operation.kind == "sampled":
        options = {"method": "sampled", "samples": SAMPLES, "generator": torch.Generator().manual_seed(0)}
    inputs, targets = task.problem.inputs, task.problem.targets
    la.predict(inputs[:4], **options)  # decomposes
    result = task.time(lambda: la.predict(inputs, **options), [(inputs, targets)])
    return result | {"inputs": len(inputs), "per_1000_s": result["seconds"] * 1000 / len(inputs)}


def tune(task: Task) -> Result:
    """The prior precision that maximizes the evidence, to convergence ÷ a plain pass over the data of the fit."""
    la = posterior(task, task.problem.batches)
    la.log_evidence()  # decomposes
    return task.time(lambda: la.at(prior=1.0).tune_prior())


def train(task: Task) -> Result:
    """Plain training steps and nothing else, for their memory."""
    model = task.problem.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def call() -> None:
        model.train()
        for x, y in task.problem.batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    result = in_turns(call, lambda: None, task.repeats, task.budget)
    size = sum(parameter.numel() for parameter in model.parameters())
    return {"plain_s": result["plain_s"], "runs": result["runs"], "parameters": size}


KINDS: dict[str, Callable[[Task], Result]] = {
    "fit": fit,
    "decompose": decompose,
    "linearized": predict,
    "sampled": predict,
    "tune": tune,
    "train": train,
    "reference": lambda task: reference(task.problem),
}


def run(load: Callable[[], Problem], task: Callable[[Problem, nn.Module], Task]) -> Result:
    problem = load()
    given = task(problem, problem.model)
    return KINDS[given.operation.kind](given)


if __name__ == "__main__":
    run_case(run, Path(__file__).stem)
