"""One case of Lapwing, in a process of its own: prints the result as JSON on the last line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.case import run_case
from benchmarks.measure import Result, Stopwatch, in_turns, megabytes, peak_mb, plain_pass
from benchmarks.operations import SAMPLES, Operation
from benchmarks.reference import reference
from benchmarks.workloads import Batch, Problem, dense_parameters
from lapwing import Laplace
from lapwing.curvature import Block
from lapwing.curvature.kronecker import KroneckerAccumulator


def posterior(model: nn.Module, operation: Operation, batches: list[Batch]) -> Laplace:
    options: dict[str, Any] = dict(operation.options)
    la = Laplace(
        model, "classification", operation.structure, operation.curvature, operation.weights, progress=False, **options
    )
    return la.fit(batches, generator=torch.Generator().manual_seed(0))


def fit(problem: Problem, operation: Operation, repeats: int, budget: float) -> Result:
    """A fit ÷ a plain pass over the same data; decompositions inside it (ekfac) apart."""
    base = peak_mb()
    _warm(problem, lambda few: posterior(problem.model, operation, few))
    fitted: list[Laplace] = []

    def call() -> None:
        fitted.clear()  # one posterior at a time
        fitted.append(posterior(problem.model, operation, problem.batches))

    watch = Stopwatch()
    with watch.around(KroneckerAccumulator, "decompose"):
        result = in_turns(lambda: plain_pass(problem.model, problem.batches), call, repeats, budget, watch)
    blocks = fitted[0].curvature.blocks
    comparable = dense_parameters(problem.model)
    parts = [block for block in blocks if comparable.issuperset(block.parameters)]
    return result | {
        "base_mb": base, "peak_mb": peak_mb(), "parameters": fitted[0].curvature.size,
        "factors_mb": sum(megabytes(block.accumulator.tensors().values()) for block in blocks),
        "trace": sum(trace(block) for block in parts),
        "covered": sum(block.size for block in parts),
    }  # fmt: skip


def trace(block: Block) -> float:
    accumulator = block.accumulator
    if isinstance(accumulator, KroneckerAccumulator):
        sides = [
            (side.diagonal(dim1=1, dim2=2) if side.dim() == 3 else side).double().sum(1)
            for side in (accumulator.outputs, accumulator.inputs)
        ]
        return float((sides[0] * sides[1]).sum() / accumulator.positions)
    if accumulator.kind in ("diag", "ekfac"):
        return float(accumulator.tensors()["sums"].double().sum())
    return float(accumulator.decompose(None).eigenvalues.sum())


def decompose(problem: Problem, operation: Operation, repeats: int, budget: float) -> Result:
    """All eigendecompositions of a fit, ÷ a plain pass over its data."""
    base = peak_mb()
    la = posterior(problem.model, operation, problem.batches)

    def call() -> None:
        for block in la.curvature.blocks:
            block.accumulator.decompose(None)

    result = in_turns(lambda: plain_pass(problem.model, problem.batches), call, repeats, budget)
    return result | {"base_mb": base, "peak_mb": peak_mb()}


def predict(problem: Problem, operation: Operation, repeats: int, budget: float) -> Result:
    """A prediction ÷ a plain pass over the same inputs; fit and decomposition came before."""
    base = peak_mb()
    la = posterior(problem.model, operation, problem.batches)
    options: dict[str, Any] = {"method": "linearized"}
    if operation.kind == "sampled":
        options = {"method": "sampled", "samples": SAMPLES, "generator": torch.Generator().manual_seed(0)}
    la.predict(problem.inputs[:4], **options)
    with ExitStack() as stack:
        watch = Stopwatch()
        stack.enter_context(watch.around(KroneckerAccumulator, "decompose"))
        data = [(problem.inputs, problem.targets)]
        result = in_turns(
            lambda: plain_pass(problem.model, data), lambda: la.predict(problem.inputs, **options), repeats, budget, watch
        )
    count = len(problem.inputs)
    per_1000 = result["seconds"] * 1000 / count
    return result | {"base_mb": base, "peak_mb": peak_mb(), "inputs": count, "per_1000_s": per_1000}


def tune(problem: Problem, operation: Operation, repeats: int, budget: float) -> Result:
    """The prior precision that maximizes the evidence, to convergence ÷ a plain pass over the data of the fit."""
    base = peak_mb()
    la = posterior(problem.model, operation, problem.batches)
    la.log_evidence()  # decomposes

    def call() -> None:
        la.at(prior=1.0).tune_prior()

    result = in_turns(lambda: plain_pass(problem.model, problem.batches), call, repeats, budget)
    return result | {"base_mb": base, "peak_mb": peak_mb()}


def train(problem: Problem, operation: Operation, repeats: int, budget: float) -> Result:
    """Memory of plain training steps and nothing else."""
    base = peak_mb()
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.0)

    def call() -> None:
        problem.model.train()
        for x, y in problem.batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(problem.model(x), y).backward()
            optimizer.step()

    result = in_turns(call, lambda: None, repeats, budget)
    return {
        "plain_s": result["plain_s"], "runs": result["runs"], "base_mb": base, "peak_mb": peak_mb(),
        "parameters": sum(parameter.numel() for parameter in problem.model.parameters()),
    }  # fmt: skip


def _warm(problem: Problem, call: Callable[[list[Batch]], object]) -> None:
    few = [(x[:4], y[:4]) for x, y in problem.batches[:1]]
    plain_pass(problem.model, few)
    call(few)


KINDS: dict[str, Callable[[Problem, Operation, int, float], Result]] = {
    "fit": fit,
    "decompose": decompose,
    "linearized": predict,
    "sampled": predict,
    "tune": tune,
    "train": train,
    "reference": lambda problem, *_: reference(problem),
}


def run(load: Callable[[], Problem], operation: Operation, tool: str, repeats: int, budget: float) -> Result:
    return KINDS[operation.kind](load(), operation, repeats, budget)


if __name__ == "__main__":
    run_case(run, Path(__file__).stem)
