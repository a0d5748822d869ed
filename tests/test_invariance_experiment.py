"""The rotations of the experiment: exact at quarter turns, even over their range, differentiable in the angle."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck

from experiments.invariance import __main__ as experiment


def test_quarter_turns_are_exact() -> None:
    images = torch.rand(3, 1, 8, 8, dtype=torch.float64) - 0.4
    angles = torch.tensor([[0.0, 0.5, 1.0, -0.5]], dtype=torch.float64).expand(3, 4) * math.pi
    found = experiment.rotated(images, angles)
    for s, turns in enumerate((0, 1, 2, -1)):
        torch.testing.assert_close(found[:, s], torch.rot90(images, turns, (2, 3)), rtol=1e-9, atol=1e-9)


def test_what_is_turned_in_is_paper() -> None:
    """Corners that no part of the image covers have its lowest value, not 0."""
    images = torch.full((1, 1, 8, 8), -0.4)
    images[..., 2:6, 2:6] = 1.0
    assert float(experiment.rotated(images, torch.tensor([[math.pi / 4]]))[0, 0, 0, 0, 0]) == pytest.approx(-0.4)


def test_differentiable_in_the_angle() -> None:
    images = torch.rand(2, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = torch.tensor([[0.3, -1.1], [2.0, 0.7]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a: experiment.rotated(images, a), angles)


def test_copies_fill_their_range_evenly() -> None:
    """Angles from pictures of a clock hand: one copy in each of the equal parts of (−η, η)."""
    images = torch.zeros(5, 1, 41, 41)
    images[:, :, :20, 20] = 1.0
    half = 1.2
    seen = experiment.copies(images, torch.tensor(half), 6, torch.Generator().manual_seed(0))[:, :, 0]
    rows, columns = torch.meshgrid(torch.arange(41.0) - 20, torch.arange(41.0) - 20, indexing="ij")
    angles = torch.atan2(-(seen * columns).sum((2, 3)), -(seen * rows).sum((2, 3)))  # [N, S], counterclockwise
    parts = torch.linspace(-half, half, 7)
    assert bool(((angles > parts[:-1] - 0.02) & (angles < parts[1:] + 0.02)).all())


def test_the_results_say_what_the_readme_says() -> None:
    """Learned ranges near those of the data, and the table of the README is that of the results."""
    folder = Path(experiment.__file__).parent
    runs = [experiment.Run(**run) for run in json.loads((folder / "results.json").read_text())]
    assert experiment.table(runs) in (folder / "README.md").read_text()
    learned = {run.data_range: run.range for run in runs if run.method == "learned"}
    assert learned[0] < 20
    assert 60 < learned[90] < 120
    assert learned[180] > 150
