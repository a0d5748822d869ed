"""Modules that do unusual things on the way from input to output, each with its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.zoo import LABELS, Architecture, labels


class Siamese(nn.Module):
    """One encoder for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.head = nn.Linear(6, LABELS)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = self.encoder(left), self.encoder(right)
        return self.head(torch.cat([(left - right).abs(), left * right], dim=1))


class Dictionary(nn.Module):
    """Keyword arguments in, a dict with logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, LABELS)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        hidden = torch.tanh(self.body(x if scale is None else x * scale))
        return {"hidden": hidden, "logits": self.head(hidden), "loss": None}


class Decoder(nn.Module):
    """Transposed convolutions up to a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 8)
        self.up = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1)
        self.out = nn.ConvTranspose2d(3, LABELS, 2, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.start(x)).view(-1, 2, 2, 2)
        return self.out(torch.tanh(self.up(x))).movedim(1, -1)


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(4, 4, 3)
        self.head = nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(x, x.flip(1))))


class Einsum(nn.Module):
    """Raw parameters in einsum and matmul, on the left and on the right."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(2, 4, 3) / 2)
        self.left = nn.Parameter(torch.randn(3, 2) / 2)
        self.right = nn.Parameter(torch.randn(3, LABELS) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(torch.einsum("nd,hdo->nho", x, self.heads))  # [N, 2, 3]
        return (self.left @ x).mean(1) @ self.right


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class Parametrized(nn.Module):
    """Weight norm, spectral norm, an orthogonal and a symmetric weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        parametrizations.weight_norm(self.layers[0])
        parametrizations.spectral_norm(self.layers[1])
        parametrizations.orthogonal(self.layers[2])
        parametrize.register_parametrization(self.layers[3], "weight", Symmetric())
        self.head = nn.Linear(4, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class OldNorms(nn.Module):
    """The hooks of `torch.nn.utils`, which set the weight anew before every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Conv1d(2, 3, 3))
        self.second = nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).mean(2))


class Recurrent(nn.Module):
    """Two directions, two layers, batch first or not, and packed sequences."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], packed: bool = False) -> None:
        super().__init__()
        self.cell = kind(2, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(6, LABELS)
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return self.head(self.cell(x)[0].mean(1))
        lengths = x[:, :, 0].gt(-9).sum(1).cpu()
        given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(self.cell(given)[0], batch_first=True, total_length=x.shape[1])
        return self.head(outputs.sum(1))


class Cells(nn.Module):
    """A recurrence written out, one step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 4), nn.Linear(4, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 4)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class Bag(nn.Module):
    def __init__(self, mode: str, sparse: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4, mode=mode, sparse=sparse)
        self.head = nn.Linear(4, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(ids)))


class Padded(nn.Module):
    """An embedding with a padding row, scaled by frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.head = nn.Linear(4, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids).sum(1)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 4))
        self.head = nn.Linear(4, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.block, x, use_reentrant=False)
        assert isinstance(hidden, Tensor)
        return self.head(x + hidden)


class InPlace(nn.Module):
    """Activations, additions and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu_(self.first(x), 0.1)
        y = self.second(x)
        y += x
        y = functional.relu_(y)
        canvas = torch.zeros_like(y)
        canvas[:, :, 1:] = y[:, :, :-1]
        return self.head(canvas.mean((2, 3)))


class Skipping(nn.Module):
    """Blocks that an example takes or not, by its own values."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, LABELS)
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.each:
                chosen = x[:, i] > 0
                x = x.index_put((chosen,), torch.tanh(block(x[chosen])))
            else:
                x = torch.where(x[:, i : i + 1] > 0, torch.tanh(block(x)), x)
        return self.head(x)


class Experts(nn.Module):
    """Every token goes to one of two experts and comes back, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Linear(2, 4) for _ in range(2))
        self.head = nn.Linear(4, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 2)
        weights, chosen = self.gate(flat).softmax(1).max(1)
        mixed = flat.new_zeros(flat.shape[0], 4)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            mixed = mixed.index_add(0, rows, weights[rows, None] * torch.tanh(expert(flat[rows])))
        return self.head(mixed.view(*x.shape[:2], 4).mean(1))


class Fourier(nn.Module):
    """Complex numbers on the way: a learned filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(2, 3, 2) / 2)
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        frequencies = torch.fft.rfft(x, dim=1)  # [N, 3]
        filtered = frequencies.unsqueeze(1) * torch.view_as_complex(self.filter)
        return self.head(torch.tanh(torch.fft.irfft(filtered, n=4, dim=2)).sum(1))


class ComplexWeight(nn.Module):
    """A complex layer written as two real ones, its magnitude read out."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Linear(4, 3), nn.Linear(4, 3)
        self.head = nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.complex(self.real(x), self.imaginary(x)).abs())


class Normed(nn.Module):
    """Every kind of normalization with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4),
            nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.PReLU(),
            nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.Hardswish(),
            nn.LayerNorm((4, 2, 2)), nn.Flatten(), nn.RMSNorm(16),
        )  # fmt: skip
        self.head = nn.Linear(16, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Transformer(nn.Module):
    """torch's own encoder and decoder, sequence first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.batch_first = nn.Linear(2, 4), batch_first
        self.start = nn.Parameter(torch.randn(2, 4) / 2)
        self.transformer = nn.Transformer(4, 2, 1, 1, 8, batch_first=batch_first)
        self.head = nn.Linear(4, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x, queries = self.embed(x), self.start.expand(x.shape[0], -1, -1)
        if not self.batch_first:
            x, queries = x.transpose(0, 1), queries.transpose(0, 1)
        return self.head(self.transformer(x, queries).mean(1 if self.batch_first else 0))


class Encoder(nn.Module):
    """torch's encoder, which has a fast path of its own in eval mode, with padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=False)
        self.embedding = nn.Embedding(7, 4)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(4, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        padding[:, 0] = False
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=padding)[:, 0])


class Resolutions(nn.Module):
    """One convolution at three resolutions, one head for all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        total = self.head(torch.tanh(self.shared(x)).mean((2, 3)))
        for _ in range(2):
            x = functional.avg_pool2d(x, 2)
            total = total + self.head(torch.tanh(self.shared(x)).mean((2, 3)))
        return total


class Hyper(nn.Module):
    """A network that makes the weights of another, one set for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.head = nn.Linear(4, 12), nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.make(x).view(-1, 3, 4)
        return self.head(torch.tanh(weights @ x.unsqueeze(2)).squeeze(2))


class Scan(nn.Module):
    """A state space by a loop with a raw matrix and its exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.into = nn.Parameter(torch.randn(3, 3) / 3), nn.Linear(2, 3)
        self.head = nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        step = torch.linalg.matrix_exp(self.rate - torch.eye(3).to(x))
        state = x.new_zeros(x.shape[0], 3)
        for given in x.unbind(1):
            state = state @ step.T + self.into(given)
        return self.head(torch.tanh(state))


class Equilibrium(nn.Module):
    """A fixed point, found by iterating one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.into, self.head = nn.Linear(3, 3, bias=False), nn.Linear(4, 3), nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        given = self.into(x)
        state = torch.zeros_like(given)
        for _ in range(8):
            state = torch.tanh(self.inner(state) / 2 + given)
        return self.head(state)


class Attention(nn.Module):
    """Cross attention with keys and values of other widths than the query's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=2, vdim=2, batch_first=True, add_bias_kv=True)
        self.query, self.head = nn.Parameter(torch.randn(1, 2, 4) / 2), nn.Linear(4, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.query.expand(x.shape[0], -1, -1), x, x)[0].mean(1))


class Doubled(torch.autograd.Function):
    """An operation with a backward pass of its own, which vmap does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(Doubled.apply(self.first(x))))


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, LABELS)))  # type: ignore[return-value]


def kinds() -> nn.Module:
    """Activations with weights, dropout, and a residual around a bottleneck."""
    return nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Dropout(0.5), nn.Linear(6, 4), nn.GLU(), nn.Linear(2, LABELS))


Make = Callable[[int, torch.Generator], Tensor]


def floats(*shape: int) -> Make:
    return lambda n, generator: torch.randn(n, *shape, generator=generator)


def ids(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(7, (n, 4), generator=generator)


def ragged(n: int, generator: torch.Generator) -> Tensor:
    """Sequences of 2, 3, 4, 2, … steps; the rest is -10."""
    x = torch.randn(n, 4, 2, generator=generator).clamp(-8, 8)
    return x.masked_fill((torch.arange(4) >= (2 + torch.arange(n) % 3)[:, None])[..., None], -10.0)


def odd(build: Callable[[], nn.Module], *makes: Make, classes: tuple[int, ...] = ()) -> Architecture:
    def batch(n: int, generator: torch.Generator) -> Any:
        target = torch.randint(LABELS, (n, *classes), generator=generator) if classes else labels(n, generator)
        return (*(make(n, generator) for make in makes), target)

    return Architecture(build, batch)


_VECTOR, _SEQUENCE, _IMAGE = floats(4), floats(4, 2), floats(2, 4, 4)

ODDITIES: dict[str, Architecture] = {
    "siamese": odd(Siamese, _VECTOR, _VECTOR),
    "dictionary": Architecture(
        Dictionary, lambda n, g: {"x": _VECTOR(n, g), "scale": _VECTOR(n, g), "labels": labels(n, g)}
    ),
    "decoder": odd(Decoder, _VECTOR, classes=(5, 5)),
    "bilinear": odd(Bilinear, _VECTOR),
    "einsum": odd(Einsum, _VECTOR),
    "parametrized": odd(Parametrized, _VECTOR),
    "old-norms": odd(OldNorms, floats(2, 5)),
    "lstm": odd(lambda: Recurrent(nn.LSTM), _SEQUENCE),
    "gru": odd(lambda: Recurrent(nn.GRU), _SEQUENCE),
    "lstm-packed": odd(lambda: Recurrent(nn.LSTM, packed=True), ragged),
    "gru-cell": odd(Cells, _SEQUENCE),
    "bag-sum": odd(lambda: Bag("sum"), ids),
    "bag-mean": odd(lambda: Bag("mean"), ids),
    "bag-max": odd(lambda: Bag("max"), ids),
    "padded-embedding": odd(Padded, ids),
    "checkpointed": odd(Checkpointed, _VECTOR),
    "in-place": odd(InPlace, _IMAGE),
    "skipping": odd(lambda: Skipping(each=False), _VECTOR),
    "skipping-each": odd(lambda: Skipping(each=True), _VECTOR),
    "experts": odd(Experts, _SEQUENCE),
    "fourier": odd(Fourier, _VECTOR),
    "complex": odd(ComplexWeight, _VECTOR),
    "normed": odd(Normed, _IMAGE),
    "transformer": odd(lambda: Transformer(batch_first=False), _SEQUENCE),
    "transformer-batch-first": odd(lambda: Transformer(batch_first=True), _SEQUENCE),
    "encoder-padded": odd(Encoder, ids),
    "cross-attention": odd(Attention, _SEQUENCE),
    "resolutions": odd(Resolutions, _IMAGE),
    "hypernetwork": odd(Hyper, _VECTOR),
    "matrix-exponential": odd(Scan, _SEQUENCE),
    "equilibrium": odd(Equilibrium, _VECTOR),
    "custom-function": odd(Custom, _VECTOR),
    "compiled": odd(compiled, _VECTOR),
    "activations": odd(kinds, _VECTOR),
}
