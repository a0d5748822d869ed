"""A training loop with the evidence in it, which can be interrupted and resumed to the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lapwing import io, randomness
from lapwing.batches import outputs_of, unpack
from lapwing.errors import InputError, choose
from lapwing.laplace import Laplace
from lapwing.likelihoods import Likelihood
from lapwing.priors import GaussianPrior, Prior
from lapwing.progress import bar
from lapwing.training import checkpoint as file
from lapwing.training.evidence_in_the_loop import Best, EvidenceInTheLoop, put_back, snapshot
from lapwing.training.loop import step, training
from lapwing.tuning import Groups, Tuning
from lapwing.weights import trainable

_OPTIONS = ("kron", "kfra_residual", "fisher_samples", "rank_tolerance", "rank", "max_dense", "max_factor")


@dataclass(frozen=True)
class Epoch:
    """What one epoch did. `loss` is the mean of `−(1/N)·[T·log p(D|θ) + log p(θ)]` over its batches, up to a constant.

    Where a fit followed, `log_evidence` is that after the hyperparameter steps, and `precisions` (by group) and `noise`
    are what they chose; else they are None.
    """

    epoch: int
    loss: float
    learning_rate: float
    log_evidence: float | None = None
    precisions: dict[str, float | Tensor] | None = None
    noise: float | None = None


@dataclass(frozen=True)
class Training:
    """The trained model, at the weights with the best evidence, and the posterior there.

    `la` and `best_epoch` are None where training was interrupted before the first evidence; the model then has the
    weights that were reached.
    """

    model: nn.Module
    la: Laplace | None
    best_epoch: int | None
    history: tuple[Epoch, ...]
    interrupted: bool


def train_with_evidence(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood,
    epochs: int,
    structure: str = "kron",
    groups: Groups = "scalar",
    *,
    burn_in: int = 0,
    every: int = 5,
    steps: int = 20,
    curvature: str = "rademacher",
    prior: float | Tensor | Mapping[str, float | Tensor] | Prior = 1.0,
    temperature: float = 1.0,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    schedule: str = "epoch",
    callback: Callable[[Epoch], None] | None = None,
    checkpoint: str | Path | None = None,
    generator: torch.Generator | None = None,
    progress: bool = True,
    **options: Any,
) -> Training:
    """Train `model` in place; prior precisions and noise are learned along the way by the evidence.

    The loss is `−(1/N)·[T·log p(D|θ) + log p(θ)]`, of which each batch gives an estimate. After burn-in, every F epochs
    and after the last one, a Laplace approximation is fitted and precisions and noise climb its evidence for K steps.
    The model ends with the weights (and buffers) of the best evidence.

    Ctrl-C ends the training and returns what was reached. With `checkpoint` the run is written to a file after every
    epoch; the same call resumes it, and the result is the same bit for bit as without the interruption: an epoch that
    was begun is trained again from its start. The file keeps torch's random states, those of the `DataLoader` and its
    samplers, and `generator`; data that draw from elsewhere (NumPy, `random`) must seed themselves.

    Args:
        model: in eval mode it is put into train mode as a whole; if it is in train mode, parts of it that are in eval
            mode stay so. Modes are put back at the end.
        loader: the training data, as for `Laplace.fit`.
        likelihood: as for `Laplace`.
        epochs: passes over the data.
        structure: as for `Laplace`.
        groups: as for `tune_prior`.
        burn_in: epochs before the first `every` begins.
        every: F, epochs from one fit to the next.
        steps: K, most hyperparameter steps after a fit.
        curvature: as for `Laplace`. "rademacher" needs one backward pass, whatever the number of classes.
        prior: the precisions to begin with.
        temperature: T, which multiplies the likelihood, in the loss as in the evidence.
        optimizer: `fn(parameters) -> Optimizer`, by default `torch.optim.Adam`. It must not decay weights.
        scheduler: `fn(optimizer) -> scheduler` of the learning rate.
        schedule: step the scheduler after every "epoch" or every "batch".
        callback: called with each `Epoch`, for logging.
        checkpoint: file to write to, and to resume from where it exists.
        generator: for random curvatures.
        progress: show a bar.
        options: others of `Laplace`, such as `tempered`, `unpack` or `output`.
    """
    if epochs <= burn_in:
        raise InputError(
            f"epochs={epochs} end within burn_in={burn_in}, so no evidence would be computed. Train longer, or burn in "
            "less."
        )
    choose(schedule, ("epoch", "batch"), "schedule")
    evidence = EvidenceInTheLoop(
        model, likelihood, loader, structure, groups, burn_in=burn_in, every=every, steps=steps, curvature=curvature,
        prior=prior, temperature=temperature, generator=generator, progress=progress, **options,
    )  # fmt: skip
    chosen = (optimizer or torch.optim.Adam)(list(trainable(evidence.la.model).values()))
    if any(group.get("weight_decay", 0) != 0 for group in chosen.param_groups):
        raise InputError("The optimizer decays weights, but that is the prior's part: set its weight_decay=0.")
    run = _Run(model, evidence, chosen, None if scheduler is None else scheduler(chosen), schedule, epochs)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        run.resume(path)
    elif path is not None:
        run.write(path)
    interrupted = False
    try:
        with training(model):
            for _ in bar(range(len(run.history), epochs), "train", progress):
                run.epoch()
                if path is not None:
                    run.write(path)
                if callback is not None:
                    callback(run.history[-1])
    except KeyboardInterrupt:
        interrupted = True
    best = evidence.best
    la = None if best is None else evidence.restore_best()
    return Training(model, la, None if best is None else best.epoch, tuple(run.history), interrupted)


class _Run:
    """A run between two epochs: everything that the next one depends on."""

    def __init__(
        self,
        model: nn.Module,
        evidence: EvidenceInTheLoop,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        schedule: str,
        epochs: int,
    ) -> None:
        self.evidence, self.optimizer, self.scheduler = evidence, optimizer, scheduler
        self.schedule, self.epochs = schedule, epochs
        self.model = model
        self.generators = randomness.sources(evidence.loader, evidence.generator)
        self.history: list[Epoch] = []
        self.best: dict[str, Any] | None = None  # the best evidence as the file keeps it
        self.config = self._config()

    def epoch(self) -> None:
        """Train one epoch, and measure the evidence where it is due."""
        number = len(self.history)
        rate = float(self.optimizer.param_groups[0]["lr"])
        loss = self._train(number)
        if self.schedule == "epoch":
            step(self.scheduler, loss)
        if not self.evidence.due(number) and number + 1 < self.epochs:
            self.history.append(Epoch(number, loss, rate))
            return
        tuning = self.evidence.measure(number).tuning_
        assert tuning is not None
        self.history.append(Epoch(number, loss, rate, tuning.value, tuning.precisions, tuning.noise))

    def _train(self, number: int) -> float:
        """One pass over the data; returns the mean loss of its batches."""
        la, device = self.evidence.la, self.evidence.la.device
        losses = []
        for i, batch in enumerate(self.evidence.loader):
            where = f"Epoch {number}, batch {i}"
            inputs, targets = unpack(batch, where, la.unpack)
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = outputs_of(self.model, inputs, la.output)
            loss = self.evidence.loss(outputs, targets, where) + self.evidence.regularizer()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
            if self.schedule == "batch":
                step(self.scheduler, losses[-1].item())
        return torch.stack(losses).mean().item()

    # ------------------------------------------------------------------------------------------ file

    def _config(self) -> dict[str, Any]:
        """How the run began: what must be the same for it to be resumed."""
        evidence, la = self.evidence, self.evidence.la
        return {
            "epochs": self.epochs, "burn_in": evidence.burn_in, "every": evidence.every, "steps": evidence.steps,
            "groups": evidence.groups, "structure": la.structure, "curvature": la.curvature_kind, "weights": la.weights,
            "temperature": la.temperature, "tempered": la.tempered, "likelihood": la.likelihood.config(),
            "examples": evidence.examples, "schedule": self.schedule, "optimizer": type(self.optimizer).__name__,
            "optimizer's option": self.optimizer.defaults, "scheduler": type(self.scheduler).__name__,
            "scheduler's option": None if self.scheduler is None else self.scheduler.state_dict(),
            "random states": list(self.generators),
            "prior": {"precision": evidence.prior.precision, "mean": evidence.prior.mean},
            "option": {name: getattr(la, name) for name in _OPTIONS},
            "shape": {name: list(value.shape) for name, value in snapshot(self.evidence.la.model).items()},
        }  # fmt: skip

    def write(self, path: Path) -> None:
        state = {
            "history": [vars(record) for record in self.history],
            "values": snapshot(self.evidence.la.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "random": randomness.states(self.generators),
            "prior": [self.evidence.prior.precision, self.evidence.prior.mean],
            "noise": self.evidence.la._noise,
            "best": self._packed_best(),
        }
        file.write(path, self.config, state)

    def _packed_best(self) -> dict[str, Any] | None:
        """The best evidence for the file. A new one is of this moment: the model has the weights it belongs to."""
        best = self.evidence.best
        if best is not None and (self.best is None or self.best["epoch"] != best.epoch):
            self.best = vars(best) | {"la": io.pack(best.la), "tuning": vars(best.la.tuning_)}
        return self.best

    def resume(self, path: Path) -> None:
        """Put everything back as it was when the file was written."""
        state = file.read(path, self.config)
        evidence, model = self.evidence, self.evidence.la.model
        self.best = state["best"]
        if self.best is not None:
            put_back(model, self.best["values"])  # a posterior is read back onto the weights it belongs to
            header, tensors = self.best["la"]
            now = evidence.la
            la = io.unpack_onto(path, header, tensors, model, now.likelihood, now.unpack, now.output)
            la.tuning_, la.progress = Tuning(**self.best["tuning"]), now.progress
            evidence.best = Best(self.best["epoch"], self.best["log_evidence"], la, snapshot(model))
        put_back(model, state["values"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        evidence.adopt(GaussianPrior(*state["prior"]), state["noise"])
        self.history = [Epoch(**record) for record in state["history"]]
        randomness.restore(self.generators, state["random"])
