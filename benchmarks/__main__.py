"""Measure Lapwing as ratios to a plain pass over the same data in the same run.

Each case runs in a process of its own: `python -m benchmarks` runs all and writes `benchmarks/results.json` and
`benchmarks/RESULTS.md`; `python -m benchmarks CASE` runs one and prints it as JSON.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import ResNet18, lenet5, mlp
from lapwing import Laplace

Batches = list[tuple[Tensor, Tensor]]
HERE = Path(__file__).parent


def batches(count: int, size: int, *shape: int) -> Batches:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(count)
    ]


def train_pass(model: nn.Module, data: Batches) -> float:
    """One plain forward and backward pass over the data, in seconds."""
    model.train()
    start = time.perf_counter()
    for x, y in data:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
    return time.perf_counter() - start


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak() -> float:
    """Peak resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fit_ratios(model: nn.Module, data: Batches, repeats: int, **options: Any) -> dict[str, float]:
    """Median fit ÷ median plain pass, taken in turns."""
    train_pass(model, data[:2])
    Laplace(model, "classification", progress=False, **options).fit(data[:2])
    plain, fits = [], []
    for _ in range(repeats):
        plain.append(train_pass(model, data))
        fits.append(timed(lambda: Laplace(model, "classification", progress=False, **options).fit(data)))
    ratio = statistics.median(fits) / statistics.median(plain)
    return {"plain_s": statistics.median(plain), "fit_s": statistics.median(fits), "ratio": ratio, "peak_mb": peak()}


def predict_ratio(model: nn.Module, data: Batches, x: Tensor, repeats: int) -> dict[str, float]:
    """Median linearized prediction of all weights ÷ median forward pass, the decomposition apart."""
    la = Laplace(model, "classification", progress=False).fit(data)
    decompose = timed(lambda: la.posterior.blocks)
    la.predict(x[:8])
    model.eval()
    forwards, predictions = [], []
    for _ in range(repeats):
        with torch.no_grad():
            forwards.append(timed(lambda: model(x)))
        predictions.append(timed(lambda: la.predict(x)))
    forward, prediction = statistics.median(forwards), statistics.median(predictions)
    return {
        "forward_s": forward, "predict_s": prediction, "ratio": prediction / forward, "decompose_s": decompose,
        "peak_mb": peak(),
    }  # fmt: skip


def evidence_sweep() -> dict[str, float]:
    """1,000 temperatures with the evidence of each, on a fitted LeNet-5."""
    la = Laplace(lenet5(), "classification", progress=False).fit(batches(4, 128, 1, 28, 28))
    la.log_evidence()
    seconds = timed(lambda: [la.at(temperature=0.5 + i / 500).log_evidence() for i in range(1000)])
    return {"sweep_s": seconds, "peak_mb": peak()}


CASES: dict[str, Callable[[], dict[str, float]]] = {
    "lenet5-kron-ggn": lambda: fit_ratios(lenet5(), batches(40, 128, 1, 28, 28), 7),
    "lenet5-kron-fisher": lambda: fit_ratios(lenet5(), batches(40, 128, 1, 28, 28), 7, curvature="fisher"),
    "lenet5-diag-ggn": lambda: fit_ratios(lenet5(), batches(20, 128, 1, 28, 28), 5, structure="diag"),
    "lenet5-ekfac-ggn": lambda: fit_ratios(lenet5(), batches(20, 128, 1, 28, 28), 5, structure="ekfac"),
    "mlp-kron-ggn": lambda: fit_ratios(mlp(), batches(16, 128, 784), 5),
    "mlp-kron-fisher": lambda: fit_ratios(mlp(), batches(16, 128, 784), 5, curvature="fisher"),
    "mlp-diag-ggn": lambda: fit_ratios(mlp(), batches(16, 128, 784), 5, structure="diag"),
    "resnet18-kron-ggn": lambda: fit_ratios(ResNet18(), batches(1, 128, 3, 32, 32), 3),
    "mlp-predict-1000": lambda: predict_ratio(mlp(), batches(8, 128, 784), torch.randn(1000, 784), 9),
    "lenet5-predict-1000": lambda: predict_ratio(lenet5(), batches(8, 128, 1, 28, 28), torch.randn(1000, 1, 28, 28), 9),
    "resnet18-predict-128": lambda: predict_ratio(
        ResNet18(), batches(1, 128, 3, 32, 32), torch.randn(128, 3, 32, 32), 1
    ),
    "lenet5-1000-temperatures": evidence_sweep,
}


def main(names: list[str]) -> None:
    if len(names) == 1:
        torch.manual_seed(0)
        print(json.dumps(CASES[names[0]]()))
        return
    results = {}
    for name in names or CASES:
        finished = subprocess.run(
            [sys.executable, "-m", "benchmarks", name], capture_output=True, text=True, check=True, cwd=HERE.parent
        )
        results[name] = json.loads(finished.stdout.splitlines()[-1])
        print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
    record = {"torch": torch.__version__.split("+")[0], "threads": torch.get_num_threads(),
              "machine": platform.machine(), "results": results}  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    (HERE / "RESULTS.md").write_text(table(record))


def table(record: dict[str, Any]) -> str:
    rows = [
        "# Benchmarks", "",
        f"`make bench`, {record['threads']} threads, torch {record['torch']}. Ratio: to a plain forward+backward pass "
        "over the same data (fit), or to one plain forward pass (predict), medians of one run. Data and weights are "
        "random; the decomposition is apart.", "",
        "| case | ratio | seconds | peak MB |", "| --- | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name, result in record["results"].items():
        seconds = result.get("fit_s", result.get("predict_s", result.get("sweep_s", 0.0)))
        ratio = f"{result['ratio']:.2f}" if "ratio" in result else ""
        rows.append(f"| {name} | {ratio} | {seconds:.3f} | {result['peak_mb']:.0f} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
