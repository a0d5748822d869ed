"""Mixtures of Laplace approximations: several trained networks, each with its posterior, as one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lapwing.comparison import check_comparable, log_evidences
from lapwing.errors import InputError, NotFittedError, choose
from lapwing.laplace import Laplace
from lapwing.predictive.joint_mixture import JointMember, JointMixture
from lapwing.predictive.mixing import mix
from lapwing.predictive.prediction import Prediction


class Mixture:
    """`p(y|x, D) = Σ_m w_m p_m(y|x, D)` over fitted posteriors (Eschenhagen et al. 2021).

    The members are taken as they are: tuning one afterwards changes nothing here.

    Args:
        members: fitted posteriors with the same likelihood and outputs, such as those of a deep ensemble.
        weights: None for equal ones, numbers in proportion to which the members count, or "evidence" for their
            posterior probabilities `w_m ∝ p(D|M_m)`. Evidences of N examples grow with N, so that these weights
            usually favor one member alone: they choose among models rather than average over them.

    Examples:
        >>> import torch
        >>> from lapwing import Laplace, Mixture
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
        >>> members = [Laplace(torch.nn.Linear(3, 2), "classification").fit(data) for _ in range(3)]
        >>> Mixture(members).predict(torch.randn(5, 3)).probs.shape
        torch.Size([5, 2])
    """

    def __init__(self, members: Sequence[Laplace], weights: str | Sequence[float] | Tensor | None = None) -> None:
        self.members = tuple(_checked(members))
        self.weights = self._weights(weights)
        self._prior = self.weights if not isinstance(weights, str) else self._weights(None)

    def _weights(self, weights: str | Sequence[float] | Tensor | None) -> Tensor:
        """Normalized: `[M]`, float64."""
        count = len(self.members)
        if isinstance(weights, str):
            choose(weights, ("evidence",), "weights of a Mixture")
            check_comparable(self._named())
            return log_evidences(self.members).softmax(0)
        if weights is None:
            return torch.full((count,), 1 / count, dtype=torch.float64)
        values = torch.as_tensor(weights, dtype=torch.float64)
        if values.shape != (count,) or not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
            raise InputError(f"weights must be {count} numbers of at least 0, one per member, got {weights!r}.")
        if not bool(values.sum() > 0):
            raise InputError("The weights of a Mixture are all 0.")
        return values / values.sum()

    def _named(self) -> dict[str, Laplace]:
        return {f"member {number}": la for number, la in enumerate(self.members)}

    def predict(
        self,
        x: Any,
        method: str = "linearized",
        link: str | None = None,
        samples: int | None = None,
        generator: torch.Generator | None = None,
        center: str | None = None,
        joint: bool = False,
    ) -> Prediction:
        """The mixture of the members' predictions at `x`, a `Prediction` of the same kind, or a `JointMixture`.

        The arguments are those of `Laplace.predict` and go to each member of a weight above 0, with one generator for
        all. What the members disagree on counts as epistemic. `samples` is a number: members have weights of their own.
        """
        if isinstance(samples, Mapping):
            raise InputError("A Mixture draws the weights of each member itself: give samples as a number.")
        counted = self.weights > 0
        members = [la for la, counts in zip(self.members, counted.tolist(), strict=True) if counts]
        predictions = [la.predict(x, method, link, samples, generator, center, joint) for la in members]
        log_weights = self.weights[counted].log()
        if joint:
            return JointMixture(tuple(cast(JointMember, prediction) for prediction in predictions), log_weights)
        return mix(predictions, log_weights)

    def log_evidence(self) -> Tensor:
        """`log Σ_m w_m p(D|M_m)`: a 0-d float64 tensor.

        w are the given weights; equal ones where the weights are the evidence's, whose prior they are.
        """
        check_comparable(self._named())
        return (log_evidences(self.members) + self._prior.log()).logsumexp(0)

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        weights = ", ".join(f"{weight:.3g}" for weight in self.weights.tolist())
        return f"Mixture of {len(self)} {self.members[0].likelihood.name} posteriors, weights [{weights}]"


def _checked(members: Sequence[Laplace]) -> list[Laplace]:
    """The members as they are now, each known to be fitted and of the same likelihood."""
    if isinstance(members, Laplace) or not members:
        raise InputError("A Mixture needs a list of fitted Laplace objects: Mixture([la1, la2, ...]).")
    for number, la in enumerate(members):
        if not isinstance(la, Laplace):
            raise InputError(f"Member {number} of the Mixture is a {type(la).__name__}, not a Laplace.")
        if not la.fitted:
            raise NotFittedError(f"Member {number} of the Mixture has no posterior yet: call la.fit(loader) first.")
        if _family(la) != _family(members[0]):
            raise InputError(
                f"The members of a Mixture must have the same likelihood: member 0 has {members[0].likelihood}, member "
                f"{number} has {la.likelihood}."
            )
    return [la.at() for la in members]


def _family(la: Laplace) -> dict[str, Any]:
    """What the likelihood says but for the noise, which may be the member's own, and how it counts dimensions."""
    return {key: value for key, value in la.likelihood.config().items() if key not in ("noise", "ratios", "dim")}
