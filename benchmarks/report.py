"""From results to a table and a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, exponent
from benchmarks.operations import CASES, FITS, LAST, OPERATIONS, RIVALS, USES, Operation
from benchmarks.workloads import GROWING, MAIN, WORKLOADS

CHART = Path(__file__).parent.parent / "docs" / "images" / "benchmarks.svg"
NAMES = {
    "laplace-curvlinops": "laplace-torch, curvlinops",
    "laplace-backpack": "laplace-torch, BackPACK",
    "laplace-asdl": "laplace-torch, ASDL",
    "curvlinops": "curvlinops",
    "nngeometry": "nngeometry",
}
EXACT = 0.05
MONTE_CARLO = 5.0
"""The factor by which one draw per example may miss the trace: of a confident network few draws matter at all."""

Cases = dict[str, Result]


def expected(cases: Cases, workload: str, operation: Operation) -> float | None:
    """The trace that a fit must have, by plain autograd; None where it was not computed."""
    traces = cases.get(f"{workload}/reference", {}).get("traces")
    if operation.kind != "fit" or traces is None:
        return None
    kind = "empirical" if operation.curvature == "empirical" else "ggn"
    layers = list(traces[f"{'kron' if operation.structure == 'kron' else 'diag'}-{kind}"].values())
    return float(layers[-1] if operation.weights == "last_layer" else sum(layers))


def misses(cases: Cases, name: str) -> float | None:
    """The factor by which a fit's trace is wrong; None where it is right or nothing is known.

    A Monte Carlo fit is also wrong where the exact fit by the same means is.
    """
    case = CASES[name]
    operation, result = OPERATIONS[case.operation], cases[name]
    wanted = expected(cases, case.workload, operation)
    if wanted is None or "trace" not in result:
        return None
    factor = float(result["trace"] / wanted)
    if operation.curvature == "fisher":
        exact = name.replace("-mc", "-exact")
        right = 1 / MONTE_CARLO <= factor <= MONTE_CARLO and (exact not in cases or misses(cases, exact) is None)
    else:
        right = abs(factor - 1) <= EXACT
    return None if right else factor


def cost(result: Result, operation: Operation) -> float:
    """What is compared: a ratio for fits, seconds for the rest (per 1,000 inputs for predictions)."""
    if operation.kind == "fit":
        return float(result["ratio"])
    return float(result["per_1000_s"] if "per_1000_s" in result else result["seconds"])


def fastest(cases: Cases, workload: str, operation: str) -> tuple[str, float] | None:
    """The fastest rival that ran on the same kind of machine and returns the right curvature. One to 1e-3 competes
    with the exact fits.
    """
    kernels = cases.get(f"{workload}/{operation}", {}).get("kernels")
    name = operation.replace("-tol", "-exact")
    found = []
    for rival in RIVALS:
        case = f"{workload}/{name}@{rival}"
        ran = case in cases and "error" not in cases[case] and cases[case].get("kernels") == kernels
        if ran and misses(cases, case) is None:
            found.append((cost(cases[case], OPERATIONS[name]), rival))
    return (min(found)[1], min(found)[0]) if found else None


def cell(cases: Cases, name: str, operation: Operation, notes: list[str], kernels: str | None = None) -> str:
    """A number, struck out where the curvature is wrong; a note where there is more to say, as where it was measured
    with other `kernels`.
    """
    if name not in cases:
        return ""
    result = cases[name]
    if "error" in result:
        return "–" + _note(notes, f"did not run: {result['error']}")
    unit = "" if operation.kind == "fit" else " s"
    text = f"{cost(result, operation):.3g}{unit}"
    wrong = misses(cases, name)
    if wrong is not None:
        text = f"~~{text}~~ trace × {wrong:.3g}"
    if "only" in result:
        refused = f"; with all weights: {result['refused']}" if result["refused"] else ""
        text += _note(notes, f"{result['only']} only{refused}")
    if "scaled" in result:
        text += _note(notes, f"scaled {result['scaled']}")
    if result.get("runs") == 1:
        text += _note(notes, "one turn, not a median")
    if result.get("kernels") != kernels:
        text += _note(notes, "measured on another machine")
    return text


def _note(notes: list[str], text: str) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    if text not in notes:
        notes.append(text)
    return f"<sup>{notes.index(text) + 1}</sup>"


def table(cases: Cases, workload: str, operations: list[str]) -> list[str]:
    """Lapwing, each rival and the factor between Lapwing and the fastest of them that is right."""
    about = WORKLOADS[workload]
    rivals = [rival for rival in RIVALS if any(f"{workload}/{name}@{rival}" in cases for name in operations)]
    rows, notes = [], list[str]()
    measured = [case for case in (f"{workload}/kron-exact", *cases) if case.startswith(f"{workload}/")]
    first: Result = next((cases[case] for case in measured if "plain_s" in cases.get(case, {})), {})
    plain, kernels = first.get("plain_s"), first.get("kernels")
    for name in operations:
        operation, case = OPERATIONS[name], f"{workload}/{name}"
        if case not in cases:
            continue
        shown = [
            cell(cases, one, operation, notes, kernels) for one in (case, *(f"{case}@{rival}" for rival in rivals))
        ]
        best, factor = fastest(cases, workload, name), ""
        if best is not None and "error" not in cases[case]:
            factor = f"{best[1] / cost(cases[case], operation):.1f}"
        rows.append(f"| {operation.title} | {' | '.join(shown)} | {factor} |")
    if not rows:
        return []
    heads = ["", "Lapwing", *(NAMES[rival] for rival in rivals), "times faster"]
    lines = [
        f"## {about.title}",
        "",
        f"{about.about}. A fit sees {about.examples:,} examples in batches of {about.batch}",
    ]
    where = f" with {kernels} kernels" if kernels else ""
    lines[-1] += f"; a plain pass over them took {plain:.3g} s{where}." if plain else "."
    lines += ["", f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1), *rows, ""]
    return lines + [f"{number}. {note}" for number, note in enumerate(notes, 1)] + ([""] if notes else [])


def memory(cases: Cases) -> list[str]:
    rows = []
    for workload in MAIN:
        step, fit = cases.get(f"{workload}/train", {}), cases.get(f"{workload}/kron-exact", {})
        if "peak_mb" not in step or "factors_mb" not in fit:
            continue
        predict = cases.get(f"{workload}/predict-linearized", {}).get("peak_mb")
        share = (fit["peak_mb"] - fit["factors_mb"]) / step["peak_mb"]
        above = (fit["peak_mb"] - fit["base_mb"] - fit["factors_mb"]) / max(step["peak_mb"] - step["base_mb"], 1e-3)
        rows.append(
            f"| {MAIN[workload].title} | {step['peak_mb']:.0f} | {fit['peak_mb']:.0f} | {fit['factors_mb']:.0f} "
            f"| {share:.2f} | {above:.2f} | {'' if predict is None else format(predict, '.0f')} |"
        )
    if not rows:
        return []
    return [
        "## Memory", "",
        "Peak resident memory in MB, each in a process of its own. The ratio is that of a kron fit without its factors "
        "to a plain training step; the second one leaves out what the process held when model and data were loaded "
        "(some 300 MB of libraries).", "",
        "| | training step | kron fit, exact | its factors | ratio | ratio above load | linearized predictive |",
        "| --- |" + " ---: |" * 6, *rows, "",
    ]  # fmt: skip


def growth(cases: Cases) -> list[str]:
    rows = []
    for axis in ("examples", "width", "depth", "classes"):
        for name in ("kron-exact", "kron-mc"):
            found = [
                (WORKLOADS[workload].size, cases[f"{workload}/{name}"])
                for workload in GROWING
                if workload.startswith(f"grow-{axis}-") and "seconds" in cases.get(f"{workload}/{name}", {})
            ]
            if len(found) < 2:
                continue
            sizes = [float(size) for size, _ in found]
            columns = [[result["seconds"] for _, result in found], [result["plain_s"] for _, result in found]]
            columns.append([max(result["peak_mb"] - result["base_mb"], 1e-3) for _, result in found])
            slopes = " | ".join(f"{exponent(sizes, column):.2f}" for column in columns)
            rows.append(f"| {axis} | {OPERATIONS[name].title} | {sizes[0]:g} to {sizes[-1]:g} | {slopes} |")
    if not rows:
        return []
    return [
        "## Growth", "",
        "Exponents by least squares of the logarithms: 1 is linear, 0 constant. Memory is that above what was held "
        "when model and data were loaded.", "",
        "| what grows | operation | from, to | time | time of a plain pass | memory |",
        "| --- | --- | --- |" + " ---: |" * 3, *rows, "",
    ]  # fmt: skip


def text(record: dict[str, Any], chart: str) -> str:
    cases: Cases = record["cases"]
    lines = [
        "# Benchmarks", "",
        f"![Cost of a fit as a multiple of one plain pass, Lapwing and the fastest rival that is right]({chart})", "",
        "<!-- --8<-- [start:tables] -->",
        f"`make bench` on {record['threads']} threads, torch {record['torch']}. A fit's number is its time as a "
        "multiple of one plain forward and backward pass over the same data, in turns in one process, medians of up "
        "to seven; decompositions are apart. Predictions are in seconds per 1,000 inputs, the rest in seconds. A "
        "number is struck out where the trace of the curvature is not the one that plain autograd gives; the "
        "factor is what the trace is off by. The last column is the fastest rival that is right ÷ Lapwing.", "",
    ]  # fmt: skip
    for workload in MAIN:
        lines += table(cases, workload, [*FITS, *USES, "last-diag-empirical"])
    lines += table(cases, "classes3100", list(LAST))
    lines += memory(cases) + growth(cases)
    lines += [] if cases else ["There are no results yet: run `make bench`.", ""]
    return "\n".join([*lines, "<!-- --8<-- [end:tables] -->"]) + "\n"


def write(results: Path, chart: Path) -> None:
    """`RESULTS.md` beside the results, and the chart."""
    from benchmarks.chart import draw

    record = json.loads(results.read_text(encoding="utf-8"))
    draw(record["cases"], chart)
    page = results.with_name("RESULTS.md" if results.name == "results.json" else results.stem + ".md")
    where = chart.name if chart.parent == page.parent else "../docs/images/" + chart.name
    page.write_text(text(record, where), encoding="utf-8")
