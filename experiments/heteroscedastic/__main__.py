"""Heteroscedastic regression in natural parameters: test log-likelihood on UCI sets and CRISPR screens.

    make experiment NAME=heteroscedastic

A hidden layer of 50 units and one prior precision per layer, learned by the evidence: in turns with the weights (UCI
sets), or along the way (screens); see `training.py`. Of every split it keeps the mean test log-likelihood on the
targets' own scale:

- "plain": the same network under a fixed precision of 1, no Laplace;
- "network": the one with learned precisions, without its posterior;
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
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from experiments.data import crispr, uci
from experiments.heteroscedastic.training import LIKELIHOOD, along_the_way, in_turns
from lapwing import TuningWarning
from lapwing.plots.canvas import COLORS, house_style

HERE = Path(__file__).parent
LINKS = ("known", "delta", "mc")
EPOCHS = 500  # of a screen


@dataclass(frozen=True)
class Problem:
    """How many splits, the published test log-likelihood, and for UCI sets the precisions to begin with."""

    splits: int
    published: float
    starts: tuple[float, ...] = ()


PROBLEMS = {
    "yacht": Problem(20, -1.12, (1, 10, 100)),
    "boston": Problem(20, -2.50, (1, 10, 100)),
    "energy": Problem(20, -1.20, (1, 10, 100)),
    "concrete": Problem(20, -2.95, (1, 10, 100)),
    "wine": Problem(20, -0.95, (1, 10, 100)),
    "power": Problem(5, -2.75, (1,)),
    "kin8nm": Problem(5, 1.35, (1,)),
    "naval": Problem(5, 6.51, (1,)),
    "flow_cytometry_HEK293": Problem(5, -0.24),
    "survival_screen_A375": Problem(5, -0.42),
    "survival_screen_HEK293": Problem(5, -0.18),
}


@dataclass(frozen=True)
class Run:
    """One split: mean test log-likelihoods on the targets' own scale, in nats, and CPU seconds."""

    problem: str
    split: int
    plain: float
    network: float
    known: float
    delta: float
    mc: float
    train: float
    evidence: float
    seconds: float


def run(task: tuple[str, int]) -> Run:
    problem, split = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", TuningWarning)
    starts, start = PROBLEMS[problem].starts, time.process_time()
    data = uci(problem, split) if starts else crispr(problem, split)
    torch.manual_seed(split)
    if starts:
        trained = in_turns(data.x_train, data.y_train, starts)
    else:
        trained = along_the_way(data.x_train, data.y_train, EPOCHS)
    shift, generator = math.log(data.spread), torch.Generator().manual_seed(split)
    with torch.no_grad():
        scores = {
            name: float(LIKELIHOOD.log_prob(one(data.x_test), data.y_test).mean()) - shift
            for name, one in (("plain", trained.plain), ("network", trained.la.model))
        }
        train = float(LIKELIHOOD.log_prob(trained.la.model(data.x_train), data.y_train).mean()) - shift
    for link in LINKS:
        prediction = trained.la.predict(data.x_test, link=link, generator=generator)
        scores[link] = float(prediction.log_prob(data.y_test).double().mean()) - shift
    seconds = time.process_time() - start
    return Run(problem, split, **scores, train=train, evidence=trained.evidence - shift, seconds=seconds)


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
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    options = parser.parse_args()
    results = HERE / "results.json"
    runs = [Run(**row) for row in json.loads(results.read_text())] if results.exists() else []
    done = {(one.problem, one.split) for one in runs}
    tasks = [
        (problem, split)
        for split in range(options.splits or max(one.splits for one in PROBLEMS.values()))
        for problem in options.sets  # the first split of every set, then the second: an early end has some of each
        if split < PROBLEMS[problem].splits
    ]
    with ProcessPoolExecutor(options.workers) as pool:
        waiting = [pool.submit(run, task) for task in tasks if task not in done]
        try:
            for finished in as_completed(waiting):  # written one by one, so that nothing is lost
                one = finished.result()
                print(one, flush=True)
                runs = sorted([*runs, one], key=lambda one: (list(PROBLEMS).index(one.problem), one.split))
                results.write_text(json.dumps([asdict(one) for one in runs], indent=1) + "\n")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if runs:
        draw(runs)
    print(table(runs))


if __name__ == "__main__":
    main()
