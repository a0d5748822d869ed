"""Options of `predict` that are given by name, for later calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lapwing.errors import choose
from lapwing.predictive.prediction import Prediction


def predict_options(predict: Callable[..., Prediction], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`given` as keyword arguments, once it is known that `predict` takes each; `x` and `joint` are not to be given."""
    known = {*inspect.signature(predict).parameters} - {"x", "joint"}
    return {choose(name, known, "option of predict"): value for name, value in (given or {}).items()}
