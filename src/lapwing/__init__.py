"""Lapwing: Laplace approximations for any PyTorch network."""

from lapwing import priors
from lapwing.augmentation import Averaged
from lapwing.comparison import Comparison, compare
from lapwing.errors import (
    ComparisonWarning,
    ConvergenceWarning,
    FileError,
    IndefiniteWarning,
    InputError,
    LapwingError,
    NotFittedError,
    PruningWarning,
    TuningWarning,
)
from lapwing.laplace import Laplace
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    CustomLikelihood,
    Gaussian,
    Heteroscedastic,
    MeanVariance,
    Poisson,
)
from lapwing.mixture import Mixture
from lapwing.predictive.prediction import Prediction
from lapwing.priors import FactoredDamping, GaussianPrior
from lapwing.pruning import Pruning, prune
from lapwing.training import EvidenceInTheLoop, train_with_evidence
from lapwing.version import __version__

__all__ = [
    "Averaged", "Bernoulli", "Categorical", "Comparison", "ComparisonWarning", "ConvergenceWarning",
    "CustomLikelihood", "EvidenceInTheLoop", "FactoredDamping", "FileError", "Gaussian", "GaussianPrior",
    "Heteroscedastic", "IndefiniteWarning", "InputError", "Laplace", "LapwingError", "MeanVariance", "Mixture",
    "NotFittedError", "Poisson", "Prediction", "Pruning", "PruningWarning", "TuningWarning", "__version__",
    "compare", "priors", "prune", "train_with_evidence",
]  # fmt: skip
