"""A U-Net on images: a class for every pixel. Time against a plain pass over the same images, and memory.

python -m benchmarks.dense            # all cases, each in a process of its own; writes DENSE.md and dense.json
python -m benchmarks.dense NAME       # one of them; prints its result
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.measure import Result, forget_peak, peak_mb, plain_pass, seconds
from benchmarks.unet import UNet, discs
from lapwing import Categorical, Laplace

HERE = Path(__file__).parent
NOTES = """Written by `python -m benchmarks.dense`: a U-Net of 1.1 million weights (BatchNorm, transposed convolutions,
skip connections), 2 classes, images of 128 × 128 unless said otherwise, random weights, one thread. A fit sees 64
images in batches of 8 and is compared with one forward and backward pass in training mode over the same; a prediction
with such a pass over its images. Every case has a process of its own; peaks are of its resident memory, 0.3 GB of
which are PyTorch and the library. Times were measured on a machine under load and are rough; memory is not."""


@dataclass(frozen=True)
class Case:
    """A fit to `images` in batches of 8, or where `method` is given a prediction of `images` with `samples` weights."""

    structure: str = "kron"
    curvature: str = "rademacher"
    images: int = 64
    size: int = 128
    method: str | None = None
    samples: int = 0


FITS = {
    f"fit-{structure}-{curvature}": Case(structure, curvature)
    for structure, curvature in (
        ("kron", "rademacher"),
        ("kron", "fisher"),
        ("kron", "empirical"),
        ("diag", "rademacher"),
        ("ekfac", "rademacher"),
    )
}
PREDICTIONS = {f"predict-{method}": Case(images=8, method=method, samples=20) for method in ("pushed", "sampled")}
GROWTH = {
    **{f"samples-{count}": Case(images=4, method="pushed", samples=count) for count in (5, 20, 80)},
    **{f"images-{count}": Case(images=count, method="pushed", samples=2) for count in (8, 32, 64)},
    **{f"side-{size}": Case(images=4, size=size, method="pushed", samples=2) for size in (64, 128, 256)},
}
CASES = FITS | PREDICTIONS | GROWTH


def run(case: Case) -> Result:
    """Both in one process: a plain forward and backward pass in training mode, and the operation."""
    torch.manual_seed(0)
    model = UNet().eval()
    x, y = discs(case.images, case.size)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    generator = torch.Generator().manual_seed(0)
    base = peak_mb()
    plain_pass(model, [(x[:2], y[:2])])
    plain = seconds(lambda: plain_pass(model, batches))
    plain_peak = peak_mb()
    la = Laplace(model, Categorical(dim=1), case.structure, case.curvature, progress=False)
    forget_peak()
    if case.method is None:
        taken = seconds(lambda: la.fit(batches, generator=generator))
    else:
        la.fit([(x[:2], y[:2])], generator=generator)
        la.sample(1)  # decomposes
        forget_peak()
        method = case.method
        taken = seconds(lambda: la.predict(x, method=method, samples=case.samples, generator=generator).epistemic)
    outputs = case.samples * y.numel() * 2 * 4 / 2**20
    return asdict(case) | {
        "base_mb": base, "plain_s": plain, "plain_mb": plain_peak, "seconds": taken, "ratio": taken / plain,
        "peak_mb": peak_mb(), "samples_mb": outputs, "weights": sum(value.numel() for value in model.parameters()),
    }  # fmt: skip


def report(results: dict[str, Result]) -> str:
    """Three tables: fits, predictions, and how the memory of pushed predictions grows."""
    lines = ["# A U-Net on images", "", NOTES, "", "## Fits", ""]
    lines += [
        "| structure | curvature | ÷ plain pass | peak (GB) | plain training pass (GB) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in FITS:
        if found := results.get(name):
            peaks = f"{found['peak_mb'] / 1024:.2f} | {found['plain_mb'] / 1024:.2f}"
            lines.append(f"| {found['structure']} | {found['curvature']} | {found['ratio']:.1f} | {peaks} |")
    lines += ["", "## Predictions and their growth", ""]
    lines += ["| method | samples | images | side | plain passes per sample | peak (GB) | samples alone (GB) |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for name in PREDICTIONS | GROWTH:
        if found := results.get(name):
            where = f"{found['method']} | {found['samples']} | {found['images']} | {found['size']}"
            each = found["ratio"] / found["samples"]
            memory = f"{found['peak_mb'] / 1024:.2f} | {found['samples_mb'] / 1024:.3f}"
            lines.append(f"| {where} | {each:.2f} | {memory} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.dense")
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--here", action="store_true", help="run the one case in this process and print its result")
    given = parser.parse_args()
    if given.here:
        print(json.dumps(run(CASES[given.cases[0]])))
        return
    path = HERE / "dense.json"
    results: dict[str, Result] = json.loads(path.read_text()) if path.is_file() else {}
    for name in given.cases or CASES:
        command = [sys.executable, "-m", "benchmarks.dense", "--here", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, f"ratio {results[name]['ratio']:.1f}, peak {results[name]['peak_mb']:.0f} MB", flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "DENSE.md").write_text(report(results))


if __name__ == "__main__":
    main()
