"""How each kind of layer reads as `(a, g)`. A new kind is a new file and a line in `RULES`."""

from collections.abc import Callable
from typing import Any

from lapwing.layers.convolution import Convolution
from lapwing.layers.elementwise import Expansion, Scale, Shift
from lapwing.layers.embedding import Embedding, EmbeddingBag, TokenRule
from lapwing.layers.linear import Linear
from lapwing.layers.norm import ChannelNorm, FeatureNorm
from lapwing.layers.product import Product
from lapwing.layers.rule import Call, ExampleAxis, Layout, PairRule, RowRule, Rule
from lapwing.layers.transposed import TransposedConvolution

_ALL: tuple[Rule, ...] = (
    Linear(), Product(), Convolution(), TransposedConvolution(), Embedding(), EmbeddingBag(), FeatureNorm(),
    ChannelNorm(), Scale(), Shift(), Expansion(),
)  # fmt: skip
LONE_BIAS = Shift()
RULES: dict[Callable[..., Any], Rule] = {function: rule for rule in _ALL for function in rule.functions}

__all__ = ["LONE_BIAS", "RULES", "Call", "ExampleAxis", "Layout", "PairRule", "RowRule", "Rule", "TokenRule"]
