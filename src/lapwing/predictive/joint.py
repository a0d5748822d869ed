"""Predictions at several inputs together: what is known of one output says something about the others.

The D outputs of each of N examples, flat, are N·D numbers in the order of `mean.flatten()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from lapwing.errors import InputError
from lapwing.likelihoods.base import GaussianOutputs, Likelihood
from lapwing.predictive.links import draw
from lapwing.predictive.prediction import Prediction, RegressionPrediction

_MOST_ROWS = 2**14  # of a covariance that is made


@dataclass(frozen=True)
class JointPrediction(Prediction):
    """Gaussian outputs of all examples: `mean: [N, *output]` and `covariance: [N·D, N·D]`, without the noise of y.

    `marginals` is the prediction of each example by itself, as `predict` without `joint` gives it.
    """

    mean: Tensor
    covariance: Tensor = field(repr=False)
    likelihood: Likelihood
    noise: Tensor
    link: str | None = None
    samples: int = 1000
    generator: torch.Generator | None = field(default=None, repr=False)

    @cached_property
    def marginals(self) -> Prediction:
        """The blocks on the diagonal, through the likelihood and its link."""
        examples = len(self.mean)
        blocks = self.covariance.reshape(examples, -1, examples, self.covariance.shape[0] // examples)
        own = blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        variance = own.diagonal(dim1=1, dim2=2).reshape(self.mean.shape)
        outputs = GaussianOutputs(self.mean, variance, own)
        return self.likelihood.predict_gaussian(outputs, self.noise, self.link, self.samples, self.generator)

    def checked(self) -> JointPrediction:
        """Itself, once it is known that the link fits the likelihood and the outputs."""
        _ = self.marginals
        return self

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the outputs f at all inputs together: `[n, N, *output]`, without the noise of y."""
        check_count(n)
        drawn = draw(self.mean.reshape(1, -1), self.covariance[None], n, generator)
        return drawn.reshape(n, *self.mean.shape)

    def log_prob(self, targets: Tensor, samples: int = 1000, generator: torch.Generator | None = None) -> Tensor:
        """`log p(y_1, …, y_N)`: 0-d. In closed form for a Gaussian likelihood, else `log mean_s Π_n p(y_n|f_sn)`.

        The mean over draws is unbiased for the probability, so that its logarithm is too low on average.
        """
        if self.likelihood.noise is None:
            return JointSamples(self.sample(samples, generator), self.likelihood, self.noise).log_prob(targets)
        if targets.shape != self.mean.shape:
            raise InputError(f"targets of shape {list(targets.shape)} against means of {list(self.mean.shape)}.")
        result: Tensor = self.distribution().log_prob(targets.flatten())
        return result

    def distribution(self) -> MultivariateNormal:
        """The targets of a regression, noise included, as one vector: event shape `[N·D]`."""
        if self.likelihood.noise is None:
            raise InputError(
                f"The joint distribution under the {self.likelihood.name} likelihood has no closed form: draw outputs "
                "with prediction.sample(n), or use prediction.marginals.distribution()."
            )
        noise = torch.diag(self.marginals.aleatoric.flatten())
        return MultivariateNormal(self.mean.flatten(), self.covariance + noise)


@dataclass(frozen=True)
class JointSamples(Prediction):
    """Outputs of one set of weights after the other, at all inputs: `outputs: [S, N, *output]`.

    Memory grows with the outputs, not with their square.
    """

    outputs: Tensor
    likelihood: Likelihood
    noise: Tensor

    @property
    def mean(self) -> Tensor:
        """`[N, *output]`."""
        return self.outputs.mean(0)

    @property
    def covariance(self) -> Tensor:
        """Of the samples, divided by S − 1: `[N·D, N·D]`; made when asked for."""
        if len(self.outputs) < 2:
            raise InputError("A covariance needs at least 2 samples: predict(samples=...).")
        if self.outputs[0].numel() > _MOST_ROWS:
            raise InputError(
                f"The covariance of {self.outputs[0].numel()} outputs has as many rows, more than {_MOST_ROWS}. Their "
                "samples are in prediction.outputs, those at some places or inputs in a part of it: "
                "torch.cov(prediction.outputs[:, i].flatten(1).T)."
            )
        centered = (self.outputs - self.outputs.mean(0)).flatten(1)
        return centered.T @ centered / (len(centered) - 1)

    @cached_property
    def marginals(self) -> Prediction:
        """The mixture of the samples, for each example by itself."""
        return self.likelihood.predict_samples(self.outputs, self.noise)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Some of the S samples, drawn with replacement: `[n, N, *output]`."""
        check_count(n)
        return self.outputs[torch.randint(len(self.outputs), (n,), generator=generator, device=self.outputs.device)]

    def log_prob(self, targets: Tensor) -> Tensor:
        """`log mean_s Π_n p(y_n|f_sn)`: 0-d."""
        marginals = self.marginals
        if isinstance(marginals, RegressionPrediction) and marginals.components is not None:
            if targets.shape != self.outputs.shape[1:]:
                shape = list(self.outputs.shape[1:])
                raise InputError(f"targets of shape {list(targets.shape)} against outputs of {shape}.")
            noise = Normal(marginals.components.means, marginals.components.variances.sqrt())
            logs: Tensor = noise.log_prob(targets).flatten(1).sum(1)
        else:
            self.likelihood.check(self.outputs[0].detach(), targets, "log_prob")
            logs = torch.stack([self.likelihood.log_prob(outputs, targets).sum() for outputs in self.outputs])
        return logs.logsumexp(0) - math.log(len(logs))


def check_count(n: int) -> None:
    """`sample(n)` draws at least once."""
    if n < 1:
        raise InputError(f"sample(n) needs n of at least 1, got {n}.")
