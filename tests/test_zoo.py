"""Networks nobody here wrote, and odd ones: every step works without an option, and equals brute force."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.batches import Inputs, unpack
from tests import oracles
from tests.oddities import ODDITIES
from tests.test_untouched import check, state
from tests.zoo import TRANSFORMERS

ZOO = TRANSFORMERS | ODDITIES
# For `make test`, a mechanism each: shared layers, transposed weights, rotary attention, scans, windows,
# depthwise convolutions, weight norm, relative positions; then the odd ones.
SAMPLE = (
    "albert", "gpt2", "llama", "mamba", "swin", "convnext", "wav2vec2", "t5-encoder",
    "experts", "skipping-each", "in-place", "lstm-packed", "parametrized", "transformer", "fourier",
)  # fmt: skip
# Networks that compute norms, rotations or positions in float32 whatever the dtype of their weights.
FLOAT32_INSIDE = (
    "deberta", "diffllama", "esm", "funnel", "gemma", "gemma2", "gpt-neo", "gptj", "llama", "llama-language",
    "longformer", "mamba", "mamba2", "mistral", "qwen2", "qwen3", "recurrent-gemma", "rwkv", "switch-encoder", "t5",
    "t5-encoder", "umt5-gated-encoder", "xlm", "mixtral", "qwen2-moe", "gpt-oss", "deepseek-v3", "jamba",
)  # fmt: skip
# Canine masks with the least float64 in float32, which is -inf.
NO_FLOAT64 = ("canine",)
# torch 2.13 differentiates batch_norm wrongly for a batch of one in a transposed layout, so hooks see wrong gradients.
WRONG_ALONE = ("cvt", "levit")
LARGEST = 2048  # parameters of a block that is written out as a matrix

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")  # nn.Transformer's own


def names(networks: Iterable[str]) -> list[Any]:
    return [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.zoo) for name in networks]


def make(name: str) -> tuple[nn.Module, list[Any], Any]:
    """The network, two batches of different sizes to fit, and one to predict."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ZOO[name].build()
    generator = torch.Generator().manual_seed(1)
    first, second, last = (ZOO[name].batch(n, generator) for n in (3, 2, 2))
    return network, [first, second], last


def without_target(batch: Any) -> Any:
    return batch if isinstance(batch, dict) else batch[:-1]


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("name", names(ZOO))
def test_every_step_without_an_option(name: str, structure: str) -> None:
    network, batches, last = make(name)
    Numbered(network.eval(), [last])(torch.arange(2))  # some set hooks of their own on the first call
    network.train()
    x, before = without_target(last), state(network)
    la = Laplace(network, "classification", structure).fit(batches)
    assert math.isfinite(la.log_evidence())
    linearized = la.predict(x)
    check(before, state(network), name)
    sampled = la.predict(x, method="sampled", samples=3, generator=torch.Generator().manual_seed(0))
    for prediction in (linearized, sampled):
        probs: Tensor = prediction.probs  # type: ignore[attr-defined]
        assert torch.isfinite(probs).all()
        torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:-1]))
    torch.set_rng_state(before["random"])  # some draw numbers in every forward pass
    check(before, state(network), name)


@pytest.mark.parametrize("name", names(name for name in ZOO if name not in NO_FLOAT64))
def test_against_brute_force(name: str) -> None:
    """diag, Kronecker factors, dense blocks and predictive covariance in float64, from loops of plain autograd."""
    network, batches, last = make(name)
    network, batches, last = network.double().eval(), [doubled(batch) for batch in batches], doubled(last)
    if hasattr(network, "set_experts_implementation"):
        network.set_experts_implementation("eager")  # type: ignore[operator]  # the default has no float64
    tolerance = 1e-5 if name in FLOAT32_INSIDE else 1e-8
    examples, targets = Numbered(network, batches), torch.cat([unpack(batch, "")[1] for batch in batches])
    outputs = examples(torch.arange(len(targets))).detach()
    known, at_last = jacobian(examples), jacobian(Numbered(network, [last]))
    for structure in ("diag", "kron"):
        la = Laplace(network, "classification", structure).fit(batches)
        middle = oracles.output_hessians(la.likelihood, outputs, targets)
        rows, at_x = (torch.cat([b.pack(values) for b in la.curvature.blocks], dim=-1) for values in (known, at_last))
        covariance = torch.zeros(*at_x.shape[:2], at_x.shape[1], dtype=torch.float64)
        start = 0
        for block in la.curvature.blocks:
            part = slice(start, start := start + block.size)
            own, here, accumulator = rows[..., part], at_x[..., part], block.accumulator
            if accumulator.kind == "diag":
                found = accumulator.decompose(None).eigenvalues.flatten()
                close(found, torch.einsum("nci,ncd,ndi->i", own, middle, own), tolerance)
                covariance += torch.einsum("nci,i,ndi->ncd", here, 1 / (1 + found), here)
                continue
            if block.size > LARGEST:
                continue
            matrix = accumulator.matrix()
            if accumulator.kind == "dense":
                close(matrix, torch.einsum("nci,ncd,ndj->ij", own, middle, own), tolerance)
            elif not own.any():
                assert not matrix.any()
            elif (
                block.layers[0].path in HOOKED
                and name not in (*WRONG_ALONE, *UNCALLED)
                and (module := plain_module(network, block.name)) is not None
            ):
                close(matrix, factors(la, examples, module, targets), tolerance)
            inverse = torch.linalg.inv(matrix + torch.eye(block.size, dtype=torch.float64))
            covariance += torch.einsum("nci,ij,ndj->ncd", here, inverse, here)
        if max(block.size for block in la.curvature.blocks) <= LARGEST or structure == "diag":
            close(
                la.latent(without_target(last)).covariance, covariance, 100 * tolerance
            )  # H + I can be ill-conditioned


class Numbered(nn.Module):
    """A network as a function of the numbers of its examples: all of them in their batches, or one alone."""

    def __init__(self, network: nn.Module, batches: list[Any]) -> None:
        super().__init__()
        self.network, self.batches, self.examples = network, list[Inputs](), list[Inputs]()
        for batch in batches:
            inputs, target = unpack(batch, "")
            split = inputs.split(len(target))
            self.batches.append(inputs)
            self.examples += [split.part(n, n + 1) for n in range(len(target))]

    def forward(self, numbers: Tensor) -> Tensor:
        chosen = self.batches if len(numbers) == len(self.examples) else [self.examples[n] for n in numbers]
        with torch.compiler.set_stance("force_eager"):
            returned = [self.network(*inputs.args, **inputs.kwargs) for inputs in chosen]
        return torch.cat([value["logits"] if isinstance(value, dict) else value for value in returned])


def doubled(batch: Any) -> Any:
    def convert(value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value

    if isinstance(batch, dict):
        return {key: convert(value) for key, value in batch.items()}
    return tuple(convert(value) for value in batch)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    # What is 0 but for rounding (keys of attention, by the invariance of softmax) has no relative accuracy.
    size = max(float(expected.abs().max()), 1e-30)
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance * size)


def jacobian(examples: Numbered) -> dict[str, Tensor]:
    """`{name: [N, D, *shape]}`, not remembered: the data are no part of what the oracle would know it by."""
    names = [name for name, parameter in examples.named_parameters() if parameter.requires_grad]
    found = oracles._jacobian(examples, torch.arange(len(examples.examples)), names)
    return {name.removeprefix("network."): values for name, values in found.items()}


UNCALLED = {"wavlm"}  # its attention passes the weights of its modules to a function
HOOKED = ("linear", "convolution")  # read from calls of modules, not of functions on their weights


def plain_module(network: nn.Module, name: str) -> nn.Module | None:
    """A linear layer or convolution of one group whose weight nobody else holds: a forward hook sees all of it."""
    module = dict(network.named_modules()).get(name)
    if type(module) not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) or getattr(module, "groups", 1) > 1:
        return None
    assert module is not None
    held = [weight for part in network.modules() for weight in part._parameters.values() if weight is module.weight]
    return module if len(held) == 1 else None


def factors(la: Laplace, examples: Numbered, module: nn.Module, targets: Tensor) -> Tensor:
    numbers = iter(range(len(targets)))

    def columns(outputs: Tensor) -> Tensor:
        n = next(numbers)
        found = la.likelihood.hessian_columns(outputs, targets[n : n + 1])
        return found.part(0, found.count)

    return oracles.kron_factors(examples, module, torch.arange(len(targets)), columns, reduce=False)


def test_the_zoo_is_large() -> None:
    assert len(TRANSFORMERS) >= 25
