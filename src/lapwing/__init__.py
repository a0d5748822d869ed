"""Lapwing: Laplace approximations for any PyTorch network."""

from lapwing import diagnostics, priors
from lapwing.errors import ConvergenceWarning, FileError, InputError, LapwingError, NotFittedError, TuningWarning
from lapwing.laplace import Laplace
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian
from lapwing.predictive.prediction import Prediction
from lapwing.priors import FactoredDamping, GaussianPrior
from lapwing.version import __version__

__all__ = [
    "Bernoulli", "Categorical", "ConvergenceWarning", "FactoredDamping", "FileError", "Gaussian", "GaussianPrior",
    "InputError", "Laplace", "LapwingError", "NotFittedError", "Prediction", "TuningWarning", "__version__",
    "diagnostics", "priors",
]  # fmt: skip
