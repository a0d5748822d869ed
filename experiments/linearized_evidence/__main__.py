"""Two pathologies of the linearized evidence and their remedies: `python -m experiments.linearized_evidence [--large]`.

Results are written network by network. `--only NAME` measures one of them anew, `--figure` draws only, `--large`
measures the network of 22.8M weights alone. What was measured before stays in results.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from experiments.linearized_evidence.figure import draw, landscapes
from experiments.linearized_evidence.measure import Setting, measure, scaling
from experiments.linearized_evidence.networks import CASES, LARGE, Case

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
FIRST = "MLP + BatchNorm"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.linearized_evidence")
    parser.add_argument("--large", action="store_true", help="the network of 22.8M weights alone")
    parser.add_argument("--only", help="one network by name", choices=list(CASES))
    parser.add_argument("--figure", action="store_true", help="the figure alone")
    given = parser.parse_args()
    cases = [LARGE] if given.large else [CASES[given.only]] if given.only else list(CASES.values())
    for case in [] if given.figure else cases:
        run(case)
    if not given.large:
        picture()


def run(case: Case) -> None:
    setting = Setting.of(case)
    row, tuned = measure(setting)
    keep(case.name, row)
    if row["scale_free"] and case is not LARGE:  # that one would take an hour more
        start = time.perf_counter()
        factors = [0.01, 0.1, 1.0, 10.0, 100.0] if case.name == FIRST else [10.0]
        row["scaling"] = scaling(setting, tuned, factors)
        row["seconds"] += time.perf_counter() - start
        keep(case.name, row)


def keep(name: str, row: dict[str, Any]) -> None:
    """Add a row to results.json, rounded to six digits."""
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    results[name] = row
    RESULTS.write_text(json.dumps(_rounded(results), indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{name}: {row['seconds']:.0f} s, {row['evidence']}, {row['test']}", flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def picture() -> None:
    setting = Setting.of(CASES[FIRST])
    tuned = setting.tuned(setting.fit(setting.model), "scalar")
    scalings = json.loads(RESULTS.read_text("utf-8"))[FIRST]["scaling"]
    draw(landscapes(setting, tuned), scalings, HERE / "figure.svg")


if __name__ == "__main__":
    main()
