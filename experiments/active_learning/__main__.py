"""Which digits to label next: at random, by entropy, by BALD one at a time, or by BatchBALD.

A small network is trained anew on all labels of every round; the posterior of its last layer says what to label next.
The pool is either of different images or of every image three times, with a little noise.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import data
from lapwing import Laplace
from lapwing.decisions import bald, batch_bald
from lapwing.metrics import accuracy
from lapwing.plots import learning_curves
from lapwing.plots.canvas import house_style
from lapwing.progress import bar

HERE = Path(__file__).parent
POOL, TEST, SEEDS = 900, 2000, 5
START, BATCH, ROUNDS, SAMPLES = 20, 10, 10, 300
NAMES = ("random", "entropy", "BALD", "BatchBALD")
PRIOR = 3.0  # precision; of the training and of the posterior
COPIES = {"different images": 1, "every image three times": 3}


@dataclass
class Pool:
    """Candidates, and which are labeled; `image` says which image each is a copy of."""

    x: Tensor
    y: Tensor
    image: Tensor
    labeled: list[int] = field(default_factory=list)

    @property
    def unlabeled(self) -> Tensor:
        free = torch.ones(len(self.x), dtype=torch.bool)
        free[self.labeled] = False
        return free.nonzero().flatten()

    def repeats(self) -> int:
        """Labels spent on images that had been labeled before."""
        return len(self.labeled) - len(set(self.image[self.labeled].tolist()))


def pool(split: data.Split, copies: int, seed: int) -> Pool:
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randperm(len(split.x_train), generator=generator)[: POOL // copies].repeat(copies)
    x = split.x_train[picked]
    if copies > 1:
        x = x + 0.1 * torch.randn(x.shape, generator=generator)
    start = torch.randperm(POOL // copies, generator=generator)[:START]
    return Pool(x, split.y_train[picked], picked, start.tolist())


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        squares = sum(parameter.square().sum() for parameter in model.parameters())
        (functional.cross_entropy(model(x), y, reduction="sum") + 0.5 * PRIOR * squares).backward()
        optimizer.step()
    return model


def posterior(model: nn.Module, x: Tensor, y: Tensor) -> Laplace:
    return Laplace(model, "classification", "full", weights="last_layer", prior=PRIOR, progress=False).fit([(x, y)])


def chosen(name: str, joint: Any, generator: torch.Generator) -> Tensor:
    """The candidates to label next: `[BATCH]`."""
    if name == "BatchBALD":
        return batch_bald(joint, BATCH, max_outcomes=300, generator=generator, progress=False).indices
    scores: Tensor = bald(joint.marginals) if name == "BALD" else joint.marginals.entropy
    return scores.topk(BATCH).indices


def run(name: str, candidates: Pool, split: data.Split, seed: int) -> tuple[list[float], int]:
    """Test accuracy after every round, and the labels that were spent on repeats."""
    generator, found = torch.Generator().manual_seed(seed), []
    for number in range(ROUNDS + 1):
        x, y = candidates.x[candidates.labeled], candidates.y[candidates.labeled]
        model = trained(x, y, seed)
        with torch.no_grad():
            found.append(float(accuracy(model(split.x_test).softmax(1), split.y_test)))
        if number == ROUNDS:
            break
        free = candidates.unlabeled
        if name == "random":
            picked = torch.randperm(len(free), generator=generator)[:BATCH]
        else:
            la = posterior(model, x, y)
            joint = la.predict(candidates.x[free], "sampled", joint=True, samples=SAMPLES, generator=generator)
            picked = chosen(name, joint, generator)
        candidates.labeled += free[picked].tolist()
    return found, candidates.repeats()


def draw(results: dict[str, dict[str, list[list[float]]]]) -> None:
    counts = [START + BATCH * i for i in range(ROUNDS + 1)]
    with house_style():
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams["svg.hashsalt"] = "lapwing"
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        for ax, (title, curves) in zip(figure.subplots(1, 2, sharey=True), results.items(), strict=True):
            learning_curves(counts, {name: torch.tensor(runs) for name, runs in curves.items()}, "test accuracy", ax)
            ax.set_title(f"A pool of {title}" if title.startswith("d") else f"A pool with {title}")
        figure.savefig(HERE / "figure.svg", metadata={"Date": None})
    shutil.copy(HERE / "figure.svg", HERE.parent.parent / "docs" / "images" / "active_learning.svg")


def main() -> None:
    torch.set_num_threads(1)
    full = data.mnist(10_000, TEST)
    small = [functional.avg_pool2d(x, 2) for x in (full.x_train, full.x_test)]
    split = data.Split(small[0], full.y_train, small[1], full.y_test)
    results: dict[str, dict[str, list[list[float]]]] = {}
    repeats: dict[str, dict[str, list[int]]] = {}
    begin = time.perf_counter()
    for title, copies in COPIES.items():
        results[title], repeats[title] = {name: [] for name in NAMES}, {name: [] for name in NAMES}
        for seed in bar(range(SEEDS), title):
            for name in NAMES:
                found, spent = run(name, pool(split, copies, seed), split, seed)
                results[title][name].append(found)
                repeats[title][name].append(spent)
    print(f"{time.perf_counter() - begin:.0f} s")
    draw(results)
    record = {
        "labels": [START + BATCH * i for i in range(ROUNDS + 1)], "accuracy": results, "repeats": repeats,
    }  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(record) + "\n")
    for title, curves in results.items():
        print(title)
        for name, runs in curves.items():
            values = torch.tensor(runs, dtype=torch.float64)
            mean, error = values.mean(0), values.std(0) / SEEDS**0.5
            shown = " | ".join(f"{float(mean[i]):.3f} ± {float(error[i]):.3f}" for i in (2, 4, 7, 10))
            area = f"{float(values.mean()):.3f} ± {float(values.mean(1).std() / SEEDS**0.5):.3f}"
            print(f"| {name} | {shown} | {area} | {sum(repeats[title][name]) / SEEDS:.1f} |")


if __name__ == "__main__":
    main()
