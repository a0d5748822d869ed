"""Regularization learned in one training run, against a default and against cross-validation.

A small CNN on 4,000 images of Fashion-MNIST, five seeds, the same weights at the start, order of the data, optimizer
(Adam) and schedule (cosine) for every method:

- plain training, with Adam's default weight decay 0 and with the usual 5e-4;
- cross-validation: weight decays trained on 80 % of the images, the one with the best validation NLL trained on all;
- training with the evidence (kron, a fit every 5 epochs): one precision, or one for each layer.

Seconds are CPU time of one thread, so that the ratio does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from experiments.data import Split, fashion_mnist
from lapwing import Laplace, train_with_evidence
from lapwing.plots.canvas import COLORS, house_style
from lapwing.training import Epoch

HERE = Path(__file__).parent
IMAGES, EPOCHS, BATCH, EVERY = 4000, 20, 64, 5
GRID = (5e-4, 2e-3, 8e-3, 3.2e-2)
PLAIN, USUAL, VALIDATED, SCALAR, LAYER = (
    "plain, weight decay 0", "plain, weight decay 5e-4", "cross-validation", "evidence, one precision",
    "evidence, one per layer",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One method at one seed: scores of the network on the test images, and the NLL of its posterior."""

    method: str
    seed: int
    seconds: float
    nll: float
    accuracy: float
    train_nll: float
    bayesian_nll: float | None = None
    weight_decay: dict[str, float] = field(default_factory=dict)  # λ/N by group, or what was chosen
    log_evidence: float | None = None


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def data_loader(x: Tensor, y: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), BATCH, shuffle=True)


def plain(x: Tensor, y: Tensor, seed: int, weight_decay: float) -> nn.Sequential:
    torch.manual_seed(seed)
    model = cnn()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=weight_decay)
    schedule = CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for inputs, targets in data_loader(x, y):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        schedule.step()
    return model


def with_evidence(x: Tensor, y: Tensor, seed: int, groups: str) -> tuple[nn.Sequential, Laplace, tuple[Epoch, ...]]:
    torch.manual_seed(seed)
    model = cnn()
    trained = train_with_evidence(
        model, data_loader(x, y), "classification", EPOCHS, groups=groups, every=EVERY, progress=False,
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, EPOCHS),
    )  # fmt: skip
    assert trained.la is not None
    return model, trained.la, trained.history


def scores(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean negative log-likelihood and accuracy."""
    with torch.no_grad():
        logits = torch.cat([model(part) for part in x.split(500)])
    return functional.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def seed_runs(seed: int, images: int) -> list[Run]:
    """Every method at one seed."""
    torch.set_num_threads(1)
    data = fashion_mnist(images)
    x, y = data.x_train, data.y_train
    runs = []
    for method, weight_decay in ((PLAIN, 0.0), (USUAL, 5e-4)):
        start = time.process_time()
        model = plain(x, y, seed, weight_decay)
        runs.append(_run(method, seed, time.process_time() - start, model, data, {"all": weight_decay}))
    start = time.process_time()
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    fit, validation = order[: images * 4 // 5], order[images * 4 // 5 :]
    losses = {decay: scores(plain(x[fit], y[fit], seed, decay), x[validation], y[validation])[0] for decay in GRID}
    chosen = min(losses, key=losses.__getitem__)
    model = plain(x, y, seed, chosen)
    runs.append(_run(VALIDATED, seed, time.process_time() - start, model, data, {"all": chosen}))
    for method, groups in ((SCALAR, "scalar"), (LAYER, "layer")):
        start = time.process_time()
        model, la, history = with_evidence(x, y, seed, groups)
        seconds = time.process_time() - start
        decays = {label: float(value) / images for label, value in (history[-1].precisions or {}).items()}
        predicted = torch.cat([la.predict(part).log_prob(target) for part, target in _parts(data)])
        runs.append(
            _run(method, seed, seconds, model, data, decays, -predicted.mean().item(), float(la.log_evidence()))
        )
    return runs


def _parts(data: Split) -> list[tuple[Tensor, ...]]:
    return list(zip(data.x_test.split(250), data.y_test.split(250), strict=True))


def _run(
    method: str, seed: int, seconds: float, model: nn.Module, data: Split, decay: dict[str, float],
    bayesian: float | None = None, log_evidence: float | None = None,
) -> Run:  # fmt: skip
    nll, accuracy = scores(model, data.x_test, data.y_test)
    train_nll, _ = scores(model, data.x_train, data.y_train)
    run = Run(method, seed, seconds, nll, accuracy, train_nll, bayesian, decay, log_evidence)
    print(f"seed {seed}  {method:26s} NLL {nll:.4f}  accuracy {accuracy:.4f}  {seconds:6.1f} s  {decay}", flush=True)
    return run


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def table(runs: list[Run]) -> str:
    """A row for each method; differences in NLL are paired by seed with the usual weight decay."""
    base = {run.seed: run for run in runs if run.method == USUAL}
    lines = [
        "| method | test NLL | NLL minus that of weight decay 5e-4 | accuracy | training NLL | run time |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method in dict.fromkeys(run.method for run in runs):
        own = [run for run in runs if run.method == method]
        (nll, nll_error), (accuracy, accuracy_error), (train, _), (gain, gain_error), (ratio, _) = (
            mean_and_error(values)
            for values in (
                [run.nll for run in own], [run.accuracy for run in own], [run.train_nll for run in own],
                [run.nll - base[run.seed].nll for run in own], [run.seconds / base[run.seed].seconds for run in own],
            )
        )  # fmt: skip
        lines.append(
            f"| {method} | {nll:.4f} ± {nll_error:.4f} | {gain:+.4f} ± {gain_error:.4f} | {100 * accuracy:.2f} ± "
            f"{100 * accuracy_error:.2f} % | {train:.3f} | {ratio:.2f} × |"
        )
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "lapwing"
    base = {run.seed: run.seconds for run in runs if run.method == USUAL}
    with house_style():
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        ax = figure.add_subplot()
        for i, method in enumerate(dict.fromkeys(run.method for run in runs)):
            own = [run for run in runs if run.method == method]
            ratio, _ = mean_and_error([run.seconds / base[run.seed] for run in own])
            nll, error = mean_and_error([run.nll for run in own])
            ax.plot(
                [run.seconds / base[run.seed] for run in own],
                [run.nll for run in own],
                ".",
                color=COLORS[i],
                alpha=0.35,
            )
            ax.errorbar(ratio, nll, error, marker="o", color=COLORS[i], capsize=3, label=method)
        ax.set_xlabel("run time, in plain trainings")
        ax.set_ylabel("test NLL of the network")
        ax.set_xlim(left=0)
        ax.legend(frameon=False, fontsize=8)
        ax.set_title("Fashion-MNIST, 4,000 images, five seeds")
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--draw", action="store_true", help="draw the results that are there")
    options = parser.parse_args()
    if not options.draw:
        with ProcessPoolExecutor(options.workers) as pool:
            found = pool.map(partial(seed_runs, images=options.images), range(options.seeds))
            rows = [asdict(run) for several in found for run in several]
        (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    runs = [Run(**row) for row in json.loads((HERE / "results.json").read_text())]
    draw(runs, HERE / "figure.svg")
    print(table(runs))


if __name__ == "__main__":
    main()
