"""The process of one case: reads its name, runs it, prints the result or why there is none."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks import workloads
from benchmarks.measure import Result, Stopwatch, in_turns, kernels, limit_memory, peak_mb, plain_pass
from benchmarks.operations import CASES, OPERATIONS, REPEATS, SECONDS, Operation
from benchmarks.workloads import Batch, Problem


@dataclass(frozen=True)
class Task:
    """What a case has to do. Plain passes go through `plain`, the network itself or a second one of its kind."""

    problem: Problem
    operation: Operation
    tool: str
    repeats: int
    budget: float
    plain: nn.Module

    @property
    def few(self) -> list[Batch]:
        """Four examples, to warm up."""
        return [(x[:4], y[:4]) for x, y in self.problem.batches[:1]]

    def time(
        self, call: Callable[[], object], batches: list[Batch] | None = None, apart: Stopwatch | None = None
    ) -> Result:
        """A call in turns with a plain pass over `batches` (those of the fit); what `apart` sees is taken off."""
        chosen = self.problem.batches if batches is None else batches
        plain_pass(self.plain, self.few)
        return in_turns(lambda: plain_pass(self.plain, chosen), call, self.repeats, self.budget, apart)


Run = Callable[[Callable[[], Problem], Callable[[Problem, nn.Module], Task]], Result]


def run_case(run: Run, program: str) -> None:
    """Print the result of `run(load, task)` as the last line of the output."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("case", choices=CASES, metavar="case")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    case = CASES[given.case]
    limit_memory()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    repeats, budget = (1, 1.0) if given.quick else (REPEATS, SECONDS)
    base: list[float] = []

    def load() -> Problem:
        problem = workloads.load(case.workload, given.folder, given.quick)
        base.append(peak_mb())
        return problem

    def task(problem: Problem, plain: nn.Module) -> Task:
        return Task(problem, OPERATIONS[case.operation], case.tool, repeats, budget, plain)

    try:
        result = run(load, task)
        result |= {"base_mb": base[0], "peak_mb": peak_mb(), "kernels": kernels()}
    except Exception as error:  # whatever goes wrong is the result
        result = {"error": reason(error)}
    print(json.dumps(result))


def reason(error: Exception) -> str:
    """The kind of an error and its first line, short enough for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."
