"""Pictures: functions that take `ax=None` and return matplotlib axes (`pip install "lapwing[plot]"`)."""

from lapwing.plots.comparison import comparison
from lapwing.plots.decisions import learning_curves, ood_alarm, set_sizes
from lapwing.plots.diagnosis import diagnosis
from lapwing.plots.predictions import (
    entropy_histogram,
    inverse_ecdf,
    regression_bands,
    reliability_diagram,
    risk_coverage,
)
from lapwing.plots.training import training_history
from lapwing.plots.tuning import tuning

__all__ = [
    "comparison", "diagnosis", "entropy_histogram", "inverse_ecdf", "learning_curves", "ood_alarm",
    "regression_bands", "reliability_diagram", "risk_coverage", "set_sizes", "training_history", "tuning",
]  # fmt: skip
