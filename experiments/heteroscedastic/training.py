"""Two ways to learn weights and prior precisions together: in turns, or along the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from lapwing import Heteroscedastic, Laplace, train_with_evidence
from lapwing.priors import GaussianPrior

WIDTH, FITS = 50, 60  # hidden units; fits of the evidence when it is learned along the way
STEPS, MORE, ROUNDS = 1000, 300, 3  # of L-BFGS at first and in every later round; rounds at most
LIKELIHOOD = Heteroscedastic()
_TOO_FAR = 1e10


@dataclass(frozen=True)
class Trained:
    """The plain network, and the posterior of the one with learned precisions; its log-evidence is per example."""

    plain: nn.Module
    la: Laplace
    evidence: float


def network(x: Tensor) -> nn.Sequential:
    return nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.GELU(), nn.Linear(WIDTH, 2)).to(x.dtype)


def in_turns(x: Tensor, y: Tensor, starts: Sequence[float]) -> Trained:
    """Train to a mode by L-BFGS, tune one precision per layer by the evidence (full GGN), train on, and so forth.

    The precision to begin with and the number of rounds are those that predict a tenth of the training data best, held
    out for that; then the network is trained anew on all of them. The plain network is that of precision 1, untuned.
    """
    order = torch.randperm(len(x))
    held, kept = order[: len(x) // 10], order[len(x) // 10 :]
    scores = {
        (start, number): float(la.predict(x[held]).log_prob(y[held]).mean())
        for start in starts
        for number, la in enumerate(_rounds(x[kept], y[kept], start, ROUNDS))
    }
    start, number = max(scores, key=lambda choice: scores[choice])
    plain = _to_a_mode(network(x), x, y, GaussianPrior(1.0), STEPS)
    *_, la = _rounds(x, y, start, number + 1)
    return Trained(plain, la, float(la.log_evidence()) / len(x))


def _rounds(x: Tensor, y: Tensor, start: float, count: int) -> Iterator[Laplace]:
    """The posterior at the mode of every round."""
    model: nn.Module = network(x)
    prior = GaussianPrior(start)
    for number in range(count):
        model = _to_a_mode(copy.deepcopy(model), x, y, prior, MORE if number else STEPS)
        la = Laplace(model, LIKELIHOOD, "full", prior=prior, progress=False).fit([(x, y)])
        yield la
        prior = la.at().tune_prior(groups="layer").prior  # type: ignore[assignment]


def _to_a_mode(model: nn.Module, x: Tensor, y: Tensor, prior: GaussianPrior, steps: int) -> nn.Module:
    precisions = prior.precisions({name: parameter.shape for name, parameter in model.named_parameters()})
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, max_eval=2 * steps, history_size=WIDTH, line_search_fn="strong_wolfe",
        tolerance_grad=1e-7, tolerance_change=1e-12,
    )  # fmt: skip

    def loss() -> float:
        optimizer.zero_grad()
        size = sum((precisions[name] * one.square()).sum() for name, one in model.named_parameters())
        value: Tensor = (0.5 * size - LIKELIHOOD.log_prob(model(x), y).sum()) / len(x)
        if not bool(value.isfinite()):  # a step too far, to be halved by the line search
            for one in model.parameters():
                one.grad = torch.zeros_like(one)
            return _TOO_FAR
        value.backward()
        return value.item()

    optimizer.step(loss)
    return model


def along_the_way(x: Tensor, y: Tensor, epochs: int, rate: float = 0.01) -> Trained:
    """`train_with_evidence` by Adam with kron; the plain network is trained as long under precision 1."""
    state, every = torch.get_rng_state(), max(epochs // FITS, 1)
    plain = network(x)
    optimizer = torch.optim.Adam(plain.parameters(), rate, weight_decay=1 / len(x))
    scheduler = CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        optimizer.zero_grad()
        (-LIKELIHOOD.log_prob(plain(x), y).mean()).backward()
        optimizer.step()
        scheduler.step()
    torch.set_rng_state(state)
    trained = train_with_evidence(
        network(x), [(x, y)], LIKELIHOOD, epochs, "kron", "layer", burn_in=2 * every, every=every, curvature="ggn",
        optimizer=lambda parameters: torch.optim.Adam(parameters, rate),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, epochs), progress=False,
    )  # fmt: skip
    assert trained.la is not None
    return Trained(plain, trained.la, float(trained.la.log_evidence()) / len(x))
