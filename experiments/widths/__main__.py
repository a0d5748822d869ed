"""Networks of several widths and depths on a UCI set and on digits: does the evidence order them as the test set does?

    make experiment NAME=widths

Each network is trained briefly with Adam, gets a Kronecker-factored posterior whose prior (one precision per layer) and
noise the evidence tunes, and is trained and tuned once more under these, so that it is about a mode of its own model.
Writes `results.json` and `figure.svg`, prints the table.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm.auto import tqdm

from experiments.data import Split, uci
from lapwing import Categorical, Gaussian, Laplace, compare
from lapwing.likelihoods import Likelihood
from lapwing.plots.canvas import COLORS, house_style

HERE = Path(__file__).parent
WIDTHS, DEPTHS, SEEDS = (2, 4, 8, 16, 32, 64, 128), (1, 2, 3), (0, 1, 2)
ROUNDS = 2  # of training and tuning
TRAINED = 400  # examples of digits to train on; the rest is the test set


@dataclass(frozen=True)
class Problem:
    """A data set, its likelihood, and the network's outputs."""

    title: str
    data: Split
    likelihood: Likelihood
    outputs: int
    epochs: int


@dataclass(frozen=True)
class Run:
    """One network. Likelihoods and evidences are per example, in nats."""

    problem: str
    width: int
    depth: int
    seed: int
    parameters: int
    effective_dimension: float
    train: float
    evidence: float
    newton_evidence: float
    test: float
    network_test: float
    seconds: float


def problems() -> list[Problem]:
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x, order = x.float() / 8 - 1, torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAINED], order[TRAINED:]
    digits = Split(x[train], y[train].long(), x[test], y[test].long())
    return [
        Problem("energy", uci("energy", dtype=torch.float32), Gaussian(noise=0.01), 1, 100),
        Problem("digits", digits, Categorical(), 10, 50),
    ]


def build(problem: Problem, width: int, depth: int) -> nn.Module:
    sizes = [problem.data.x_train.shape[1], *[width] * depth]
    hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, problem.outputs))


def train(problem: Problem, model: nn.Module, precisions: dict[str, Tensor], noise: float) -> None:
    """Adam, with a learning rate that falls to 0, on the log joint under this prior and noise."""
    x, y = problem.data.x_train, problem.data.y_train
    batch, count = 64, len(x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, problem.epochs * -(-count // batch))
    for _ in range(problem.epochs):
        for part in torch.randperm(count).split(batch):
            optimizer.zero_grad()
            fit = problem.likelihood.log_prob(model(x[part]), y[part]).mean() / noise
            terms = [precisions[name].to(p) * p.square().sum() for name, p in model.named_parameters()]
            (torch.stack(terms).sum() / (2 * count) - fit).backward()
            optimizer.step()
            schedule.step()


def run(problem: Problem, width: int, depth: int, seed: int) -> Run:
    start = time.process_time()
    torch.manual_seed(seed)
    model = build(problem, width, depth)
    data, count = problem.data, len(problem.data.x_train)
    precisions = {name: torch.ones(()) for name, _ in model.named_parameters()}
    noise = problem.likelihood.noise or 1.0
    for _ in range(ROUNDS):
        train(problem, model, precisions, noise)
        la = Laplace(model, problem.likelihood, progress=False).fit([(data.x_train, data.y_train)])
        la.tune_prior(groups="layer")
        precisions, noise = la.posterior.precisions, float(la.posterior.noise)
    entry = compare({"network": la})["network"]
    with torch.no_grad():
        plain = problem.likelihood.predict_samples(model(data.x_test)[None], la.posterior.noise)
    return Run(
        problem.title, width, depth, seed, entry.parameters, entry.effective_dimension,
        entry.log_likelihood / count, entry.log_evidence / count,
        float(la.log_evidence(center="newton")) / count,
        _mean(la.predict(data.x_test).log_prob(data.y_test)), _mean(plain.log_prob(data.y_test)),
        time.process_time() - start,
    )  # fmt: skip


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def average(runs: list[Run], problem: str, value: str) -> Tensor:
    """The mean over seeds: `[depths, widths]`."""
    found = torch.zeros(len(DEPTHS), len(WIDTHS), dtype=torch.float64)
    for one in runs:
        if one.problem == problem:
            found[DEPTHS.index(one.depth), WIDTHS.index(one.width)] += getattr(one, value) / len(SEEDS)
    return found


def rank_correlation(left: Tensor, right: Tensor) -> float:
    """Spearman's, of two sets of distinct numbers."""
    ranks = torch.stack([values.flatten().argsort().argsort().double() for values in (left, right)])
    return float(torch.corrcoef(ranks)[0, 1])


def table(runs: list[Run], titles: list[str]) -> list[dict[str, Any]]:
    """What each criterion of the training data is worth: its rank correlation with the test, and what it picks."""
    rows = []
    for title in titles:
        tests = [average(runs, title, value) for value in ("test", "network_test")]
        for criterion in ("evidence", "newton_evidence", "train", "parameters"):
            values = average(runs, title, criterion)
            picked = int(values.argmax())
            depth, width = divmod(picked, len(WIDTHS))
            rows.append({
                "problem": title, "criterion": criterion,
                "correlation": rank_correlation(values, tests[0]),
                "correlation with network": rank_correlation(values, tests[1]),
                "picks": f"{DEPTHS[depth]} × {WIDTHS[width]}",
                "test": float(tests[0].flatten()[picked]), "best test": float(tests[0].max()),
                "network test": float(tests[1].flatten()[picked]), "best network test": float(tests[1].max()),
            })  # fmt: skip
    return rows


def draw(runs: list[Run], titles: list[str]) -> None:
    with house_style():
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams["svg.hashsalt"] = "lapwing"
        figure = Figure(figsize=(7.5, 5.2), layout="constrained")
        axes = figure.subplots(2, len(titles), sharex=True)
        labels = {"evidence": "log evidence per example", "test": "test log likelihood"}
        drawn = {"evidence": ("evidence",), "test": ("test", "network_test")}
        for column, title in enumerate(titles):
            for row, (value, label) in enumerate(labels.items()):
                ax = axes[row, column]
                if value == "test":
                    for color, line in zip(COLORS, average(runs, title, "network_test"), strict=False):
                        ax.plot(WIDTHS, line, color=color, linestyle=":", linewidth=1)
                for depth, line in zip(DEPTHS, average(runs, title, value), strict=True):
                    color = COLORS[DEPTHS.index(depth)]
                    ax.plot(WIDTHS, line, color=color, marker="o", markersize=3, label=f"{depth} hidden")
                    for one in runs:
                        if (one.problem, one.depth) == (title, depth):
                            ax.plot(one.width, getattr(one, value), ".", color=color, alpha=0.3, markersize=3)
                shown = torch.stack([average(runs, title, v) for v in drawn[value]])
                low, high = float(shown[..., 1:].min()), float(shown.max())
                ax.set_ylim(low - 0.25 * (high - low), high + 0.15 * (high - low))
                ax.set_xscale("log", base=2)
                ax.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
                ax.set_title(title if row == 0 else "")
                ax.set_xlabel("width" if row == 1 else "")
                ax.set_ylabel(label if column == 0 else "")
        axes[0, -1].legend(frameon=False, loc="lower right")
        figure.savefig(HERE / "figure.svg", metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    chosen = problems()
    cases = [(p, width, depth, seed) for p in chosen for depth in DEPTHS for width in WIDTHS for seed in SEEDS]
    runs = [run(*case) for case in tqdm(cases, "networks")]
    titles = [problem.title for problem in chosen]
    rows = table(runs, titles)
    (HERE / "results.json").write_text(
        json.dumps({"runs": [asdict(one) for one in runs], "table": rows}, indent=1) + "\n"
    )
    draw(runs, titles)
    print(f"{sum(one.seconds for one in runs):.0f} s of one core")
    for row in rows:
        print("| " + " | ".join(f"{value:.3f}" if isinstance(value, float) else value for value in row.values()) + " |")


if __name__ == "__main__":
    main()
