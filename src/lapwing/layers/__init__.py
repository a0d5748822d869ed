"""How each kind of layer reads as `(a, g)`. A new kind is a new file and a line in `RULES`."""

from collections.abc import Callable
from typing import Any

from lapwing.layers.convolution import Convolution
from lapwing.layers.linear import Linear
from lapwing.layers.rule import Call, ExampleAxis, Rule

RULES: dict[Callable[..., Any], Rule] = {
    function: rule for rule in (Linear(), Convolution()) for function in rule.functions
}

__all__ = ["RULES", "Call", "ExampleAxis", "Rule"]
