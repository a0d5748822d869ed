"""Likelihoods p(y|f). A new one is a new file and a line in `NAMES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lapwing.errors import FileError, InputError, choose
from lapwing.likelihoods.base import Likelihood, Statistics
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.custom import CustomLikelihood
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import Heteroscedastic
from lapwing.likelihoods.mean_variance import MeanVariance
from lapwing.likelihoods.poisson import Poisson

NAMES: dict[str, Callable[[], Likelihood]] = {
    "classification": Categorical,
    "regression": Gaussian,
    "binary": Bernoulli,
    "heteroscedastic": Heteroscedastic,
    "poisson": Poisson,
    "count": Poisson,
}
_KINDS: tuple[Any, ...] = (Categorical, Gaussian, Bernoulli, Heteroscedastic, MeanVariance, Poisson)
_FROM_CONFIG: dict[str, Callable[..., Likelihood]] = {kind.name: kind for kind in _KINDS}


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """A likelihood by name or as it is."""
    if isinstance(likelihood, str):
        return NAMES[choose(likelihood, NAMES, "likelihood")]()
    if isinstance(likelihood, type) or not hasattr(likelihood, "hessian_columns"):
        raise InputError(
            f"likelihood must be one of {', '.join(map(repr, NAMES))} or an instance such as "
            f"lapwing.Gaussian(noise=0.1), got {likelihood!r}."
        )
    return likelihood


def from_config(config: dict[str, Any]) -> Likelihood:
    """Build the likelihood that a file describes."""
    options = dict(config)
    name = options.pop("name")
    if name not in _FROM_CONFIG:
        raise FileError(
            f"The file was fitted with the likelihood {name!r}; pass it: Laplace.load(..., likelihood=...)."
        )
    return _FROM_CONFIG[name](**options)


__all__ = [
    "NAMES", "Bernoulli", "Categorical", "CustomLikelihood", "Gaussian", "Heteroscedastic", "Likelihood",
    "MeanVariance", "Poisson", "Statistics", "from_config", "resolve",
]  # fmt: skip
