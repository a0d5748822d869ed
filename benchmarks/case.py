"""The process of one case: reads its name, runs it, prints the result or why there is none."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import workloads
from benchmarks.measure import Result, limit_memory
from benchmarks.operations import CASES, OPERATIONS, REPEATS, SECONDS, Operation

Run = Callable[[Callable[[], workloads.Problem], Operation, str, int, float], Result]


def run_case(run: Run, program: str) -> None:
    """`run(load, operation, tool, repeats, budget)`; the result is the last line of the output."""
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
    try:
        result = run(
            lambda: workloads.load(case.workload, given.folder, given.quick),
            OPERATIONS[case.operation],
            case.tool,
            repeats,
            budget,
        )
    except Exception as error:  # whatever goes wrong is the result
        result = {"error": reason(error)}
    print(json.dumps(result))


def reason(error: Exception) -> str:
    """The kind of an error and its first line, short enough for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
