"""Embeddings and bags of them: rows of the weight picked by tokens. One-hot vectors are never written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from lapwing.layers.rule import Call, ExampleAxis, Rule, bound
from lapwing.tokens import TokenPair, Tokens
from lapwing.views import Owner


class TokenRule(Rule):
    """A rule for weights `[V, D]` of which each position reads one row."""

    def tokens(self, call: Call, axis: ExampleAxis, examples: int) -> Tokens:
        """The rows that each position of each example reads."""
        ids = axis.first(call.input, examples).flatten(1)
        weights = call.options.get("weights")
        return Tokens(ids, None if weights is None else axis.first(weights, examples).flatten(1))

    def gradients(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        """Gradients at the output as `[K, N, R, D]`."""
        return axis.first(g, examples, skip=1).flatten(2, -2)

    def add_total(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int, weight: Tensor) -> None:
        """Add the gradient of the weight, summed over the examples, to `[V, D]`: to the rows of its tokens alone."""
        tokens, own = self.tokens(call, axis, examples), self.gradients(call, g.unsqueeze(0), axis, examples)
        TokenPair(tokens, own, len(weight)).add_total(weight.unsqueeze(0))


class Embedding(TokenRule):
    name = "embedding"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (functional.embedding,)

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        given = bound(function, args, kwargs)
        ids, w, padding = given["input"], given["weight"], given["padding_idx"]
        weight = owner(w)
        if weight is None or not weight.plain or given["max_norm"] is not None or given["scale_grad_by_freq"]:
            return None
        weights = None if padding is None else (ids != padding % w.shape[0]).to(w.dtype)
        return Call(ids, weight.name, None, (1, w.shape[0], w.shape[1]), {"weights": weights})

    def broadcast(self, call: Call, output: torch.Size) -> Call | None:
        if call.shape is None or output[-1] != call.shape[2]:
            return None
        weights = call.options["weights"]
        wide = None if weights is None else weights.expand(output[:-1])
        return replace(call, input=call.input.expand(output[:-1]), options={"weights": wide})

    def example_axes(self, call: Call, output: torch.Size) -> range:
        return range(len(output) - 1)


class EmbeddingBag(TokenRule):
    name = "embedding bag"
    functions: ClassVar[tuple[Callable[..., Any], ...]] = (functional.embedding_bag,)

    def read(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, owner: Owner
    ) -> Call | None:
        given = bound(function, args, kwargs)
        weight = owner(given["weight"])
        if weight is None or not weight.plain or given["max_norm"] is not None or given["mode"] not in ("sum", "mean"):
            return None
        ids, weights = _bags(given)
        vocabulary, width = given["weight"].shape
        return Call(ids, weight.name, None, (1, vocabulary, width), {"weights": weights})

    def example_axes(self, call: Call, output: torch.Size) -> range:
        return range(1)

    def gradients(self, call: Call, g: Tensor, axis: ExampleAxis, examples: int) -> Tensor:
        positions = call.input.shape[1]
        g = g.unsqueeze(2).expand(*g.shape[:2], positions, g.shape[2])  # every token of a bag sees the same
        return axis.first(g, examples, skip=1).flatten(2, 3)


def _bags(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens `[B, R]` of each bag, padded, and their weights, 0 where there is no token."""
    ids, each, offsets, padding = (given[name] for name in ("input", "per_sample_weights", "offsets", "padding_idx"))
    kept = torch.ones_like(ids, dtype=given["weight"].dtype)
    if padding is not None:
        kept = kept * (ids != padding % given["weight"].shape[0])
    weights = kept if each is None else each * kept
    if offsets is not None:
        last = given["include_last_offset"]
        starts = offsets[:-1] if last else offsets
        ends = offsets[1:] if last else torch.cat([offsets[1:], offsets.new_tensor([len(ids)])])
        longest = max(1, int((ends - starts).amax()))
        place = starts.unsqueeze(1) + torch.arange(longest, device=ids.device)
        inside = place < ends.unsqueeze(1)
        place = place.clamp(max=max(0, len(ids) - 1))
        ids, weights, kept = ids[place], weights[place] * inside, kept[place] * inside
    if given["mode"] == "mean":
        weights = weights / kept.sum(1, keepdim=True).clamp(min=1)
    return ids, weights
