"""Run the cases, each in a process of its own, and write `results.json`, `RESULTS.md` and the chart.

`python -m benchmarks` runs all; `python -m benchmarks 'lenet5/*' mlp/tune` those that match, and keeps the other
results. `--quick` is a trial of the machinery on a handful of examples: its times mean nothing, so it writes only
where `--results` says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, workloads
from benchmarks.data import MissingDataError
from benchmarks.measure import Result
from benchmarks.operations import CASES, LIMIT, Case

ROOT = Path(__file__).parent.parent
RIVALS_PYTHON = ROOT / ".venv-rivals" / "bin" / "python"
RESULTS = Path(__file__).parent / "results.json"


def select(patterns: list[str]) -> list[Case]:
    """The cases that match any pattern, in their own order; a pattern that matches none is an error."""
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in CASES):
            raise SystemExit(
                f"No case matches {pattern!r}. Cases are named workload/operation[@rival]; --list has all."
            )
    return [case for name, case in CASES.items() if any(fnmatch(name, pattern) for pattern in patterns)]


def call(command: list[str], limit: float) -> tuple[str, str]:
    """Output of a process, and why it failed: empty if it did not. At the limit it is stopped."""
    finished = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
    )  # fmt: skip
    try:
        output, errors = finished.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        finished.kill()
        finished.communicate()
        return "", f"no result within {limit:.0f} s"
    if finished.returncode < 0:
        return "", f"stopped by {signal.Signals(-finished.returncode).name}"
    if finished.returncode:
        lines = errors.strip().splitlines() or [f"exit status {finished.returncode}"]
        return "", lines[-1]
    return output, ""


def run(case: Case, folder: Path, quick: bool) -> Result:
    """The result of a case, or the reason why it has none."""
    ours = case.tool == "lapwing"
    python, module = (sys.executable, "benchmarks.ours") if ours else (str(RIVALS_PYTHON), "benchmarks.rivals")
    flags = ["--quick"] if quick else []
    output, failure = call(
        [python, "-m", module, case.name, str(folder), *flags], LIMIT["lapwing" if ours else "rivals"]
    )
    if failure:
        return {"error": failure}
    result: Result = json.loads(output.splitlines()[-1])
    return result


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__.split("+")[0],
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "system": platform.system(),
    }


def say(case: Case, result: Result, seconds: float) -> None:
    if "error" in result:
        text = f"did not run: {result['error']}"
    else:
        parts = ("ratio", "seconds", "per_1000_s", "runs", "peak_mb", "trace")
        text = ", ".join(f"{key} {result[key]:.4g}" for key in parts if key in result)
    print(f"{case.name:45} {seconds:5.0f} s   {text}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", default=["*"], help="names or globs of cases")
    parser.add_argument("--quick", action="store_true", help="a trial on a handful of examples")
    parser.add_argument("--results", type=Path, help=f"file to merge into (default {RESULTS.name})")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--report", action="store_true", help="only write table and chart anew")
    given = parser.parse_args(arguments)
    chosen = select(given.cases)
    if given.list:
        print("\n".join(case.name for case in chosen))
        return
    path: Path | None = given.results or (None if given.quick else RESULTS)
    record: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.is_file() else {}
    known: dict[str, Result] = record.get("cases", {})
    if not given.report:
        if any(case.tool != "lapwing" for case in chosen) and not RIVALS_PYTHON.is_file():
            print("Rivals are left out: `make rivals` installs them.", flush=True)
            chosen = [case for case in chosen if case.tool == "lapwing"]
        known |= measure(chosen, given.quick, path, known)
    if path is not None:
        write(path, known)
        report.write(path, chart=report.CHART if path == RESULTS else path.with_suffix(".svg"))


def measure(cases: list[Case], quick: bool, path: Path | None, known: dict[str, Result]) -> dict[str, Result]:
    """Run the cases; what is known so far is written after each."""
    unprepared: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="lapwing-benchmarks-") as name:
        folder = Path(name)
        for case in cases:
            if not (folder / f"{case.workload}.safetensors").is_file() and case.workload not in unprepared:
                try:
                    workloads.prepare(case.workload, folder, quick)
                except MissingDataError as missing:
                    unprepared[case.workload] = str(missing)
            start = time.perf_counter()
            failure = unprepared.get(case.workload, "")
            known[case.name] = {"error": failure} if failure else run(case, folder, quick)
            say(case, known[case.name], time.perf_counter() - start)
            if path is not None:
                write(path, known)
    return known


def write(path: Path, known: dict[str, Result]) -> None:
    """Results in the order of the cases; those of cases that are gone are dropped."""
    ordered = {name: known[name] for name in CASES if name in known}
    path.write_text(json.dumps(machine() | {"cases": ordered}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
