"""Symmetric sums against plain ones, small and larger than a block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lapwing import Laplace
from lapwing.gram import Gram


@pytest.mark.parametrize("size", [3, 300, 512, 700])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [5, 130])
def test_sums_are_those_of_outer_products(size: int, bias: bool, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    groups, width = 2, size + bias
    found = Gram.zeros(groups, width, True, torch.zeros(1, dtype=torch.float64))
    diagonal = Gram.zeros(groups, width, False, torch.zeros(1, dtype=torch.float64))
    expected = torch.zeros(groups, width, width, dtype=torch.float64)
    for part in (slice(None), slice(1, 2), slice(0, 1)):
        rows = torch.randn(len(range(groups)[part]), count, size, generator=generator, dtype=torch.float64)
        whole = torch.cat([rows, torch.ones(*rows.shape[:2], 1, dtype=rows.dtype)], 2) if bias else rows
        expected[part] += whole.mT @ whole
        found.add_rows(rows, part, bias)
        diagonal.add_rows(rows, part, bias)
        if part == slice(1, 2):
            torch.testing.assert_close(found.sums, expected)  # read in between
            products = rows.mT @ rows
            found.add_products(products, rows.sum(1), rows.shape[1], part, bias)
            expected[part] += whole.mT @ whole
            diagonal.add_rows(rows, part, bias)
    found.add_squares(torch.ones(width, dtype=torch.float64))
    expected += torch.eye(width, dtype=torch.float64)
    torch.testing.assert_close(found.sums, expected)
    torch.testing.assert_close(found.sums, found.sums.mT, rtol=0, atol=1e-12)
    diagonal.add_squares(torch.ones(width, dtype=torch.float64))
    torch.testing.assert_close(diagonal.sums, expected.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dense", [False, True])
def test_rows_that_wait_are_added_when_the_sum_is_read(groups: int, dense: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    found = Gram.zeros(groups, 20, dense, torch.zeros(1, dtype=torch.float64))
    expected = torch.zeros(groups, 20, 20, dtype=torch.float64)
    for count in (1, 7000, 9000, 4000, 3, 20000, 5):
        rows = torch.randn(groups, count, 20, generator=generator, dtype=torch.float64)
        found.add_kept_rows(rows, slice(None))
        expected += rows.mT @ rows
        if count == 4000:
            torch.testing.assert_close(found.sums, expected if dense else expected.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(found.sums, expected if dense else expected.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(found.sums, expected if dense else expected.diagonal(dim1=1, dim2=2))  # no row twice


def test_rows_that_wait_meet_sums_of_which_one_half_is_there() -> None:
    """In float32, wide enough for blocks; what waits is a copy where it is a small part of something large."""
    generator = torch.Generator().manual_seed(0)
    found, expected = Gram.zeros(1, 600, True, torch.zeros(1)), torch.zeros(600, 600, dtype=torch.float64)
    for count in (300, 1100, 20, 400, 300):
        rows = torch.randn(1, count, 600, generator=generator)
        found.add_kept_rows(rows, slice(None))
        expected += (rows[0].T.double() @ rows[0].double()).to(expected)
        if count == 20:
            torch.testing.assert_close(found.sums[0].double(), expected, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(found.sums[0].double(), expected, rtol=1e-4, atol=1e-2)
    large = torch.ones(1, 1000, 600)
    found.add_kept_rows(large[:, :2], slice(None))
    large.zero_()
    torch.testing.assert_close(found.sums[0].double(), expected + 2, rtol=1e-4, atol=1e-2)


def test_nothing_waits_after_a_fit(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    batches = [(torch.randn(8, 3), torch.arange(8) % 2)]
    for structure in ("kron", "block", "full"):
        la = Laplace(model, "classification", structure=structure).fit(batches)
        with torch.inference_mode():
            la.save(tmp_path / "posterior.safetensors")
        for block in la.curvature.blocks:
            sums = [value for value in vars(block.accumulator).values() if isinstance(value, Gram)]
            assert not any(gram._waiting for gram in sums)
            if structure != "kron":
                assert sums
                assert not any(gram.sums.is_inference() for gram in sums)
