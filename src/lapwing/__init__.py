"""Lapwing: Laplace approximations for any PyTorch network."""

from lapwing import decisions, diagnostics, priors
from lapwing.augmentation import Averaged
from lapwing.comparison import Comparison, compare
from lapwing.distillation import Distillation, distill
from lapwing.ensemble import Ensemble
from lapwing.errors import (
    ComparisonWarning,
    ConvergenceWarning,
    DataWarning,
    ExportWarning,
    FileError,
    IndefiniteWarning,
    InputError,
    LapwingError,
    NotFittedError,
    PruningWarning,
    TuningWarning,
)
from lapwing.function_space import FunctionSpace
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
from lapwing.sampling import DrawnPosterior, sample_by_optimization
from lapwing.subnetwork import Subnetwork
from lapwing.training import EvidenceInTheLoop, train_with_evidence
from lapwing.version import __version__

__all__ = [
    "Averaged", "Bernoulli", "Categorical", "Comparison", "ComparisonWarning", "ConvergenceWarning",
    "CustomLikelihood", "DataWarning", "Distillation", "DrawnPosterior", "Ensemble", "EvidenceInTheLoop",
    "ExportWarning", "FactoredDamping", "FileError", "FunctionSpace", "Gaussian", "GaussianPrior", "Heteroscedastic",
    "IndefiniteWarning", "InputError", "Laplace", "LapwingError", "MeanVariance", "Mixture", "NotFittedError",
    "Poisson", "Prediction", "Pruning", "PruningWarning", "Subnetwork", "TuningWarning", "__version__", "compare",
    "decisions", "diagnostics", "distill", "priors", "prune", "sample_by_optimization", "train_with_evidence",
]  # fmt: skip
