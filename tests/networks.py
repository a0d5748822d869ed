"""Tiny networks of every kind, in float64, with data for each likelihood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

OUTPUTS = 3


class Masked(nn.Module):
    """Three logits, of which the last is always impossible."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).masked_fill(torch.tensor([False, False, True]), -torch.inf)


class Cnn(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding="same", dilation=2, groups=groups)
        self.second = nn.Conv2d(4, 2, 2, stride=2, padding=1, bias=False, groups=groups)
        self.head = nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(x), inplace=True)
        x = torch.tanh(self.second(x))
        return self.head(functional.adaptive_avg_pool2d(x, 2).flatten(1))


class Conv1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, stride=2, padding=2, padding_mode="circular")
        self.head = nn.Linear(3, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x.flatten(2))).mean(-1))


class Conv3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, (2, 1, 2), stride=(1, 2, 1), padding=(0, 1, 1), dilation=(1, 1, 2))
        self.head = nn.Linear(2, OUTPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x.unsqueeze(1))).mean((2, 3, 4)))


class Tied(nn.Module):
    """One linear layer used twice, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.head = nn.Linear(3, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class TiedEmbedding(nn.Module):
    """An embedding whose weight is also the output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(OUTPUTS, 2)
        self.mix = nn.Linear(2, 2)
        self.head = nn.Linear(2, OUTPUTS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens).sum(1))))


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, OUTPUTS)
        with torch.no_grad():
            self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
            self.norm.weight.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.linear(x)))))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cell = kind(2, 2)  # [L, N, D]
        self.head = nn.Linear(2, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.transpose(0, 1))[0][-1])


class Attention(nn.Module):
    """Sequence first, a position embedding without example axis, layer norm, a raw parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(3, 1, 4) / 2)
        self.project = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) + self.project(self.position)  # project: a use that is free of examples
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.gain * self.head(x.mean(0))


class SequenceFirst(nn.Module):
    """Linear layers on `[L, N, D]` and `[L·N, D]`, read out at the first position only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 3)
        self.head = nn.Linear(3, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.transpose(0, 1)))  # [L, N, 3]
        length, examples, width = x.shape
        x = torch.tanh(self.second(x.reshape(-1, width))).view(length, examples, width)
        return self.head(x.cumsum(0)[1])


class Odd(nn.Module):
    """Transposed convolution, group norm, a weight that is normalized, and one that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(2, 2, 3, stride=2)
        self.norm = nn.GroupNorm(1, 2)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(2, OUTPUTS))
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.up(x.transpose(1, 2)))).mean(-1))


class Branching(nn.Module):
    """A branch on the data: vmap refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(torch.tanh(x) if float(x.detach().abs().max()) > -1 else x)


class Upsampling(nn.Module):
    """Transposed convolutions in one, two and three dimensions, with every option."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1)
        self.grouped = nn.ConvTranspose2d(2, 4, (2, 3), stride=(3, 1), padding=(1, 0), groups=2, dilation=(2, 1))
        self.solid = nn.ConvTranspose3d(1, 1, 2, stride=(1, 2, 1), bias=False)
        self.head = nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.tanh(self.flat(x.flatten(2)))
        grouped = torch.tanh(self.grouped(x))
        solid = torch.tanh(self.solid(x.unsqueeze(1)))
        return self.head(torch.cat([flat.mean(2), grouped.mean((2, 3)), solid.mean((2, 3, 4))], 1))


class Norms(nn.Module):
    """Every norm with statistics of its own, some without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.group = nn.GroupNorm(2, 4)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.running = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.batch = nn.BatchNorm2d(4)
        self.layer = nn.LayerNorm((2, 3), bias=False)
        self.rms = nn.RMSNorm(3)
        self.widen = nn.Conv2d(2, 4, 1)
        self.head = nn.Linear(4, OUTPUTS)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(0.5, 1.5)
            self.batch.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            self.batch.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.batch(torch.tanh(self.group(self.widen(x)))))
        x = torch.tanh(self.running(torch.sin(self.instance(x))))
        x = self.rms(torch.tanh(self.layer(x[:, :, :2, :3])))
        return self.head(x.mean((2, 3)) / 4)


class Scaled(nn.Module):
    """Raw parameters that scale, shift and stand in front: layer scale, position embedding, class token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 2) / 2)
        self.position = nn.Parameter(torch.randn(1, 4, 2) / 2)
        self.gamma = nn.Parameter(torch.rand(2) + 0.5)
        self.shift = nn.Parameter(torch.rand(2, 1))
        self.mix = nn.Linear(2, 2)
        self.head = nn.Linear(2, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        x = x + self.gamma * torch.tanh(self.mix(x))
        x = torch.tanh(x.transpose(1, 2)).add(self.shift).transpose(1, 2)
        return self.head(torch.tanh(x).mean(1))


class Tokens(nn.Module):
    """Embeddings with padding, and of positions without example axis."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 2, padding_idx=1)
        self.positions = nn.Embedding(6, 2)
        self.head = nn.Linear(2, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]).unsqueeze(0))
        return self.head(torch.tanh(hidden).sum(1))


class Bags(nn.Module):
    """Bags of embeddings, with padding, and with offsets and weights. torch cannot differentiate them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(4, 2, mode="mean", padding_idx=2)
        self.ragged = nn.EmbeddingBag(4, 2, mode="sum", include_last_offset=True)
        self.head = nn.Linear(4, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        examples, length = tokens.shape
        offsets = torch.arange(examples + 1) * length
        weights = torch.linspace(0.5, 1, length, dtype=self.head.weight.dtype).repeat(examples)
        ragged = self.ragged(tokens.flatten(), offsets, per_sample_weights=weights)
        return self.head(torch.cat([torch.tanh(self.mean(tokens)), torch.tanh(ragged)], 1))


class CrossAttention(nn.Module):
    """Packed and separate projections, batch first or not, masks, added keys, as many queries as keys or not."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.MultiheadAttention(2, 2, batch_first=True)
        self.separate = nn.MultiheadAttention(2, 1, kdim=4, vdim=2, add_bias_kv=True)
        self.head = nn.Linear(2, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = x[..., :2], x[:, :2, 2:]
        mask = torch.tensor([[False, True], [False, False], [False, False]])
        hidden, _ = self.packed(queries, keys, keys, attn_mask=mask, need_weights=False)
        hidden = torch.tanh(hidden).transpose(0, 1)
        hidden, _ = self.separate(hidden, x.transpose(0, 1), keys[:, [0, 1, 1]].transpose(0, 1))
        return self.head(hidden.mean(0))


class Products(nn.Module):
    """Weights that enter by `matmul`, `addmm` and `einsum`, transposed, in groups, and on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = nn.Parameter(torch.randn(4) / 2)
        self.heads = nn.Parameter(torch.randn(4, 2, 2) / 2)
        self.grouped = nn.Parameter(torch.randn(2, 2, 3) / 2)
        self.left = nn.Parameter(torch.randn(2, 3) / 2)
        self.last = nn.Parameter(torch.randn(6, OUTPUTS) / 2)

    def forward(self, x: Tensor) -> Tensor:
        examples, length, width = x.shape
        x = torch.tanh(torch.addmm(self.bias, x.reshape(-1, width), self.first)).view(examples, length, width)
        x = torch.tanh(torch.einsum("bld,dhk->bhlk", x, self.heads))
        x = torch.tanh(torch.einsum("...hlk,hkj->...lhj", x, self.grouped))  # [N, L, 2, 3]
        x = torch.tanh(self.left @ x.flatten(2))
        return torch.nn.functional.linear(x.mean(1), self.last.t())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, OUTPUTS))


def vectors(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 3, generator=generator, dtype=torch.float64)


def sequences(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 3, 2, generator=generator, dtype=torch.float64)


def images(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 2, 4, 4, generator=generator, dtype=torch.float64)


def volumes(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 3, 4, 4, generator=generator, dtype=torch.float64)


def wide_sequences(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 3, 4, generator=generator, dtype=torch.float64)


def tokens(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(OUTPUTS, (n, 4), generator=generator)


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], Tensor]


NETWORKS: dict[str, Network] = {
    "mlp": Network(mlp, vectors),
    "cnn": Network(Cnn, images),
    "grouped-cnn": Network(lambda: Cnn(groups=2), images),
    "conv1d": Network(Conv1d, images),
    "conv3d": Network(Conv3d, volumes),
    "tied": Network(Tied, vectors),
    "tied-embedding": Network(TiedEmbedding, tokens),
    "batchnorm": Network(BatchNormed, vectors),
    "lstm": Network(lambda: Recurrent(nn.LSTM), sequences),
    "gru": Network(lambda: Recurrent(nn.GRU), sequences),
    "attention": Network(Attention, wide_sequences),
    "sequence-first": Network(SequenceFirst, sequences),
    "odd": Network(Odd, sequences),
    "branching": Network(Branching, vectors),
    "upsampling": Network(Upsampling, images),
    "norms": Network(Norms, images),
    "scaled": Network(Scaled, sequences),
    "tokens": Network(Tokens, tokens),
    "bags": Network(Bags, tokens),
    "cross-attention": Network(CrossAttention, wide_sequences),
    "products": Network(Products, wide_sequences),
}


def make(name: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return NETWORKS[name].build().double()


def inputs(name: str, n: int, seed: int = 1) -> Tensor:
    return NETWORKS[name].data(n, torch.Generator().manual_seed(seed))


def targets(likelihood: str, n: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if likelihood == "classification":
        return torch.randint(OUTPUTS, (n,), generator=generator)
    if likelihood == "binary":
        return torch.randint(2, (n, OUTPUTS), generator=generator).double()
    return torch.randn(n, OUTPUTS, generator=generator, dtype=torch.float64)


def batches(x: Tensor, y: Tensor, *sizes: int) -> list[Any]:
    return list(zip(x.split(sizes), y.split(sizes), strict=True))
