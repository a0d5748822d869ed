"""The experiment's own tool: a group is scaled, and the network stays the same function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from experiments.linearized_evidence.measure import scaled
from experiments.linearized_evidence.networks import Transformer, Unet, mlp, resnet
from lapwing import Laplace
from lapwing.diagnostics import diagnose

BUILDS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(256, 5, 5, 10), "resnet": lambda: resnet(True), "transformer": Transformer, "u-net": Unet,
}  # fmt: skip


@pytest.mark.parametrize("factor", [0.1, 10.0])
@pytest.mark.parametrize("name", BUILDS)
def test_scaled_network_is_the_same_function(name, factor):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BUILDS[name]().double()
        x = torch.randn(6, 1, 16, 16, dtype=torch.float64)
        for _ in range(3):  # running statistics
            model(x)
    model.eval()
    weights = [key for key, value in model.named_parameters() if value.dim() > 1]
    data = [(x, torch.zeros_like(model(x)))]
    la = Laplace(model, "regression", "diag", curvature="rademacher", weights=weights, progress=False).fit(data)
    groups = [group for group in diagnose(la).groups if group.scale_free]
    assert groups
    for group in groups:
        other = scaled(model, group.parameters, factor, x)
        for key, value in other.named_parameters():
            expected = model.get_parameter(key) * (factor if key in group.parameters else 1.0)
            assert torch.equal(value, expected)
        fresh = torch.randn(4, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(other(fresh), model(fresh), rtol=1e-9, atol=1e-9)
