"""Pictures: functions that take `ax=None` and return matplotlib axes (`pip install "lapwing[plot]"`)."""

from lapwing.plots.comparison import comparison
from lapwing.plots.training import training_history

__all__ = ["comparison", "training_history"]
