"""Save and load: the same posterior comes back, or the file is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lapwing import FactoredDamping, FileError, Gaussian, GaussianPrior, Laplace
from tests import networks


def fitted(network: str, structure: str, **options: Any) -> Laplace:
    model = networks.make(network)
    data = networks.batches(networks.inputs(network, 6), networks.targets("classification", 6), 4, 2)
    return Laplace(model, "classification", structure, **options).fit(data)


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac", "block", "full", "lowrank"])
@pytest.mark.parametrize("network", ["grouped-cnn", "attention", "lstm"])
def test_round_trip(network: str, structure: str, tmp_path: Path) -> None:
    la = fitted(network, structure, prior={"*weight*": 2.0, "*": 2.0}, temperature=1.5)
    la.save(tmp_path / "file.safetensors")
    back = Laplace.load(tmp_path / "file.safetensors", la.model)
    x = networks.inputs(network, 3, seed=8)
    assert torch.equal(la.log_evidence(), back.log_evidence())
    assert torch.equal(la.log_evidence(center="newton"), back.log_evidence(center="newton"))
    torch.testing.assert_close(la.predict(x).probs, back.predict(x).probs, rtol=1e-14, atol=0)
    drawn = [one.sample(2, torch.Generator().manual_seed(0)) for one in (la, back)]
    for name, value in drawn[0].items():
        torch.testing.assert_close(value, drawn[1][name], rtol=1e-13, atol=1e-15)
    assert back.temperature == 1.5
    assert back.curvature.examples == 6
    assert back.summary().splitlines()[0] == la.summary().splitlines()[0]


def test_round_trip_of_priors_noise_and_center(tmp_path: Path) -> None:
    model = networks.make("mlp")
    x, y = networks.inputs("mlp", 6), networks.targets("regression", 6)
    elementwise = GaussianPrior({"0.weight": torch.rand(4, 3) + 0.5, "*": 1.0}, mean={"0.bias": torch.ones(4)})
    la = Laplace(model, Gaussian([1.0, 2.0, 3.0]), "block", prior=elementwise).fit([(x, y)])
    la = la.at(noise=0.3, center="newton", tempered="both")
    la.save(tmp_path / "a")
    back = Laplace.load(tmp_path / "a", model)
    assert torch.equal(la.log_evidence(), back.log_evidence())
    torch.testing.assert_close(back.noise, la.noise)
    damped = fitted("mlp", "kron", prior=FactoredDamping(10, 0.5))
    damped.save(tmp_path / "b")
    back = Laplace.load(tmp_path / "b", damped.model)
    torch.testing.assert_close(back.predict(x).probs, damped.predict(x).probs, rtol=1e-14, atol=0)


def saved(tmp_path: Path) -> tuple[Laplace, Path]:
    la, path = fitted("mlp", "kron"), tmp_path / "file.safetensors"
    la.save(path)
    return la, path


def rewrite(path: Path, change: Any) -> None:
    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["lapwing"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, str(path), metadata={"lapwing": json.dumps(header)})


def test_header_says_what_was_fitted(tmp_path: Path) -> None:
    la, path = saved(tmp_path)
    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["lapwing"])
    assert header["structure"] == "kron"
    assert header["statistics"]["examples"] == 6
    assert header["format"] == 1
    assert set(header["shapes"]) == set(la.model.state_dict())
    assert len(header["fingerprint"]) == len(header["checksum"]) == 64


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    with pytest.raises(FileError, match=r"another architecture: '0\.weight'"):
        Laplace.load(path, nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)))


def test_other_weights_are_refused(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    with pytest.raises(FileError, match="other weights of this architecture"):
        Laplace.load(path, networks.make("mlp", seed=1))


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    la, path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FileError, match="truncated or no safetensors"):
        Laplace.load(path, la.model)


def test_altered_tensors_are_refused(tmp_path: Path) -> None:
    la, path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(FileError, match="checksum"):
        Laplace.load(path, la.model)


def test_altered_header_is_refused(tmp_path: Path) -> None:
    la, path = saved(tmp_path)
    rewrite(path, lambda header, _: header.update(temperature=3.0))
    with pytest.raises(FileError, match="header"):
        Laplace.load(path, la.model)


def test_newer_format_is_refused(tmp_path: Path) -> None:
    la, path = saved(tmp_path)
    rewrite(path, lambda header, _: header.update(format=99))
    with pytest.raises(FileError, match="format 99.*Upgrade"):
        Laplace.load(path, la.model)


def test_other_files_are_refused(tmp_path: Path) -> None:
    la, path = saved(tmp_path)
    save_file({"x": torch.ones(1)}, str(path))
    with pytest.raises(FileError, match="holds no Lapwing posterior"):
        Laplace.load(path, la.model)
    with pytest.raises(FileError, match="There is no file"):
        Laplace.load(tmp_path / "missing", la.model)


def test_no_pickle_anywhere() -> None:
    sources = Path(__file__).parent.parent.joinpath("src").rglob("*.py")
    code = [line for path in sources for line in path.read_text().splitlines() if "import" in line]
    assert not any(word in line for line in code for word in ("pickle", "torch.load", "joblib"))


@pytest.mark.parametrize("structure", ["kron", "ekfac", "block", "full"])
def test_decompositions_are_kept_where_they_were_made(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = networks.make("cnn"), networks.inputs("cnn", 3, seed=8)
    data = [(networks.inputs("cnn", 6), networks.targets("classification", 6))]
    la = Laplace(model, "classification", structure).fit(data)
    la.save(tmp_path / "before.safetensors")
    expected = la.latent(x).covariance
    la.save(tmp_path / "after.safetensors")
    made: list[torch.Size] = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (made.append(matrix.shape), eigh(matrix))[1])  # type: ignore[func-returns-value]
    again = Laplace.load(tmp_path / "after.safetensors", model)
    torch.testing.assert_close(again.latent(x).covariance, expected, rtol=1e-13, atol=1e-15)
    assert float(again.log_evidence()) == pytest.approx(float(la.log_evidence()), rel=1e-13)
    assert not made
    later = Laplace.load(tmp_path / "before.safetensors", model)
    torch.testing.assert_close(later.latent(x).covariance, expected, rtol=1e-10, atol=1e-12)
    assert bool(made) == (structure != "ekfac")


def test_round_trip_of_a_single_output_in_an_odd_layout(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    single = torch.empty_strided((1, 1), (7, 7), dtype=torch.float64).fill_(0.3)  # torch calls it contiguous
    model.register_buffer("offset", single)
    x = torch.linspace(-1, 1, 5, dtype=torch.float64).unsqueeze(1)
    la = Laplace(model, "regression").fit([(x, x.sin())]).tune_prior()
    la.at(prior=GaussianPrior(la.prior.precision, mean={"0.bias": single[0]})).save(tmp_path / "a")  # type: ignore[union-attr]
    back = Laplace.load(tmp_path / "a", model)
    assert torch.equal(back.latent(x).covariance, la.latent(x).covariance)
