"""Prior precisions and noise, learned by the evidence while the weights are trained.

Training minimizes `−(1/N)·[T·log p(D|θ) + log p(θ)]`. Now and then a Laplace approximation is fitted to the network as
it is, and precisions and noise climb its evidence, whose T, σ² and λ are those of the loss (Immer et al. 2021, Scalable
Marginal Likelihood Estimation for Model Selection in Deep Learning).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lapwing import randomness
from lapwing.batches import Unpack, unpack
from lapwing.errors import InputError, TuningWarning, warn
from lapwing.laplace import Laplace
from lapwing.likelihoods import Likelihood
from lapwing.priors import GaussianPrior, Prior
from lapwing.tuning import Groups, resolved, tune_by_evidence
from lapwing.weights import LAST_LAYER, select, unwrap

_EDGE = math.log(1e8)  # |log λ| beyond which a precision is said to run off


@dataclass(frozen=True)
class Best:
    """The network with the highest evidence so far: its values by name, and its posterior."""

    epoch: int
    log_evidence: float
    la: Laplace
    values: dict[str, Tensor] = field(repr=False)


class EvidenceInTheLoop:
    """Loss, regularizer and hyperparameters of a training loop of one's own.

    Args:
        model: the network that is trained.
        likelihood: as for `Laplace`.
        loader: the training data, read once for each fit; its random state is left as found.
        structure: as for `Laplace`.
        groups: which weights share a precision, as for `tune_prior`: "scalar", "layer", "parameter", "input", "auto" or
            `{glob: label}`.
        burn_in: epochs before the first `every` begins.
        every: epochs from one fit to the next, F.
        steps: most ascent steps on the logarithms of precisions and noise after a fit, K. They are scaled by the
            evidence's own curvature, so there is no learning rate to choose; a few reach the optimum for the weights
            as they are.
        curvature: as for `Laplace`. "rademacher" needs one backward pass, whatever the number of classes.
        prior: the precisions to begin with: a number, `{glob: number}` or `GaussianPrior`.
        temperature: T, which multiplies the likelihood, here and in the evidence.
        generator: for random curvatures.
        options: others of `Laplace`, such as `tempered`, `unpack`, `output` or `progress`.

    Examples:
        >>> import torch
        >>> from lapwing import EvidenceInTheLoop
        >>> model = torch.nn.Linear(3, 1)
        >>> x = torch.randn(8, 3)
        >>> loader = [(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(8, 1))]
        >>> evidence = EvidenceInTheLoop(model, "regression", loader, every=5)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> for epoch in range(10):
        ...     for inputs, targets in loader:
        ...         optimizer.zero_grad()
        ...         (evidence.loss(model(inputs), targets) + evidence.regularizer(model)).backward()
        ...         _ = optimizer.step()
        ...     _ = evidence.step(epoch)
        >>> evidence.best.epoch
        9
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        loader: Iterable[Any],
        structure: str = "kron",
        groups: Groups = "scalar",
        *,
        burn_in: int = 0,
        every: int = 5,
        steps: int = 20,
        curvature: str = "rademacher",
        prior: float | Tensor | Mapping[str, float | Tensor] | Prior = 1.0,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        for name, value, least in (("burn_in", burn_in, 0), ("every", every, 1), ("steps", steps, 1)):
            if value < least:
                raise InputError(f"{name} must be at least {least}, got {value}.")
        self.la = Laplace(model, likelihood, structure, curvature, prior=prior, temperature=temperature, **options)
        if not isinstance(self.la.prior, GaussianPrior):
            raise InputError("FactoredDamping is no prior, so there is no evidence to train with; give a number.")
        if self.la.weights == LAST_LAYER:
            raise InputError("weights='last_layer' is found by a fit, too late for the loss: name the parameters.")
        names = list(select(self.la.model, self.la.weights))
        _check_groups(groups, names, structure)
        self.loader, self.groups, self.generator = loader, groups, generator
        self.burn_in, self.every, self.steps = burn_in, every, steps
        self.examples = _count(loader, self.la.unpack)
        self.best: Best | None = None
        self._terms = self._prior_terms()

    @property
    def prior(self) -> GaussianPrior:
        """The prior that the regularizer stands for now."""
        assert isinstance(self.la.prior, GaussianPrior)
        return self.la.prior

    def loss(self, outputs: Tensor, targets: Tensor, where: str = "loss") -> Tensor:
        """`−T·log p(y|f)` at the present noise, averaged over the examples of a batch; 0-d."""
        likelihood = self.la.likelihood
        likelihood.check(outputs.detach(), targets, where)
        if likelihood.noise is None:
            return -self.la.temperature * likelihood.log_prob(outputs, targets).mean()
        # p(y|f) at noise σ² is p(y/σ|f/σ) at unit noise, divided by σ for every number observed.
        scale = math.sqrt(float(self.la._noise))
        log_prob = likelihood.log_prob(outputs / scale, targets / scale) - targets[0].numel() * math.log(scale)
        return -self.la.temperature * log_prob.mean()

    def regularizer(self, model: nn.Module | None = None) -> Tensor:
        """`(1/2N) Σ_g λ_g ‖θ_g − μ₀‖²`, the negative log prior for one example, without its normalizer; 0-d.

        Times T where the prior is tempered as well. `model` may be a wrapper of the model or a copy with its names.
        """
        model = self.la.model if model is None else unwrap(model)
        terms = []
        for name, precision, mean in self._terms:
            parameter = model.get_parameter(name)
            distance = parameter if mean is None else parameter - mean
            terms.append((precision * distance.square()).sum())
        scale = self.la.temperature if self.la.tempered == "both" else 1.0
        return scale / (2 * self.examples) * torch.stack(terms).sum()

    def due(self, epoch: int) -> bool:
        """Whether `step(epoch)` fits: at every F-th epoch after burn-in. Epochs count from 0."""
        done = epoch + 1 - self.burn_in
        return done > 0 and done % self.every == 0

    def step(self, epoch: int) -> Laplace | None:
        """To call after each epoch (from 0): a fit and K hyperparameter steps where they are due, else nothing."""
        return self.measure(epoch) if self.due(epoch) else None

    def measure(self, epoch: int) -> Laplace:
        """Fit the network as it is and take the K steps; returns the fit, with what was done in `la.tuning_`.

        The model's modes, gradients and random states are left as found; loss and regularizer have the new values.
        """
        la = self.la.at()
        with randomness.kept(randomness.sources(self.loader, self.generator), but=self.generator):
            la.fit(self.loader, generator=self.generator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TuningWarning)  # said below, with the epoch and without the limit of steps
            la, tuning = tune_by_evidence(la, resolved(la, self.groups), max_steps=self.steps)
        # Where K steps were too few, the last warning says so, or that something ran off, which is said here by name.
        messages = [*(tuning.warnings if tuning.converged else tuning.warnings[:-1])]
        messages += [
            line
            for label, one in tuning.precisions.items()
            for line in _run_off(f"The precision of prior group {label!r}", one)
        ]
        messages += [] if tuning.noise is None else _run_off("The noise variance", tuning.noise)
        for message in messages:
            warn(f"Epoch {epoch}: {message}", TuningWarning)
        la = la.at(prior=_hold_prior(la.prior), noise=None if tuning.noise is None else _hold(la._noise))
        value = float(la.log_evidence())
        if not math.isfinite(value):
            raise InputError(f"Epoch {epoch}: the log-evidence is {value}, with {la.prior} and noise {la.noise}.")
        la.tuning_ = replace(
            tuning,
            value=value,
            precisions={label: _hold(one) for label, one in tuning.precisions.items()},
            noise=None if tuning.noise is None else _hold(tuning.noise),
            warnings=tuple(messages),
        )
        self.adopt(la.prior, la._noise)
        if self.best is None or value > self.best.log_evidence:
            self.best = Best(epoch, value, la, snapshot(self.la.model))
        return la

    def restore_best(self) -> Laplace:
        """Put the values of the best evidence back into the model; returns the posterior there."""
        if self.best is None:
            raise InputError(f"No evidence was computed yet: burn_in={self.burn_in}, every={self.every}.")
        put_back(self.la.model, self.best.values)
        return self.best.la

    def adopt(self, prior: Prior, noise: Tensor) -> None:
        """Go on with these hyperparameters."""
        self.la.prior, self.la._noise = prior, noise.detach()
        self._terms = self._prior_terms()

    def _prior_terms(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """Name, precision and mean (None for 0) of every Bayesian parameter, where the parameter is."""
        chosen = select(self.la.model, self.la.weights)
        sizes = {name: parameter.shape for name, parameter in chosen.items()}
        precisions, means = self.prior.precisions(sizes), self.prior.means(sizes)
        return [
            (
                name,
                precisions[name].detach().to(parameter),
                means[name].to(parameter) if bool((means[name] != 0).any()) else None,
            )
            for name, parameter in chosen.items()
        ]


def values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, also those that are not part of the state dict."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers by name."""
    return {name: value.detach().clone() for name, value in values(model)}


def put_back(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Undo all changes of parameters and buffers since the snapshot."""
    with torch.no_grad():
        for name, value in values(model):
            value.copy_(kept[name])


def _check_groups(groups: Groups, names: list[str], structure: str) -> None:
    if groups == "parameter" and structure in ("kron", "ekfac"):
        raise InputError(f"groups='parameter' needs structure 'diag', 'block' or 'full', not {structure!r}.")
    if isinstance(groups, Mapping):
        for name in names:
            if not any(fnmatchcase(name, glob) for glob in groups):
                raise InputError(f"groups has no label for parameter {name!r}. Add a pattern, or a last one '*'.")


def _count(loader: Iterable[Any], custom: Unpack | None) -> int:
    """The examples of one pass: by a sampler that says so, else by a pass that leaves the random state as found."""
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise InputError(
            "The loader must be readable once for every epoch, such as a DataLoader or a list, not "
            f"{type(loader).__name__}."
        )
    if isinstance(loader, DataLoader) and loader.batch_size is not None and isinstance(loader.sampler, Sized):
        seen = len(loader.sampler)
        count = seen // loader.batch_size * loader.batch_size if loader.drop_last else seen
    else:
        with randomness.kept(randomness.sources(loader, None), but=None):
            count = sum(unpack(batch, f"Batch {i}", custom)[1].shape[0] for i, batch in enumerate(loader))
    if count == 0:
        raise InputError("The loader is empty: there is nothing to train on.")
    return count


def _run_off(what: str, value: float | Tensor) -> list[str]:
    """What to say of values beyond the edges."""
    logs = torch.as_tensor(value, dtype=torch.float64).log()
    said = []
    for beyond, where, edge in ((logs > _EDGE, "infinity", _EDGE), (logs < -_EDGE, "0", -_EDGE)):
        if bool(beyond.any()):
            count = "" if beyond.dim() == 0 else f" in {int(beyond.sum())} of {beyond.numel()} elements"
            said.append(
                f"{what}{count} runs off to {where}: the data do not determine it. It is held at {math.exp(edge):.0e}."
            )
    return said


def _hold(value: Any) -> Any:
    """Numbers or tensors, inside the edges."""
    edges = math.exp(-_EDGE), math.exp(_EDGE)
    return value.clamp(*edges) if isinstance(value, Tensor) else min(max(value, edges[0]), edges[1])


def _hold_prior(prior: Prior) -> GaussianPrior:
    assert isinstance(prior, GaussianPrior)
    assert isinstance(prior.precision, Mapping)
    return GaussianPrior({glob: _hold(value) for glob, value in prior.precision.items()}, prior.mean)
