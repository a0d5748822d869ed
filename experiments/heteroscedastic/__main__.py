"""Heteroscedastic regression in natural parameters: test log-likelihood on UCI sets and CRISPR screens.

    make experiment NAME=heteroscedastic

A hidden layer of 50 units, Adam with a learning rate that falls from 0.01 (0.03 for the large sets, in batches). Priors
(one precision per layer) are learned by the evidence along the way. Of every split it keeps the mean test
log-likelihood on the targets' own scale:

- "plain": the same network trained for as long under the prior that the others begin with, no Laplace;
- "network": the one that was trained with the evidence, without its posterior;
- "known", "delta", "mc": the posterior predictives.

Writes `results.json` after every split (what is there already is not run again) and `figure.svg`, prints the table.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from experiments.data import Split, crispr, uci
from lapwing import Heteroscedastic, TuningWarning, train_with_evidence
from lapwing.plots.canvas import COLORS, house_style

HERE = Path(__file__).parent
WIDTH, FITS = 50, 60  # hidden units; fits of the evidence in a training
LINKS = ("known", "delta", "mc")


@dataclass(frozen=True)
class Problem:
    """How many splits, the published test log-likelihood, and how long to train in which batches at which rate."""

    splits: int
    epochs: int
    published: float
    batch: int = 20_000
    rate: float = 0.01


PROBLEMS = {
    "yacht": Problem(20, 3000, -1.12),
    "boston": Problem(20, 3000, -2.50),
    "energy": Problem(20, 3000, -1.20),
    "concrete": Problem(20, 3000, -2.95),
    "wine": Problem(20, 3000, -0.95),
    "power": Problem(5, 150, -2.75, 256, 0.03),
    "kin8nm": Problem(5, 150, 1.35, 256, 0.03),
    "naval": Problem(5, 150, 6.51, 256, 0.03),
    "flow_cytometry_HEK293": Problem(5, 500, -0.24),
    "survival_screen_A375": Problem(5, 500, -0.42),
    "survival_screen_HEK293": Problem(5, 500, -0.18),
}


@dataclass(frozen=True)
class Run:
    """One split: mean test log-likelihoods on the targets' own scale, in nats, and CPU seconds."""

    problem: str
    split: int
    epochs: int
    plain: float
    network: float
    known: float
    delta: float
    mc: float
    train: float
    evidence: float
    best_epoch: int
    seconds: float


class Batches:
    """Examples in an order of their own at every pass."""

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self.x, self.y, self.size = x, y, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.size >= len(self.x):
            yield self.x, self.y
            return
        for part in torch.randperm(len(self.x)).split(self.size):
            yield self.x[part], self.y[part]


def read(problem: str, split: int) -> Split:
    return uci(problem, split, torch.float32) if "_" not in problem else crispr(problem, split)


def network(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))


def trained_plainly(batches: Batches, likelihood: Heteroscedastic, epochs: int, rate: float) -> nn.Module:
    """Weight decay is that of precision 1."""
    model = network(batches.x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), rate, weight_decay=1 / len(batches.x))
    scheduler = CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            (-likelihood.log_prob(model(x), y).mean()).backward()
            optimizer.step()
        scheduler.step()
    return model


def run(task: tuple[str, int, int]) -> Run:
    problem, split, epochs = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", TuningWarning)
    data, likelihood = read(problem, split), Heteroscedastic()
    shift, every, rate = math.log(data.spread), max(epochs // FITS, 1), PROBLEMS[problem].rate
    batches = Batches(data.x_train, data.y_train, PROBLEMS[problem].batch)
    torch.manual_seed(split)
    plain = trained_plainly(batches, likelihood, epochs, rate)
    torch.manual_seed(split)
    model, start = network(data.x_train.shape[1]), time.process_time()
    trained = train_with_evidence(
        model, batches, likelihood, epochs, "kron", "layer", burn_in=2 * every, every=every, curvature="ggn",
        optimizer=lambda parameters: torch.optim.Adam(parameters, rate),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, epochs), progress=False,
    )  # fmt: skip
    seconds = time.process_time() - start
    assert trained.la is not None
    assert trained.best_epoch is not None
    generator = torch.Generator().manual_seed(split)
    with torch.no_grad():
        scores = {
            name: float(likelihood.log_prob(one(data.x_test), data.y_test).mean()) - shift
            for name, one in (("plain", plain), ("network", model))
        }
        train = float(likelihood.log_prob(model(data.x_train), data.y_train).mean()) - shift
    for link in LINKS:
        prediction = trained.la.predict(data.x_test, link=link, generator=generator)
        scores[link] = float(prediction.log_prob(data.y_test).double().mean()) - shift
    evidence = float(trained.la.log_evidence()) / len(data.x_train) - shift
    return Run(
        problem, split, epochs, **scores, train=train, evidence=evidence, best_epoch=trained.best_epoch, seconds=seconds
    )


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def table(runs: list[Run]) -> str:
    kinds = ("plain", "network", *LINKS)
    lines = [f"| set | splits | {' | '.join(kinds)} | published |", f"| --- | --- |{' --- |' * (len(kinds) + 1)}"]
    for problem, settings in PROBLEMS.items():
        own = [one for one in runs if one.problem == problem]
        if own:
            found = [mean_and_error([getattr(one, kind) for one in own]) for kind in kinds]
            cells = [f"{mean:.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}") for mean, error in found]
            lines.append(f"| {problem} | {len(own)} | {' | '.join(cells)} | {settings.published:.2f} |")
    return "\n".join(lines)


def draw(runs: list[Run]) -> None:
    """Every split of every set as what it gains over the published mean."""
    matplotlib.rcParams["svg.hashsalt"] = "lapwing"
    shown = [problem for problem in PROBLEMS if any(one.problem == problem for one in runs)]
    with house_style():
        figure = Figure(figsize=(7.5, 3.6), layout="constrained")
        ax = figure.subplots()
        for column, problem in enumerate(shown):
            for i, kind in enumerate(("plain", "network", "delta")):
                gains = [getattr(one, kind) - PROBLEMS[problem].published for one in runs if one.problem == problem]
                mean, error = mean_and_error(gains)
                place, label = column + 0.22 * (i - 1), kind if column == 0 else None
                ax.plot([place] * len(gains), gains, ".", color=COLORS[i], alpha=0.25, markersize=4)
                ax.errorbar(place, mean, error, marker="o", markersize=4, color=COLORS[i], capsize=3, label=label)
        ax.axhline(0, color="gray", linewidth=1)
        ax.set_yscale("symlog", linthresh=1)
        ax.set_xticks(range(len(shown)), [problem.replace("_", " ") for problem in shown], rotation=30, ha="right")
        ax.set_ylabel("test log likelihood over the published")
        ax.legend(frameon=False)
        figure.savefig(HERE / "figure.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", default=list(PROBLEMS), help="none only draws the results that are there")
    parser.add_argument("--splits", type=int, help="fewer than the standard number")
    parser.add_argument("--epochs", type=int, help="other than the set's own")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    options = parser.parse_args()
    results = HERE / "results.json"
    runs = [Run(**row) for row in json.loads(results.read_text())] if results.exists() else []
    done = {(one.problem, one.split, one.epochs) for one in runs}
    tasks = [
        (problem, split, options.epochs or PROBLEMS[problem].epochs)
        for split in range(options.splits or max(one.splits for one in PROBLEMS.values()))
        for problem in options.sets  # the first split of every set, then the second: an early end has some of each
        if split < PROBLEMS[problem].splits
    ]
    with ProcessPoolExecutor(options.workers) as pool:
        waiting = [pool.submit(run, task) for task in tasks if task not in done]
        for finished in as_completed(waiting):  # written one by one, so that nothing is lost
            one = finished.result()
            print(one, flush=True)
            runs = [other for other in runs if (other.problem, other.split) != (one.problem, one.split)] + [one]
            runs.sort(key=lambda one: (list(PROBLEMS).index(one.problem), one.split))
            results.write_text(json.dumps([asdict(one) for one in runs], indent=1) + "\n")
    if runs:
        draw(runs)
    print(table(runs))


if __name__ == "__main__":
    main()
