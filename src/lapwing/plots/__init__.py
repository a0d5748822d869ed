"""Pictures: functions that take `ax=None` and return matplotlib axes (`pip install "lapwing[plot]"`)."""

from lapwing.plots.diagnosis import diagnosis
from lapwing.plots.tuning import tuning

__all__ = ["diagnosis", "tuning"]
