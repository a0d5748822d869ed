"""A real trained network on real images: ResNet-20 on CIFAR-10.

Both come from the directory that LAPWING_DATA names: `cifar10_test.npz` there, and
`../weights/resnet20_cifar10.safetensors` beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.models import CifarResNet
from lapwing import Laplace
from tests import oracles

DATA = Path(os.environ.get("LAPWING_DATA", "data"))
IMAGES, WEIGHTS = DATA / "cifar10_test.npz", DATA.parent / "weights" / "resnet20_cifar10.safetensors"
pytestmark = pytest.mark.skipif(
    not (IMAGES.is_file() and WEIGHTS.is_file()),
    reason="needs cifar10_test.npz in LAPWING_DATA and resnet20_cifar10.safetensors in ../weights beside it",
)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    model = CifarResNet()
    model.load_state_dict({name.removeprefix("module."): value for name, value in load_file(WEIGHTS).items()})
    return model


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    with np.load(IMAGES) as data:
        x, y = torch.tensor(data["x_test"][:400]), torch.tensor(data["y_test"][:400]).long()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((x.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous(), y


def test_kron_of_all_weights(network: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    x, y = images
    la = Laplace(network, "classification", "kron", progress=False)
    la.fit([(x[:16], y[:16]), (x[16:32], y[16:32])])
    assert la.curvature.size == sum(parameter.numel() for parameter in network.parameters())
    assert {layer.path for block in la.curvature.blocks for layer in block.layers} == {
        "convolution",
        "linear",
        "norm",
    }
    la.tune_prior()
    assert la.tuning_ is not None
    assert la.tuning_.converged
    assert float(la.log_evidence()) > la.tuning_.start
    prediction = la.predict(x[32:48])
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(16))
    assert bool((prediction.epistemic >= 0).all())


def test_diagonal_variance_against_the_jacobian(network: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    """270,000 weights: the predictive variance equals Σ J²/(h + λ) with the Jacobian written out."""
    x, y = images
    la = Laplace(network, "classification", "diag", progress=False).fit([(x[:8], y[:8])])
    rows = oracles.packed_jacobian(la, x[8:10])
    curvature = torch.cat([block.accumulator.tensors()["sums"].flatten() for block in la.curvature.blocks])
    expected = (rows.square() / (curvature + 1)).sum(2)
    torch.testing.assert_close(la.latent(x[8:10], diagonal=True).covariance, expected, rtol=1e-4, atol=1e-6)


def test_last_layer_keeps_the_accuracy_and_tempers_the_confidence(
    network: nn.Module, images: tuple[Tensor, Tensor]
) -> None:
    x, y = images
    batches = list(zip(x[:200].split(100), y[:200].split(100), strict=True))
    la = Laplace(network, "classification", weights="last_layer", progress=False).fit(batches)
    prediction = la.predict(x[200:])
    plain = oracles.evaluate(network, x[200:]).softmax(1)
    assert float((plain.argmax(1) == y[200:]).float().mean()) > 0.88
    assert float((prediction.labels == y[200:]).float().mean()) > 0.88
    assert float(prediction.confidence.mean()) < float(plain.amax(1).mean())
