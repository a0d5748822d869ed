"""The largest eigenpairs against those that were put in."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from lapwing import InputError
from lapwing.eigenpairs import top_eigenpairs

SIZE = 300
SPECTRA = {
    "harmonic": 1 / torch.arange(1, SIZE + 1, dtype=torch.float64),
    "exponential": torch.exp(-torch.arange(SIZE, dtype=torch.float64) / 10),
    "repeated": torch.tensor([3.0] * 30 + [1.0] * 40 + [0.0] * (SIZE - 70), dtype=torch.float64),
    "few": torch.tensor([5.0, 2.0, 1.0] + [0.0] * (SIZE - 3), dtype=torch.float64),
    "outliers": torch.cat([torch.linspace(100, 50, 9), 1 / torch.arange(1, SIZE - 8)]).double(),
    "none": torch.zeros(SIZE, dtype=torch.float64),
}


@dataclass
class Dense:
    matrix: Tensor
    noise: float = 0.0
    asked: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.matrix)

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def matmul(self, vectors: Tensor) -> Tensor:
        self.asked.append(vectors.shape[1])
        return (1 + self.noise * len(self.asked)) * self.matrix.to(vectors.dtype) @ vectors


def with_spectrum(values: Tensor) -> Dense:
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
    return Dense((basis * values) @ basis.T)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("rank", [1, 12, 32])
@pytest.mark.parametrize("budget", [2**30, 1])  # 1: restart as often as may be
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_largest_eigenpairs(name: str, rank: int, budget: int, dtype: torch.dtype) -> None:
    operator = with_spectrum(SPECTRA[name])
    found = top_eigenpairs(operator, rank, dtype, budget=budget)
    rounding = torch.finfo(dtype).eps
    largest = max(float(SPECTRA[name][0]), 1e-30)
    assert found.converged
    assert found.residual <= rounding**0.5
    assert found.vectors.shape == (SIZE, rank)
    vectors = found.vectors.double()
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(rank).double(), rtol=0, atol=100 * rounding)
    # Eigenvalues have the square of the residual as error, over the gap.
    torch.testing.assert_close(found.values, SPECTRA[name][:rank], rtol=0, atol=1e4 * rounding * largest)
    residual = (operator.matrix @ vectors - vectors * found.values).norm(dim=0).max() / largest
    assert float(residual) == pytest.approx(found.residual, abs=100 * rounding)
    if budget == 1:
        assert max(operator.asked) <= rank + 8


def test_the_whole_space() -> None:
    values = torch.linspace(2, 1, 9, dtype=torch.float64)
    found = top_eigenpairs(with_spectrum(values), 50, torch.float64)
    assert found.passes == 1
    torch.testing.assert_close(found.values, values, rtol=1e-12, atol=0)


def test_few_passes_are_reported_and_still_a_lower_bound() -> None:
    values = torch.linspace(1, 0.9, SIZE, dtype=torch.float64)
    found = top_eigenpairs(with_spectrum(values), 10, torch.float64, max_passes=3, budget=1)
    assert not found.converged
    assert found.passes == 3
    assert found.residual > 1e-4
    assert bool((found.values <= values[:10] + 1e-12).all())
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(10).double(), rtol=0, atol=1e-12)


def test_a_matrix_that_changes_is_noticed() -> None:
    operator = with_spectrum(SPECTRA["harmonic"])
    operator.noise = 1e-3
    with pytest.raises(InputError, match="changed between passes"):
        top_eigenpairs(operator, 10, torch.float64)
