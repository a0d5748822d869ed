"""Rows that are 0 are left out of sums, where there are enough of them, and the sums stay the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.zero_rows import nonzero_rows
from tests.test_reading import paths


def test_which_rows() -> None:
    rows = torch.randn(40, 200, generator=torch.Generator().manual_seed(0))
    assert nonzero_rows(rows) is None
    rows[:20, :8] = 0  # not all of a row
    assert nonzero_rows(rows) is None
    rows[[3, 7, 8, 15, 39]] = 0
    rows[20] = 0
    rows[20, -1] = 1e-45  # the smallest number there is
    rows[21, :100] = float("nan")
    found = nonzero_rows(rows)
    assert found is not None
    assert found.tolist() == [n for n in range(40) if n not in (3, 7, 8, 15, 39)]
    assert nonzero_rows(rows[:, :100]) is None  # too narrow to gain
    everything = nonzero_rows(torch.zeros(9, 128))
    assert everything is not None
    assert not len(everything)


class Padded(nn.Module):
    """Words, some of them padding, whose mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 130), nn.Linear(130, 129), nn.Linear(129, 3)

    def forward(self, x: Tensor) -> Tensor:
        present = (x != 0).any(2, keepdim=True).to(x.dtype)
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.head((hidden * present).sum(1) / present.sum(1).clamp(min=1))
        return out


@pytest.mark.parametrize("curvature", ["ggn", "fisher", "empirical"])
def test_padding_adds_nothing(curvature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`G` of layers at every position against one that counts all of them, and the gradient against autograd."""
    torch.manual_seed(0)
    model = Padded().double()
    x, y = torch.randn(6, 5, 3, dtype=torch.float64), torch.randint(3, (6,))
    x[0, 2:] = x[1, 1:] = x[4, 3:] = 0
    x[5] = 0  # nothing but padding

    def fit() -> Laplace:
        la = Laplace(model, "classification", "kron", curvature)
        return la.fit([(x, y)], generator=torch.Generator().manual_seed(0))

    kept: dict[str, set[float]] = {}

    def counted(module: str, rows: Tensor) -> Tensor | None:
        found = nonzero_rows(rows)
        if rows.shape[1] >= 128 and len(rows) % 30 == 0:  # of all 6 × 5 positions
            kept.setdefault(module, set()).add((len(rows) if found is None else len(found)) / len(rows))
        return found

    modules = ("lapwing.layers.linear", "lapwing.curvature.kronecker")
    for module in modules:
        monkeypatch.setattr(f"{module}.nonzero_rows", functools.partial(counted, module))
    la = fit()
    assert kept == {module: {16 / 30} for module in modules}
    assert set(paths(la).values()) == {"linear"}
    for module in modules:
        monkeypatch.setattr(f"{module}.nonzero_rows", lambda rows: None)
    expected = fit()
    for own, other in zip(la.curvature.blocks, expected.curvature.blocks, strict=True):
        for name, tensor in other.accumulator.tensors().items():
            torch.testing.assert_close(own.accumulator.tensors()[name], tensor, rtol=1e-12, atol=1e-14, msg=name)
    total = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
    gradients = torch.autograd.grad(-total, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(la.curvature.gradient[name], gradient, rtol=1e-10, atol=1e-13)
