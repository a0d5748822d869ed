"""The weighted mixture of joint predictions: which member is right is one question for all inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import InputError
from lapwing.predictive.joint import JointPrediction, JointSamples
from lapwing.predictive.mixing import average, check_shapes, mix, promoted
from lapwing.predictive.prediction import Prediction

JointMember = JointPrediction | JointSamples


@dataclass(frozen=True)
class JointMixture(Prediction):
    """`p(y_1, …, y_N) = Σ_m w_m p_m(y_1, …, y_N)`, with normalized `log_weights: [M]`.

    Inputs are coupled by the members' own covariances and by not knowing which member it is.
    """

    members: tuple[JointMember, ...] = field(repr=False)
    log_weights: Tensor

    def __post_init__(self) -> None:
        check_shapes([member.mean for member in self.members])

    @property
    def mean(self) -> Tensor:
        """Of the outputs f: `[N, *output]`."""
        return average([member.mean for member in self.members], self.log_weights)

    @property
    def covariance(self) -> Tensor:
        """Of the outputs f, by the law of total covariance: `Σ_m w_m (C_m + (μ_m − μ)(μ_m − μ)ᵀ)`, `[N·D, N·D]`."""
        apart = [(member.mean - self.mean).flatten() for member in self.members]
        within = [member.covariance for member in self.members]
        second = [own + torch.outer(gap, gap) for own, gap in zip(within, apart, strict=True)]
        return average(second, self.log_weights)

    @cached_property
    def marginals(self) -> Prediction:
        """The mixture of the members' predictions of each example by itself."""
        return mix([member.marginals for member in self.members], self.log_weights)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the outputs f at all inputs together, of one member each: `[n, N, *output]`."""
        if n < 1:
            raise InputError(f"sample(n) needs n of at least 1, got {n}.")
        weights = self.log_weights.exp().to("cpu" if generator is None else generator.device)
        chosen = torch.multinomial(weights, n, replacement=True, generator=generator).cpu()
        drawn = torch.empty_like(self.mean).expand(n, *self.mean.shape).clone()
        for number, member in enumerate(self.members):
            own = (chosen == number).nonzero().squeeze(1).to(drawn.device)
            if len(own):
                drawn[own] = member.sample(len(own), generator).to(drawn)
        return drawn

    def log_prob(self, targets: Tensor, samples: int = 1000, generator: torch.Generator | None = None) -> Tensor:
        """`log Σ_m w_m p_m(y_1, …, y_N)`: 0-d; each member its own way (see `JointPrediction`)."""
        logs = [
            member.log_prob(targets, samples, generator)
            if isinstance(member, JointPrediction)
            else member.log_prob(targets)
            for member in self.members
        ]
        stacked = promoted(logs)
        return (stacked + self.log_weights.to(stacked)).logsumexp(0)
