"""Distillation: one deterministic network that predicts what a posterior predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from lapwing import likelihoods
from lapwing.batches import Inputs, ReadOutput, Unpack, asked, outputs_of
from lapwing.ensemble import Ensemble
from lapwing.errors import InputError
from lapwing.function_space import FunctionSpace
from lapwing.guard import borrowed
from lapwing.laplace import Laplace
from lapwing.likelihoods import Bernoulli, Categorical, Heteroscedastic, Likelihood, Poisson
from lapwing.likelihoods.pairs import PairLikelihood
from lapwing.mixture import Mixture
from lapwing.predictive.counts import CountPrediction
from lapwing.predictive.divergence import divergence, essence
from lapwing.predictive.options import predict_options
from lapwing.predictive.prediction import BinaryPrediction, ClassPrediction, Prediction, RegressionPrediction
from lapwing.progress import bar
from lapwing.sampling import DrawnPosterior
from lapwing.training.loop import step, training
from lapwing.weights import trainable

Predict = Callable[[Any], Prediction]
Teacher = Laplace | Mixture | FunctionSpace | DrawnPosterior | Ensemble | Predict


@dataclass(frozen=True)
class Distillation:
    """The trained student, what its outputs mean, and the mean divergence from the teacher in each epoch, in nats."""

    student: nn.Module = field(repr=False)
    likelihood: Likelihood
    losses: tuple[float, ...]
    output: ReadOutput | None = field(default=None, repr=False)

    def predict(self, x: Any) -> Prediction:
        """The student's prediction in eval mode; all of its uncertainty counts as aleatoric, `epistemic` is 0."""
        inputs = asked(x, next(self.student.parameters()).device)
        with borrowed(self.student, ()), torch.set_grad_enabled(inputs.requires_grad()):
            return _prediction(self.likelihood, outputs_of(self.student, inputs, self.output))


def distill(
    teacher: Teacher,
    student: nn.Module,
    loader: Iterable[Any],
    epochs: int,
    likelihood: str | Likelihood | None = None,
    *,
    predict: Mapping[str, Any] | None = None,
    augment: Callable[[Any, torch.Generator | None], Any] | None = None,
    once: bool = False,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    unpack: Unpack | None = None,
    output: ReadOutput | None = None,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Distillation:
    """Train `student` in place until it predicts what `teacher` predicts (Balan et al. 2015).

    The loss is the mean of `KL(p(y|x, D) ‖ q(y|x))` over the inputs of a batch, p being the teacher's prediction and q
    the student's: `Σ p log(p/q)` for classes and for yes or no; for numbers that of the Gaussian with the teacher's
    mean and variance, which is what a Gaussian student can learn of any p. Targets in the loader are not looked at.

    The gradient is linear in p. With `predict={"method": "sampled", "samples": 1}` the teacher is one weight sample,
    drawn anew for every batch, and the gradient is that of the whole posterior on average; the loss then does not go to
    0, since the samples differ among themselves.

    Args:
        teacher: a fitted `Laplace`, `Mixture` or `FunctionSpace`, a `DrawnPosterior`, an `Ensemble`, or a function
            `x -> Prediction`. It stays as it was.
        student: any network; trained in train mode, after which modes are put back.
        loader: batches with or without targets: `x`, `(x,)`, `(x, ..., y)` or mappings; read once per epoch. It should
            hold inputs like those that the student will be asked about, unfamiliar ones too: of others it learns
            nothing.
        epochs: passes over the loader.
        likelihood: what the student's outputs mean; by default `Categorical`, `Bernoulli` or `Poisson`, as the teacher,
            and for numbers `Heteroscedastic`: two outputs per target, for mean and variance. "regression" is the mean
            alone.
        predict: options of `teacher.predict` by name, such as its method; for a function there are none.
        augment: `fn(x, generator) -> x` changes the inputs of a batch, for teacher and student alike, such as by noise;
            it may return more of them. x, here and for a function as teacher, is a tensor, a tuple of positional or a
            dict of keyword arguments; `lapwing.batches.Inputs(args, kwargs)` where `unpack` gives both kinds.
        once: ask the teacher in the first epoch only and keep inputs and predictions, whose batches later epochs see in
            random order: for teachers that cost much more than the student.
        optimizer: `fn(parameters) -> Optimizer`, by default `torch.optim.Adam`.
        scheduler: `fn(optimizer) -> scheduler` of the learning rate, stepped after every epoch.
        unpack: `fn(batch) -> (args, kwargs, target)` for other batches.
        output: `fn(returned) -> tensor [N, ...]` for students that return neither a tensor nor `.logits`.
        generator: the source of randomness of the teacher (unless `predict` has one), `augment` and `once`; None
            consumes torch's global one.
        progress: show a bar where it takes longer than two seconds.

    Examples:
        >>> import torch
        >>> from lapwing import Laplace, distill
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
        >>> la = Laplace(torch.nn.Linear(3, 2), "classification", progress=False).fit(data)
        >>> distilled = distill(la, torch.nn.Linear(3, 2), data, epochs=5, predict={"method": "sampled", "samples": 1})
        >>> len(distilled.losses), distilled.predict(torch.randn(4, 3)).probs.shape
        (5, torch.Size([4, 2]))
    """
    if epochs < 1:
        raise InputError(f"distill(epochs=...) needs at least 1, got {epochs}.")
    _check_apart(teacher, student)
    parameters = list(trainable(student).values())
    steps = (optimizer or torch.optim.Adam)(parameters)
    schedule = None if scheduler is None else scheduler(steps)
    lessons = _Lessons(
        _predictor(teacher, generator, predict), loader, augment, once, unpack, generator, parameters[0].device
    )
    meaning = None if likelihood is None else likelihoods.resolve(likelihood)
    losses: list[float] = []
    with training(student):
        for epoch in bar(range(epochs), "distillation", progress):
            total = count = 0.0
            for inputs, target in lessons:
                meaning = meaning or _meaning(target)
                outputs = outputs_of(student, inputs, output)
                _check_shape(target, meaning, outputs)
                terms = divergence(target, _prediction(meaning, outputs))
                loss = terms.mean()
                if not bool(torch.isfinite(loss)):
                    first = not losses and count == 0
                    raise InputError(f"distill: the loss is {loss.item()} in epoch {epoch}. {_cause(target, first)}")
                steps.zero_grad()
                loss.backward()
                steps.step()
                total, count = total + float(terms.detach().double().sum()), count + len(terms)
            if count == 0:
                raise InputError(
                    f"The loader yielded nothing in epoch {epoch}; it must be one that can be read again and again."
                )
            losses.append(total / count)
            step(schedule, losses[-1])
    steps.zero_grad()
    return Distillation(student, cast(Likelihood, meaning), tuple(losses), output)


@dataclass
class _Lessons:
    """Inputs on the student's device with the teacher's predictions there, one pass at a time."""

    predict: Predict
    loader: Iterable[Any]
    augment: Callable[[Any, torch.Generator | None], Any] | None
    once: bool
    unpack: Unpack | None
    generator: torch.Generator | None
    device: torch.device
    kept: list[tuple[Inputs, Prediction]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[Inputs, Prediction]]:
        if self.kept:
            place = "cpu" if self.generator is None else self.generator.device
            for index in torch.randperm(len(self.kept), generator=self.generator, device=place).tolist():
                yield self.kept[index]
            return
        made = []
        for batch in self.loader:
            x = _question(batch, self.unpack)
            x = _detached(x if self.augment is None else self.augment(x, self.generator))
            with torch.no_grad():
                inputs, target = asked(x, self.device), self.predict(x)
            if self.once:
                target = essence(target)
                made.append((inputs, target))
            yield inputs, target
        self.kept = made


def _question(batch: Any, unpack: Unpack | None) -> Any:
    """The inputs of a batch as `predict` takes them: a tensor, a tuple or a dict; `Inputs` of both."""
    kwargs: dict[str, Any] = {}
    if unpack is not None:
        args, kwargs, _ = unpack(batch)
    elif isinstance(batch, Mapping):
        args, kwargs = (), {key: value for key, value in batch.items() if key != "labels"}
    elif isinstance(batch, tuple | list):
        args = tuple(batch[:-1] or batch)
    else:
        args = (batch,)
    if kwargs:  # of a mapping `predict` would leave out the labels
        return Inputs(tuple(args), dict(kwargs)) if args or "labels" in kwargs else dict(kwargs)
    return args[0] if len(args) == 1 and not isinstance(args[0], tuple | list | Mapping) else tuple(args)


def _detached(x: Any) -> Any:
    """Without a graph, so that training ends at the inputs."""
    if isinstance(x, Inputs):
        return Inputs(_detached(x.args), _detached(x.kwargs))
    return tree_map_only(Tensor, Tensor.detach, dict(x) if isinstance(x, Mapping) else x)


def _predictor(teacher: Teacher, generator: torch.Generator | None, given: Mapping[str, Any] | None) -> Predict:
    if not isinstance(teacher, Laplace | Mixture | FunctionSpace | DrawnPosterior | Ensemble):
        if given:
            raise InputError(f"A function as teacher takes x alone: put {', '.join(given)} into it.")
        return teacher
    options = predict_options(teacher.predict, given)
    if isinstance(teacher, Laplace | Mixture | FunctionSpace):
        options = {"generator": generator} | options
    return partial(teacher.predict, **options)


def _meaning(prediction: Prediction) -> Likelihood:
    """The likelihood whose p(y|f) can say what the prediction says."""
    if isinstance(prediction, ClassPrediction):
        return Categorical(prediction.dim, prediction.ignore_index)
    if isinstance(prediction, BinaryPrediction):
        return Bernoulli()
    if isinstance(prediction, RegressionPrediction):
        return Heteroscedastic()
    if isinstance(prediction, CountPrediction):
        return Poisson()
    raise InputError(f"distill: the teacher's {type(prediction).__name__} has no closed form for a student to follow.")


def _prediction(likelihood: Likelihood, outputs: Tensor) -> Prediction:
    noise = torch.tensor(likelihood.noise or 1.0, dtype=outputs.dtype, device=outputs.device)
    return likelihood.predict_samples(outputs.unsqueeze(0), noise)


def _check_shape(teacher: Prediction, likelihood: Likelihood, outputs: Tensor) -> None:
    if not isinstance(teacher, RegressionPrediction):
        return
    *positions, targets = teacher.mean.shape
    pairs = isinstance(likelihood, PairLikelihood)
    if list(outputs.shape) != [*positions, 2 * targets if pairs else targets] or (pairs and not positions):
        raise InputError(
            f"The student's outputs are {list(outputs.shape)}, the teacher's means {list(teacher.mean.shape)}. Give it "
            "two outputs per target, [N, ..., 2·D] for means [N, ..., D], for mean and variance, or as many as targets "
            "with likelihood='regression', for the mean alone."
        )


def _cause(target: Prediction, first: bool) -> str:
    """What made the loss NaN or infinite, and the fix; `first` if no step was taken yet."""
    if not bool(torch.isfinite(divergence(target, target)).all()):
        return "The teacher's prediction is not finite there, or has a variance of 0: look at teacher.predict(x)."
    if first:
        return (
            "No step was taken yet: the student's outputs are not finite, or rule out what the teacher does not. "
            "Look at student(x)."
        )
    return "Use a lower learning rate."


def _check_apart(teacher: Teacher, student: nn.Module) -> None:
    owner = getattr(teacher, "__self__", teacher)  # of a method such as la.predict
    models = [
        one.ggn.model if isinstance(one, DrawnPosterior) else one.model
        for one in (owner.members if isinstance(owner, Mixture) else (owner,))
        if isinstance(one, Laplace | FunctionSpace | DrawnPosterior | Ensemble)
    ]
    held = {id(parameter) for model in models for parameter in model.parameters()}
    shared = [name for name, parameter in student.named_parameters() if id(parameter) in held]
    if shared:
        raise InputError(
            f"{shared[0]!r} of the student is a parameter of the teacher, which training would change. Start from a "
            "copy: copy.deepcopy(la.model)."
        )
