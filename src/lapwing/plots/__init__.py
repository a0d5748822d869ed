"""Pictures: functions that take `ax=None` and return matplotlib axes (`pip install "lapwing[plot]"`)."""
