"""The demo: what it compares, what it writes, and what it leaves alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lapwing import cli, demo, demo_picture
from lapwing.version import __version__

pytest.importorskip("sklearn")
image = pytest.importorskip("matplotlib.image")


def few(data: demo.Digits, count: int) -> demo.Digits:
    """All there is to train on, and less to predict."""
    validation, test = ((x[:count], y[:count]) for x, y in (data.validation, data.test))
    return demo.Digits(data.train, validation, test, data.unseen[:count], data.noise)


@pytest.fixture(scope="module")
def comparison() -> demo.Comparison:
    return demo.compare(few(demo.digits(seed=1), 100), seed=1, epochs=3)


@pytest.fixture(scope="module")
def curve() -> demo.Curve:
    return demo.cubic(seed=0)


def test_digits_are_split_without_overlap():
    data = demo.digits(seed=1, noise=0)
    parts = [data.train, data.validation, data.test]
    sizes = [len(images) for images, _ in parts]
    assert sizes[1:] == [demo.VALIDATION, demo.TEST]
    assert sum(sizes) + len(data.unseen) == 1797
    assert data.train[0].shape[1:] == (1, 8, 8)
    for images, labels in parts:
        assert 0 <= images.min() < images.max() <= 1
        assert labels.unique().tolist() == list(range(demo.CLASSES))
    together = torch.cat([images for images, _ in parts] + [data.unseen]).flatten(1)
    assert len(together.unique(dim=0)) == len(together)


def test_digits_depend_on_the_seed_alone():
    first, second, other = demo.digits(1), demo.digits(1), demo.digits(2)
    assert torch.equal(first.train[0], second.train[0])
    assert not torch.equal(first.train[0], other.train[0])


def test_comparison_holds_three_ways_to_predict(comparison: demo.Comparison):
    assert [scores.name for scores in comparison] == [
        "plain network", "Laplace, prior by evidence", "Laplace, prior by validation",
    ]  # fmt: skip
    for scores in comparison:
        assert scores.probs.shape == (100, demo.CLASSES)
        assert scores.unseen.shape == (100, demo.CLASSES)
        torch.testing.assert_close(scores.probs.sum(1), torch.ones(100))
        assert 0.5 < scores.accuracy <= 1
        assert 0 < scores.nll < math.log(demo.CLASSES)
        assert 0 <= scores.ece < 1
        assert 0.5 < scores.auroc < 1


def test_tuning_raises_the_evidence(comparison: demo.Comparison):
    before, after = comparison.log_evidence
    assert before < after < 0
    assert 0 < comparison.dimension < 11_288


def test_validation_scales_the_prior_of_the_evidence(comparison: demo.Comparison):
    assert comparison.factor in demo.FACTORS
    assert (comparison.factor == 1) == torch.allclose(comparison.evidence.probs, comparison.validated.probs)


def test_report_shows_every_number(comparison: demo.Comparison):
    text = demo.report(comparison)
    for scores in comparison:
        row = next(line for line in text.splitlines() if line.startswith(scores.name + " "))
        numbers = [float(number) for number in row.removeprefix(scores.name).split()]
        assert numbers == pytest.approx([scores.accuracy, scores.nll, scores.ece, scores.auroc], abs=6e-4)
    assert comparison.summary in text
    assert f"{comparison.log_evidence[1]:.1f}" in text


def test_bands_hold_the_data_and_widen_outside(curve: demo.Curve):
    inside = (curve.grid > curve.x.min()) & (curve.grid < curve.x.max())
    assert curve.std[~inside].mean() > 2 * curve.std[inside].mean()
    assert curve.std.min() > 2.9  # the noise alone has 3
    nearest = (curve.x[:, None] - curve.grid).abs().argmin(1)
    assert ((curve.y - curve.mean[nearest]).abs() < 3 * curve.std[nearest]).all()


def test_picture_is_drawn(curve: demo.Curve, comparison: demo.Comparison, tmp_path: Path):
    demo_picture.draw(curve, comparison, tmp_path / "picture.png")
    pixels = image.imread(tmp_path / "picture.png")
    assert pixels.shape[:2] == (649, 1771)
    for panel in (pixels[:, :590], pixels[:, 590:1180], pixels[:, 1180:]):
        assert panel[..., :3].std() > 0.05


def test_command_prints_and_writes(
    comparison: demo.Comparison,
    curve: demo.Curve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(demo, "compare", lambda data, seed, epochs: comparison)
    monkeypatch.setattr(demo, "cubic", lambda seed: curve)
    output = tmp_path / "picture.svg"
    cli.main(["demo", "--output", str(output), "--seed", "1"])
    assert output.stat().st_size > 20_000
    printed = capsys.readouterr().out
    assert demo.report(comparison) in printed
    assert str(output) in printed


def test_training_leaves_random_state_and_threads_alone():
    data = few(demo.digits(seed=1), 16)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    demo.compare(data, epochs=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"lapwing {__version__}\n"


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib"])
def test_missing_package_is_named_with_the_fix(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(SystemExit, match=r"(scikit-learn|matplotlib).*pip install 'lapwing\[demo\]'"):
        cli.main(["demo", "--output", str(tmp_path / "picture.png")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "picture.txt"], "can be a .png, .pdf or .svg"),
        (["--output", "no/such/place/picture.png"], "no directory"),
        (["--noise", "-1"], "standard deviation"),
    ],
)
def test_wrong_arguments_are_refused_before_the_work(arguments: list[str], message: str):
    with pytest.raises(SystemExit, match=message):
        cli.main(["demo", *arguments])
