"""A fit against the sum of the fits of its batches."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from torch import nn

from lapwing import Laplace


def check_same(model: nn.Module, data: list[Any], structure: str = "kron", **options: Any) -> Laplace:
    """A fit is the sum of the fits of its batches, draw by draw."""
    whole = Laplace(model, "classification", structure, **options)
    whole.fit(data, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    alone = [Laplace(model, "classification", structure, **options).fit([batch], generator=generator) for batch in data]
    sums = reduce(Laplace.merge, alone)
    for own, expected in zip(whole.curvature.blocks, sums.curvature.blocks, strict=True):
        for name, tensor in expected.accumulator.tensors().items():
            if name == "counts":  # bounds on ranks
                continue
            found = own.accumulator.tensors()[name]
            torch.testing.assert_close(found, tensor, rtol=1e-9, atol=1e-11 * float(tensor.abs().max() + 1), msg=name)
    for name, slope in sums.curvature.gradient.items():
        torch.testing.assert_close(whole.curvature.gradient[name], slope, rtol=1e-9, atol=1e-11, msg=name)
    assert whole.curvature.statistics.examples == sums.curvature.statistics.examples
    assert whole.curvature.statistics.log_likelihood == pytest.approx(sums.curvature.statistics.log_likelihood)
    assert whole.curvature.dropped == pytest.approx(sums.curvature.dropped, rel=1e-9, abs=1e-15)
    return whole
