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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
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
IMAGES, BATCH, EVERY = 4000, 64, 5
GRID = (5e-4, 2e-3, 8e-3, 3.2e-2)
METHODS = PLAIN, USUAL, SCALAR, LAYER, VALIDATED = (
    "plain, weight decay 0", "plain, weight decay 5e-4", "evidence, one precision", "evidence, one per layer",
    "cross-validation",
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
    epochs: int = 20


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def data_loader(x: Tensor, y: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), BATCH, shuffle=True)


def plain(x: Tensor, y: Tensor, seed: int, epochs: int, weight_decay: float) -> nn.Sequential:
    torch.manual_seed(seed)
    model = cnn()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=weight_decay)
    schedule = CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for inputs, targets in data_loader(x, y):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        schedule.step()
    return model


def with_evidence(x: Tensor, y: Tensor, seed: int, epochs: int, groups: str) -> tuple[nn.Module, Laplace, Epoch]:
    torch.manual_seed(seed)
    model = cnn()
    trained = train_with_evidence(
        model, data_loader(x, y), "classification", epochs, groups=groups, every=EVERY, progress=False,
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, epochs),
    )  # fmt: skip
    assert trained.la is not None
    return model, trained.la, trained.history[-1]


def scores(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean negative log-likelihood and accuracy."""
    with torch.no_grad():
        logits = torch.cat([model(part) for part in x.split(500)])
    return functional.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def one_run(task: tuple[str, int, int]) -> Run:
    """A method at a seed, for so many epochs."""
    torch.set_num_threads(1)
    method, seed, epochs = task
    data = fashion_mnist(IMAGES)
    x, y = data.x_train, data.y_train
    la: Laplace | None = None
    start = time.process_time()
    if method in (PLAIN, USUAL):
        decays = {"all": 0.0 if method == PLAIN else 5e-4}
        model: nn.Module = plain(x, y, seed, epochs, decays["all"])
    elif method == VALIDATED:
        decays = {"all": cross_validated(x, y, seed, epochs)}
        model = plain(x, y, seed, epochs, decays["all"])
    else:
        model, la, last = with_evidence(x, y, seed, epochs, "scalar" if method == SCALAR else "layer")
        decays = {label: float(value) / IMAGES for label, value in (last.precisions or {}).items()}
    seconds = time.process_time() - start
    nll, accuracy = scores(model, data.x_test, data.y_test)
    train_nll, _ = scores(model, x, y)
    run = Run(method, seed, seconds, nll, accuracy, train_nll, weight_decay=decays, epochs=epochs)
    if la is not None:
        run = replace(run, bayesian_nll=bayesian_nll(la, data), log_evidence=float(la.log_evidence()))
    print(run, flush=True)
    return run


def cross_validated(x: Tensor, y: Tensor, seed: int, epochs: int) -> float:
    """The weight decay whose network, trained on 80 % of the images, has the best NLL on the others."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    fit, held_out = order[: len(x) * 4 // 5], order[len(x) * 4 // 5 :]
    losses = {decay: scores(plain(x[fit], y[fit], seed, epochs, decay), x[held_out], y[held_out])[0] for decay in GRID}
    return min(losses, key=losses.__getitem__)


def bayesian_nll(la: Laplace, data: Split) -> float:
    parts = zip(data.x_test.split(250), data.y_test.split(250), strict=True)
    return -torch.cat([la.predict(x).log_prob(y) for x, y in parts]).mean().item()


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
    """A panel for each number of epochs: NLL against run time, every seed and the means."""
    matplotlib.rcParams["svg.hashsalt"] = "lapwing"
    lengths = sorted({run.epochs for run in runs})
    with house_style():
        figure = Figure(figsize=(3.8 * len(lengths), 3.6), layout="constrained")
        panels = figure.subplots(1, len(lengths), sharex=True, sharey=True, squeeze=False)[0]
        for ax, epochs in zip(panels, lengths, strict=True):
            _draw_panel(ax, [run for run in runs if run.epochs == epochs])
            ax.set_title(f"{epochs} epochs")
            ax.set_xlabel("run time, in plain trainings")
        panels[0].set_ylabel("test NLL of the network")
        panels[0].set_xlim(left=0)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None})


def _draw_panel(ax: Axes, runs: list[Run]) -> None:
    base = {run.seed: run.seconds for run in runs if run.method == USUAL}
    for i, method in enumerate(dict.fromkeys(run.method for run in runs)):
        own = [run for run in runs if run.method == method]
        ratios = [run.seconds / base[run.seed] for run in own]
        nll, error = mean_and_error([run.nll for run in own])
        ax.plot(ratios, [run.nll for run in own], ".", color=COLORS[i], alpha=0.35)
        ax.errorbar(statistics.mean(ratios), nll, error, marker="o", color=COLORS[i], capsize=3, label=method)


def key(run: Run) -> tuple[int, int, int]:
    return run.epochs, METHODS.index(run.method), run.seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--epochs", type=int, nargs="*", default=[20, 40], help="none only draws the results that are there"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    options = parser.parse_args()
    results = HERE / "results.json"
    runs = [Run(**row) for row in json.loads(results.read_text())] if results.exists() else []
    tasks = [(method, seed, length) for length in options.epochs for method in METHODS for seed in range(options.seeds)]
    with ProcessPoolExecutor(options.workers) as pool:
        for run in pool.map(one_run, tasks):  # written one by one, so that nothing is lost
            runs = [other for other in runs if key(other) != key(run)] + [run]
            runs.sort(key=key)
            results.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    draw(runs, HERE / "figure.svg")
    for epochs in sorted({run.epochs for run in runs}):
        print(f"\n{epochs} epochs\n\n{table([run for run in runs if run.epochs == epochs])}")


if __name__ == "__main__":
    main()
