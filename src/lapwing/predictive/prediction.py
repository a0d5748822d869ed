"""What a prediction says: the probabilities or the mean, and where its uncertainty comes from.

All tensors are differentiable in the input when it requires grad.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
)
from torch.nn import functional

from lapwing.errors import InputError, choose
from lapwing.predictive.components import Components
from lapwing.predictive.means import log_mean_of, mean_of
from lapwing.predictive.uncertainty import (
    CLOSED_FORM,
    MEASURES,
    SAMPLES,
    Parts,
    Split,
    Uncertainty,
    entropy_terms,
    gaussian_entropy,
    indicator_variance,
    mixture_entropy,
)


class Prediction:
    """What predictions share. Which attributes there are depends on the likelihood; asking for others says so."""

    if TYPE_CHECKING:
        # So that `la.predict(x).probs` type-checks: predict cannot know the likelihood statically.
        @property
        def probs(self) -> Tensor: ...
        @property
        def labels(self) -> Tensor: ...
        @property
        def confidence(self) -> Tensor: ...
        @property
        def entropy(self) -> Tensor: ...
        @property
        def mutual_information(self) -> Tensor: ...
        @property
        def mean(self) -> Tensor: ...
        @property
        def variance(self) -> Tensor: ...
        @property
        def std(self) -> Tensor: ...
        @property
        def aleatoric(self) -> Tensor: ...
        @property
        def epistemic(self) -> Tensor: ...
        def uncertainty(self, measure: str = ...) -> Uncertainty: ...
        def interval(self, probability: float = 0.95) -> tuple[Tensor, Tensor]: ...
        def log_prob(self, targets: Tensor) -> Tensor: ...
        def distribution(self) -> Distribution: ...

    def __getattr__(self, name: str) -> Any:
        public = [word for word in dir(self) if not word.startswith("_")]
        raise AttributeError(f"A {type(self).__name__} has no {name!r}; it has {', '.join(public)}.")


class _DiscretePrediction(Prediction):
    """`entropy` split into what the weights explain and what they do not.

    `components`, where present, gives the log-probabilities `[M, N]` of targets under the M parts of a mixture, weights
    included. The outputs of an example are independent within a part, and not in the mixture, whose probability of them
    all is no product; probabilities, labels, entropies and `distribution()` are those of one output at a time.
    `latent_variance`, where known, is the variance of the logits `[N, *output]`.
    """

    sampled: Callable[[], Parts]
    components: Callable[[Tensor], Tensor] | None
    latent_variance: Tensor | None

    @cached_property
    def parts(self) -> Parts:
        """Entropies and variances of the samples, drawn when first asked for."""
        return self.sampled()

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information between label and weights, of the samples."""
        return self.parts.entropy.between

    @property
    def epistemic(self) -> Tensor:
        """The part of `entropy` that comes from not knowing the weights."""
        return self.entropy * self.parts.entropy.share

    @property
    def aleatoric(self) -> Tensor:
        """`entropy − epistemic`, the part that more data would not remove."""
        return self.entropy - self.epistemic

    def uncertainty(self, measure: str = "entropy") -> Uncertainty:
        """Total, aleatoric and epistemic "entropy" (nats), or "variance" of the indicator `1{y = c}` of each class.

        Closed-form links are split in the shares of Monte Carlo in output space; `source` says so.
        """
        choose(measure, MEASURES, "measure of uncertainty")
        total = self.entropy if measure == "entropy" else self.variance
        return Uncertainty.shared(total, self.parts.of(measure), self.parts.source)


@dataclass(frozen=True)
class ClassPrediction(_DiscretePrediction):
    """A distribution over classes, `log_probs: [N, *output]` with the classes along `dim`.

    Uncertainty is measured as entropy in nats: `entropy = aleatoric + epistemic`, where `epistemic` is
    the mutual information between label and weights. Sampled predictions have it exactly for their
    samples. A closed form says nothing of it: there Monte Carlo in output space, drawn when first asked
    for, gives `mutual_information` and the shares in which `entropy` is split.
    """

    log_probs: Tensor
    dim: int
    ignore_index: int = -100
    sampled: Callable[[], Parts] = field(kw_only=True, repr=False)
    components: Callable[[Tensor], Tensor] | None = field(default=None, kw_only=True, repr=False)
    latent_variance: Tensor | None = field(default=None, kw_only=True, repr=False)

    @staticmethod
    def mixture(logits: Tensor, dim: int, ignore_index: int = -100, joint: bool = False) -> ClassPrediction:
        """The equal mixture of the probabilities of `logits: [S, N, *output]`, classes along `dim` of one sample.

        With `joint` the positions of an example have the sample in common.
        """

        def log_probs(some: Tensor) -> Tensor:
            return some.log_softmax(dim + 1)

        mean = log_mean_of(logits, log_probs)
        parts = Parts(
            Split(
                entropy_terms(mean).sum(dim),
                mean_of(logits, lambda some: entropy_terms(log_probs(some)).sum(dim + 1)),
            ),
            Split(indicator_variance(mean), mean_of(logits, lambda some: indicator_variance(log_probs(some)))),
        )
        prediction = ClassPrediction(mean, dim, ignore_index, sampled=lambda: parts)
        if not joint or mean.dim() == 2:
            return prediction

        def components(targets: Tensor) -> Tensor:
            each = [replace(prediction, log_probs=one.log_softmax(dim)).log_prob(targets) for one in logits]
            return torch.stack(each) - math.log(len(each))

        return replace(prediction, components=components)

    @cached_property
    def probs(self) -> Tensor:
        """`[N, *output]`, summing to 1 along `dim`."""
        return self.log_probs.exp()

    @property
    def labels(self) -> Tensor:
        """The most probable class: `[N, *positions]`."""
        return self.log_probs.argmax(self.dim)

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class."""
        return self.probs.amax(self.dim)

    @cached_property
    def entropy(self) -> Tensor:
        """Total uncertainty `−Σ p log p`: `[N, *positions]`."""
        return entropy_terms(self.log_probs).sum(self.dim)

    @property
    def variance(self) -> Tensor:
        """`p_c(1 − p_c)`, the variance of the indicator of each class: `[N, *output]`."""
        return indicator_variance(self.log_probs)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of class indices `[N, *positions]`, of all positions together: `[N]`.

        Positions whose target is `ignore_index` are not observed and add 0.
        """
        index, observed = self.targets(targets)
        if self.components is not None:
            return self.components(targets).logsumexp(0)
        chosen = self.log_probs.gather(self.dim, index.unsqueeze(self.dim)).squeeze(self.dim)
        chosen = torch.where(observed, chosen, torch.zeros_like(chosen))
        return chosen.flatten(1).sum(1) if chosen.dim() > 1 else chosen

    def targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Class indices with 0 in the place of `ignore_index`, and where they are observed; or an error."""
        expected, classes = self.log_probs.select(self.dim, 0).shape, self.log_probs.shape[self.dim]
        if targets.shape != expected or targets.is_floating_point():
            raise InputError(f"Class indices of shape {list(expected)} are needed, got {list(targets.shape)}.")
        observed = targets != self.ignore_index
        index = targets.long().masked_fill(~observed, 0)
        if bool(((index < 0) | (index >= classes)).any()):
            raise InputError(f"A class index is out of range for {classes} classes.")
        return index, observed

    def distribution(self) -> Distribution:
        """`torch.distributions.Categorical` with the classes last."""
        return Categorical(logits=self.log_probs.movedim(self.dim, -1))


@dataclass(frozen=True)
class BinaryPrediction(_DiscretePrediction):
    """Yes or no for each output: `log_yes` and `log_no` `[N, *output]`, logarithms of the two probabilities.

    Entropies are per output, in nats.
    """

    log_yes: Tensor
    log_no: Tensor
    sampled: Callable[[], Parts] = field(repr=False)
    components: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    latent_variance: Tensor | None = field(default=None, kw_only=True, repr=False)

    @staticmethod
    def mixture(logits: Tensor, joint: bool = False) -> BinaryPrediction:
        """The equal mixture of the probabilities of `logits: [S, N, *output]`.

        With `joint` the outputs of an example have the sample in common.
        """
        yes, no = (log_mean_of(logits, side) for side in (functional.logsigmoid, _log_no))

        def entropy(some: Tensor) -> Tensor:
            return entropy_terms(functional.logsigmoid(some)) + entropy_terms(_log_no(some))

        def variance(some: Tensor) -> Tensor:
            return (functional.logsigmoid(some) + _log_no(some)).exp()

        parts = Parts(
            Split(entropy_terms(yes) + entropy_terms(no), mean_of(logits, entropy)),
            Split((yes + no).exp(), mean_of(logits, variance)),
        )
        prediction = BinaryPrediction(yes, no, lambda: parts)
        if not joint or yes[0].numel() == 1:
            return prediction

        def components(targets: Tensor) -> Tensor:
            each = [
                replace(prediction, log_yes=functional.logsigmoid(one), log_no=_log_no(one)).log_prob(targets)
                for one in logits
            ]
            return torch.stack(each) - math.log(len(each))

        return replace(prediction, components=components)

    @cached_property
    def probs(self) -> Tensor:
        """The probability of "yes": `[N, *output]`."""
        return self.log_yes.exp()

    @property
    def labels(self) -> Tensor:
        """1 where "yes" is more probable: `[N, *output]`."""
        return (self.log_yes > self.log_no).long()

    @property
    def confidence(self) -> Tensor:
        """The probability of the label."""
        return torch.maximum(self.log_yes, self.log_no).exp()

    @cached_property
    def entropy(self) -> Tensor:
        """Total uncertainty per output."""
        return entropy_terms(self.log_yes) + entropy_terms(self.log_no)

    @property
    def variance(self) -> Tensor:
        """`p(1 − p)`: `[N, *output]`."""
        return (self.log_yes + self.log_no).exp()

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of targets 0 or 1 `[N, *output]`, of all outputs together: `[N]`."""
        if targets.shape != self.probs.shape:
            raise InputError(f"targets of shape {list(targets.shape)} against outputs of {list(self.probs.shape)}.")
        if self.components is not None:
            return self.components(targets).logsumexp(0)
        terms = torch.where(targets.to(torch.bool), self.log_yes, self.log_no)
        return terms.flatten(1).sum(1) if terms.dim() > 1 else terms

    def distribution(self) -> Distribution:
        """`torch.distributions.Bernoulli`."""
        return Bernoulli(logits=self.log_yes - self.log_no)


@dataclass(frozen=True)
class RegressionPrediction(Prediction):
    """Mean and variance of real targets: `variance = aleatoric + epistemic`, each `[N, *output]`.

    `covariance` `[N, D, D]`, where present, is the epistemic covariance between the D outputs;
    `components`, where present, are the Gaussians whose mixture this is: of samples, or of several models.
    `noise_entropy` `[N, *output]` is the mean entropy of the noise where that differs from sample to sample.
    """

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    covariance: Tensor | None = field(default=None, repr=False)
    components: Components | None = field(default=None, repr=False)
    noise_entropy: Tensor | None = field(default=None, repr=False)

    @property
    def variance(self) -> Tensor:
        """Total variance: `[N, *output]`."""
        return self.aleatoric + self.epistemic

    @property
    def std(self) -> Tensor:
        """Its square root."""
        return torch.sqrt(self.variance)

    def uncertainty(self, measure: str = "variance") -> Uncertainty:
        """Total, aleatoric and epistemic "variance", or differential "entropy" (nats), of each output for itself.

        The epistemic entropy is the mutual information between target and weights; `½ log(1 + epistemic/aleatoric)`
        for a Gaussian, by quadrature for a mixture.
        """
        source = CLOSED_FORM if self.components is None else SAMPLES
        if choose(measure, MEASURES, "measure of uncertainty") == "variance":
            return Uncertainty(self.variance, self.aleatoric, self.epistemic, source)
        within = gaussian_entropy(self.aleatoric) if self.noise_entropy is None else self.noise_entropy
        if self.components is None and self.noise_entropy is None:
            between = 0.5 * torch.log1p(self.epistemic / self.aleatoric)
        else:
            total = gaussian_entropy(self.variance) if self.components is None else mixture_entropy(self.components)
            between = Split(total, within).between
        return Uncertainty(within + between, within, between, source)

    def interval(self, probability: float = 0.95) -> tuple[Tensor, Tensor]:
        """Central interval of each output, `(low, high)`: it lies on either side with probability `(1 − p)/2`."""
        if not 0 < probability < 1:
            raise InputError(f"interval(p) needs a probability between 0 and 1, got {probability}.")
        if self.components is not None:
            tail = (1 - probability) / 2
            return self.components.quantile(tail), self.components.mirrored().quantile(tail).neg()
        width = math.sqrt(2) * torch.erfinv(torch.tensor(probability, dtype=torch.float64)).item() * self.std
        return self.mean - width, self.mean + width

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log density of targets `[N, *output]`, jointly over the outputs: `[N]`."""
        if targets.shape != self.mean.shape:
            raise InputError(f"targets of shape {list(targets.shape)} against means of {list(self.mean.shape)}.")
        correlated = self.covariance if self.components is None else self.components.covariances
        if correlated is not None and self.mean.dim() > 1:
            targets = targets.flatten(1)
        result: Tensor = self.distribution().log_prob(targets)
        return result

    def distribution(self) -> Distribution:
        """One joint distribution of the outputs per example (batch shape `[N]`)."""
        events = self.mean.dim() - 1
        if self.components is not None:
            return self.components.distribution()
        if self.covariance is not None and events:
            noise = torch.diag_embed(self.aleatoric.flatten(1))
            return MultivariateNormal(self.mean.flatten(1), self.covariance + noise)
        marginal = Normal(self.mean, self.std)
        return Independent(marginal, events) if events else marginal


def _log_no(logits: Tensor) -> Tensor:
    """Log probability of "no"."""
    return functional.logsigmoid(-logits)
