"""The machinery of the benchmarks: names, arithmetic, correctness of rivals, and one small case end to end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import __main__ as runner
from benchmarks import ours, report, text_models
from benchmarks.data import word_pieces
from benchmarks.measure import Stopwatch, exponent, in_turns, peak_mb, plain_pass
from benchmarks.operations import CASES, OPERATIONS, RIVALS
from benchmarks.reference import reference
from benchmarks.workloads import WORKLOADS, Problem
from lapwing import Laplace

ROOT = Path(__file__).resolve().parent.parent


def test_every_name_resolves() -> None:
    for name, case in CASES.items():
        assert name.partition("@")[0] == f"{case.workload}/{case.operation}"
        assert case.workload in WORKLOADS
        assert case.tool in ("lapwing", *RIVALS)
        assert OPERATIONS[case.operation].kind in ours.KINDS
        assert runner.select([name]) == [case]


def test_globs_select_and_unknown_names_are_refused() -> None:
    chosen = {case.name for case in runner.select(["lenet5/kron-*", "mlp/tune"])}
    assert {"lenet5/kron-exact", "lenet5/kron-exact@laplace-backpack", "mlp/tune"} <= chosen
    assert not any(name.startswith("lenet5/diag") for name in chosen)
    with pytest.raises(SystemExit, match="No case matches 'lenet6"):
        runner.select(["lenet6/*"])


def test_exponent_of_a_power() -> None:
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert exponent(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5, abs=1e-12)
    assert exponent(sizes, [7.0] * 4) == pytest.approx(0, abs=1e-12)


def test_what_is_apart_is_taken_off() -> None:
    class Work:
        def inner(self) -> None:
            time.sleep(0.05)

        def outer(self) -> None:
            time.sleep(0.01)
            self.inner()

    watch = Stopwatch()
    with watch.around(Work, "inner"):
        result = in_turns(lambda: time.sleep(0.01), Work().outer, 2, 10.0, watch)
    assert result["decompose_s"] >= 0.05
    assert 0.01 <= result["seconds"] < 0.05
    assert result["runs"] == 2
    assert result["ratio"] == result["seconds"] / result["plain_s"]
    assert Work.inner.__name__ == "inner"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the peak anew")
def test_peak_is_counted_anew() -> None:
    """In a process of its own, where no memory that was used before can be used again."""
    script = """
import torch
from benchmarks.measure import forget_peak, peak_mb
held = torch.ones(2**25)  # 128 MB
high = peak_mb()
del held
forget_peak()
assert peak_mb() < high - 100
held = torch.ones(2**25)
assert peak_mb() > high - 30
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_peak_is_not_that_of_the_parent() -> None:
    held = torch.ones(2**28)  # 1 GB
    code = "from benchmarks.measure import peak_mb; print(peak_mb())"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 700 < peak_mb()
    del held


def test_plain_pass_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain_pass(model, [(torch.randn(5, 3), torch.randint(2, (5,)))])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture
def small() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, bias=False),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).double()
    x, y = torch.randn(6, 1, 6, 6, dtype=torch.float64), torch.randint(4, (6,))
    return Problem(model.eval(), [(x[:4], y[:4]), (x[4:], y[4:])], x, y)


def test_reference_traces_against_the_dense_matrix(small: Problem) -> None:
    model, x = small.model, small.inputs
    names = dict(model.named_parameters())

    def outputs(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, values, (x,))
        return result

    jacobian: Any = torch.func.jacrev(outputs)(names)
    rows = torch.cat([jacobian[name].flatten(2) for name in names], 2)  # [N, C, p]
    p = model(x).softmax(1).detach()
    hessian = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    exact = torch.einsum("ncp,ncd,ndp->", rows, hessian, rows)
    residual = p - nn.functional.one_hot(small.targets, 4)
    empirical = torch.einsum("nc,ncp->np", residual, rows).square().sum()
    traces = reference(small)["traces"]
    assert sum(traces["diag-ggn"].values()) == pytest.approx(exact.item(), rel=1e-10)
    assert sum(traces["diag-empirical"].values()) == pytest.approx(empirical.item(), rel=1e-10)


@pytest.mark.parametrize("kind", ["ggn", "empirical"])
@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac"])
def test_reference_traces_are_those_of_a_fit(small: Problem, structure: str, kind: str) -> None:
    la = Laplace(small.model, "classification", structure, kind, progress=False).fit(small.batches)
    wanted = sum(reference(small)["traces"][f"{'kron' if structure == 'kron' else 'diag'}-{kind}"].values())
    assert sum(ours.trace(block) for block in la.curvature.blocks) == pytest.approx(wanted, rel=1e-10)


def results() -> report.Cases:
    fit = {"plain_s": 1.0, "runs": 3, "base_mb": 10.0, "peak_mb": 20.0}
    return {
        "mlp/reference": {"traces": {"kron-ggn": {"0": 6.0, "2": 4.0}, "diag-empirical": {"0": 1.0, "2": 2.0}}},
        "mlp/kron-exact": fit | {"seconds": 4.0, "ratio": 4.0, "trace": 10.0, "factors_mb": 1.0},
        "mlp/kron-mc": fit | {"seconds": 2.0, "ratio": 2.0, "trace": 12.0},
        "mlp/kron-exact@laplace-backpack": fit | {"seconds": 2.0, "ratio": 2.0, "trace": 6890.0},
        "mlp/kron-exact@laplace-curvlinops": fit | {"seconds": 9.0, "ratio": 9.0, "trace": 10.1},
        "mlp/kron-exact@laplace-asdl": {"error": "RuntimeError: a | b"},
        "mlp/kron-mc@laplace-asdl": fit | {"seconds": 3.0, "ratio": 3.0, "trace": 14.0},
        "mlp/kron-mc@laplace-backpack": fit | {"seconds": 1.0, "ratio": 1.0, "trace": 20.0},
        "mlp/last-diag-empirical@laplace-curvlinops": fit | {"seconds": 1.0, "ratio": 1.0, "trace": 0.0},
    }


def test_numbers_of_one_turn_and_of_another_machine_say_so() -> None:
    cases = results()
    cases["mlp/kron-exact"] |= {"kernels": "AVX2"}
    cases["mlp/kron-mc"] |= {"runs": 1}
    text = "\n".join(report.table(cases, "mlp", ["kron-exact", "kron-mc"]))
    assert "a plain pass over them took 1 s with AVX2 kernels." in text
    notes: list[str] = []
    shown = [report.cell(cases, f"mlp/{name}", OPERATIONS[name], notes, "AVX2") for name in ("kron-exact", "kron-mc")]
    assert shown == ["4", "2<sup>1</sup><sup>2</sup>"]
    assert notes == ["one turn, not a median", "measured on another machine"]
    assert all(note in text for note in notes)
    assert report.fastest(results(), "mlp", "kron-exact") is not None
    assert report.fastest(cases, "mlp", "kron-exact") is None  # none was measured there


def test_a_rival_with_the_wrong_curvature_does_not_compete() -> None:
    cases = results()
    assert report.misses(cases, "mlp/kron-exact@laplace-backpack") == pytest.approx(689)
    assert report.misses(cases, "mlp/kron-exact@laplace-curvlinops") is None
    assert report.misses(cases, "mlp/kron-mc@laplace-asdl") is None  # Monte Carlo: within its noise
    assert report.misses(cases, "mlp/kron-mc@laplace-backpack") == pytest.approx(2)  # its exact fit is wrong
    assert report.fastest(cases, "mlp", "kron-mc") == ("laplace-asdl", 3.0)
    assert report.misses(cases, "mlp/last-diag-empirical@laplace-curvlinops") == 0
    assert report.fastest(cases, "mlp", "kron-exact") == ("laplace-curvlinops", 9.0)
    assert report.fastest(cases, "mlp", "kron-tol") == ("laplace-curvlinops", 9.0)
    assert report.fastest(cases, "mlp", "diag-exact") is None


def test_table_says_what_is_wrong_and_what_did_not_run() -> None:
    text = report.text({"threads": 2, "torch": "2", "cases": results()}, "chart.svg")
    row = next(line for line in text.splitlines() if line.startswith("| fit kron, exact |"))
    assert row == "| fit kron, exact | 4 | 9 | ~~2~~ trace × 689 | –<sup>1</sup> | 2.2 |"
    assert "1. did not run: RuntimeError: a \\| b" in text


def test_growth_is_read_off() -> None:
    cases = {
        f"grow-examples-{n}/kron-exact": {"seconds": n * 2.0, "plain_s": n * 1.0, "peak_mb": 20.0, "base_mb": 15.0}
        for n in (512, 1024, 2048)
    }
    row = next(line for line in report.growth(cases) if line.startswith("| examples"))
    assert row == "| examples | fit kron, exact | 512 to 2048 | 1.00 | 1.00 | 0.00 |"


def test_word_pieces_are_the_longest_that_fit() -> None:
    index = {piece: number for number, piece in enumerate(["[UNK]", "un", "##aff", "##able", "##a", "unaf"])}
    assert word_pieces("unaffable", index) == [0]  # greedy: `unaf` leaves `fable`
    assert word_pieces("unaffable", {key: value for key, value in index.items() if key != "unaf"}) == [1, 2, 3]


def test_padding_does_not_change_a_text() -> None:
    torch.manual_seed(0)
    model = text_models.TextClassifier(20, 8, layers=2, width=8, hidden=16, heads=2, classes=3).double().eval()
    tokens = torch.tensor([[3, 5, 7]])
    padded = torch.tensor([[3, 5, 7, 0, 0]])
    torch.testing.assert_close(model(tokens), model(padded), rtol=1e-12, atol=1e-12)


def test_one_case_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "grow-depth-2/kron-exact", "--quick", "--results", str(path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    ((name, result),) = json.loads(path.read_text())["cases"].items()
    assert name == "grow-depth-2/kron-exact"
    assert "error" not in result
    assert math.isclose(result["ratio"], result["seconds"] / result["plain_s"])
    assert result["peak_mb"] >= result["base_mb"] > 0
    assert (tmp_path / "RESULTS.md").is_file()
    assert (tmp_path / "results.svg").read_text().startswith("<?xml")
