"""Pictures: functions that take `ax=None` and return matplotlib axes (`pip install "lapwing[plot]"`)."""

from lapwing.plots.comparison import comparison

__all__ = ["comparison"]
