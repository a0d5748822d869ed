"""One safetensors file: tensors, a JSON header and a checksum. No pickle, ever."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lapwing import likelihoods
from lapwing.batches import ReadOutput, Unpack
from lapwing.curvature import Block, Curvature
from lapwing.curvature.accumulator import Decomposition
from lapwing.curvature.blocks import choose
from lapwing.curvature.curvature import Traces
from lapwing.curvature.structures import build, group
from lapwing.errors import FileError
from lapwing.fitted import Fitted
from lapwing.gradients import Layer
from lapwing.guard import borrowed
from lapwing.layers import Layout
from lapwing.likelihoods import Likelihood, Statistics
from lapwing.mode import Mode
from lapwing.priors import FactoredDamping, GaussianPrior, Prior
from lapwing.spectrum import Spectrum
from lapwing.subnetwork import Subnetwork
from lapwing.version import __version__
from lapwing.weights import Weights, unwrap

if TYPE_CHECKING:
    from lapwing.laplace import Laplace

FORMAT = 1


def save(la: Laplace, path: Path) -> None:
    """Write everything but the model."""
    write(path, *pack(la))


def pack(la: Laplace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Everything but the model, as a header for JSON and tensors."""
    curvature = la.curvature
    tensors = {f"gradient/{name}": value for name, value in curvature.gradient.items()}
    for i, block in enumerate(curvature.blocks):
        tensors |= {f"block/{i}/{key}": value for key, value in block.accumulator.tensors().items()}
    for i, found in la._state().spectrum.decomposed().items():
        tensors |= {f"decomposition/{i}/{key}": value for key, value in (found.tensors() or {}).items()}
    if curvature.statistics.errors is not None:
        tensors["errors"] = curvature.statistics.errors
    prior, prior_tensors = _prior_header(la.prior)
    mode, mode_tensors = _mode_header(la.mode_)
    tensors |= prior_tensors | mode_tensors
    if isinstance(la.weights, Subnetwork):
        tensors |= {f"subnetwork/{name}": indices for name, indices in la.weights.elements.items()}
    tensors = {name: plain_copy(value) for name, value in tensors.items()}
    header = {
        "format": FORMAT,
        "lapwing": __version__,
        "torch": torch.__version__.split("+")[0],
        "structure": la.structure,
        "curvature": la.curvature_kind,
        "weights": None if isinstance(la.weights, Subnetwork) else la.weights,
        "likelihood": la.likelihood.config(),
        "options": {
            "kron": la.kron, "fisher_samples": la.fisher_samples, "memory_budget": la.memory_budget,
            "max_dense": la.max_dense, "max_factor": la.max_factor, "max_columns": la.max_columns,
            "kfra_residual": la.kfra_residual, "rank_tolerance": la.rank_tolerance,
            "rank": la.rank,
        },
        "layers": [_layer_header(layer) for block in curvature.blocks for layer in block.layers],
        "traces": [curvature.traces.dropped, curvature.traces.total],
        "kinds": [block.accumulator.kind for block in curvature.blocks],
        "statistics": _statistics_header(curvature.statistics),
        "mode": mode,
        "prior": prior,
        "temperature": la.temperature,
        "tempered": la.tempered,
        "noise": float(la._noise),
        "center": la.center,
        "shapes": _shapes(la.model),
        "fingerprint": fingerprint(la.model),
    }  # fmt: skip
    return header, tensors


def write(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """One file, with checksums over header and tensors."""
    text = json.dumps(header | {"checksum": _checksum(tensors)})
    save_file(tensors, str(path), metadata={"lapwing": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def load(
    path: Path,
    model: nn.Module,
    likelihood: str | Likelihood | None = None,
    unpack: Unpack | None = None,
    output: ReadOutput | None = None,
) -> Laplace:
    """Read a file back onto `model`, or say why not."""
    header, tensors = read(path)
    if "structure" not in header:
        raise FileError(f"{str(path)!r} holds no posterior, but {header.get('holds', 'something else')}.")
    return unpack_onto(path, header, tensors, model, likelihood, unpack, output)


def unpack_onto(
    path: Path,
    header: dict[str, Any],
    tensors: dict[str, Tensor],
    model: nn.Module,
    likelihood: str | Likelihood | None = None,
    unpack: Unpack | None = None,
    output: ReadOutput | None = None,
) -> Laplace:
    """The posterior that `pack` took apart, on a model with the weights it was fitted on."""
    from lapwing.laplace import Laplace

    model = unwrap(model)
    _check_model(path, header, model)
    chosen = (
        likelihoods.resolve(likelihood) if likelihood is not None else likelihoods.from_config(header["likelihood"])
    )
    elements = _under(tensors, "subnetwork/", torch.device("cpu"))
    weights: Weights = header["weights"]
    if header["weights"] is None:
        weights = Subnetwork(elements)
    elif not isinstance(header["weights"], str):
        weights = tuple(header["weights"])
    layers = tuple(_layer_from(entry) for entry in header["layers"])
    names = {name for layer in layers for name in layer.parameters}
    with borrowed(model, names):  # parameters that were frozen since the fit are Bayesian all the same
        la = Laplace(
            model, chosen, header["structure"], header["curvature"], weights, _prior_from(header["prior"], tensors),
            header["temperature"], tempered=header["tempered"], unpack=unpack, output=output, **header["options"],
        )  # fmt: skip
    la._noise = torch.tensor(header["noise"], dtype=torch.float64)
    la.center = header["center"]
    device = next(model.parameters()).device
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in names}
    tape = la._tape(parameters)
    tape.layers = layers
    like = next(iter(parameters.values())).detach()
    blocks = []
    for i, (members, kind) in enumerate(zip(group(la.structure, layers), header["kinds"], strict=True)):
        own = choose(members, weights.elements) if isinstance(weights, Subnetwork) else None
        accumulator = build(la.structure, members, la._options(), like, kind, own)
        accumulator.load(_under(tensors, f"block/{i}/", device))
        blocks.append(Block(members, accumulator, own))
    statistics = Statistics(**header["statistics"], errors=tensors.get("errors"))
    gradient = {name: tensors[f"gradient/{name}"].to(device) for name in parameters}
    curvature = Curvature(
        la.structure, la.curvature_kind, tuple(blocks), statistics, gradient, Traces(*header["traces"])
    )
    la._fitted = Fitted(tape, Spectrum(curvature))
    la.mode_ = _mode_from(header.get("mode"), tensors, device)
    for i in range(len(blocks)):
        kept = _under(tensors, f"decomposition/{i}/", device)
        if kept:
            la._fitted.spectrum.restore(i, Decomposition.of(kept))
    return la


def _under(tensors: dict[str, Tensor], prefix: str, device: torch.device) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value.to(device) for key, value in tensors.items() if key.startswith(prefix)}


def plain_copy(value: Tensor) -> Tensor:
    """A copy that shares nothing, in plain memory layout, as files want it."""
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and values of all parameters and buffers."""
    return _checksum(
        {name: value.detach().cpu() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    )


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        # The stride of a single number may be anything, and then it cannot be viewed as bytes.
        flat = value.flatten().as_strided((value.numel(),), (1,))
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that `write` wrote, undamaged."""
    if not path.is_file():
        raise FileError(f"There is no file {str(path)!r}.")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as reason:
        raise FileError(
            f"{str(path)!r} is truncated or no safetensors file ({reason}). Save the posterior again."
        ) from reason
    if "lapwing" not in metadata:
        raise FileError(f"{str(path)!r} is a safetensors file, but holds no Lapwing posterior.")
    try:
        header: dict[str, Any] = json.loads(metadata["lapwing"])
    except json.JSONDecodeError as reason:
        raise FileError(f"{str(path)!r}: its header was altered and is no JSON ({reason}).") from reason
    if header.get("format", 0) > FORMAT:
        raise FileError(
            f"{str(path)!r} has format {header['format']}, written by Lapwing {header.get('lapwing')}; this is Lapwing "
            f"{__version__}, which reads up to format {FORMAT}. Upgrade Lapwing."
        )
    if hashlib.sha256(metadata["lapwing"].encode()).hexdigest() != metadata.get("sha256"):
        raise FileError(f"{str(path)!r}: its header was altered or damaged; its checksum does not match.")
    if _checksum(tensors) != header.get("checksum"):
        raise FileError(f"{str(path)!r} was altered or damaged: the checksum over its tensors does not match.")
    return header, tensors


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _check_model(path: Path, header: dict[str, Any], model: nn.Module) -> None:
    expected, found = header["shapes"], _shapes(model)
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            raise FileError(
                f"{str(path)!r} belongs to another architecture: {name!r} has shape {expected.get(name, 'none')} in "
                f"the file and {found.get(name, 'none')} in the model."
            )
    if header["fingerprint"] != fingerprint(model):
        raise FileError(
            f"{str(path)!r} was fitted on other weights of this architecture (fingerprints differ). Load the weights "
            "it was fitted on into the model first, in the same dtype."
        )


def _layer_header(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name, "parameters": layer.parameters, "sizes": [list(size) for size in layer.sizes],
        "shape": layer.shape, "path": layer.path, "form": layer.form,
        "layout": None if layer.layout is None else [layer.layout.view, layer.layout.order],
    }  # fmt: skip


def _layer_from(entry: dict[str, Any]) -> Layer:
    shape = None if entry["shape"] is None else tuple(entry["shape"])
    sizes = tuple(torch.Size(size) for size in entry["sizes"])
    layout = None if entry["layout"] is None else Layout(*(tuple(part) for part in entry["layout"]))
    return Layer(entry["name"], tuple(entry["parameters"]), sizes, shape, entry["path"], layout, entry["form"])


def _statistics_header(statistics: Statistics) -> dict[str, float]:
    return {
        "examples": statistics.examples, "log_likelihood": statistics.log_likelihood,
        "observations": statistics.observations, "squared_error": statistics.squared_error,
    }  # fmt: skip


def _mode_header(mode: Mode | None) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    if mode is None:
        return None, {}
    tensors = {f"mode/step/{name}": value for name, value in mode.step.items()}
    tensors |= {f"mode/gradient/{name}": value for name, value in mode.gradient.items()}
    if mode.statistics.errors is not None:
        tensors["mode/errors"] = mode.statistics.errors
    return {
        "statistics": _statistics_header(mode.statistics), "residual": mode.residual, "gap": mode.gap,
        "converged": mode.converged, "losses": mode.losses,
    }, tensors  # fmt: skip


def _mode_from(header: dict[str, Any] | None, tensors: dict[str, Tensor], device: torch.device) -> Mode | None:
    if header is None:
        return None
    statistics = Statistics(**header["statistics"], errors=tensors.get("mode/errors"))
    step, gradient = (_under(tensors, f"mode/{what}/", device) for what in ("step", "gradient"))
    return Mode(
        step, statistics, gradient, header["residual"], header["gap"], header["converged"], tuple(header["losses"])
    )


def _prior_header(prior: Prior) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if isinstance(prior, FactoredDamping):
        return {"kind": "factored damping", "n": prior.n, "tau": prior.tau}, {}
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {"kind": "gaussian"}
    for what in ("precision", "mean"):
        given = getattr(prior, what)
        given = given if isinstance(given, Mapping) else {"*": given}
        header[what] = list(given)
        for i, value in enumerate(given.values()):
            tensors[f"prior/{what}/{i}"] = torch.as_tensor(value, dtype=torch.float64)
    return header, tensors


def _prior_from(header: dict[str, Any], tensors: dict[str, Tensor]) -> Prior:
    if header["kind"] == "factored damping":
        return FactoredDamping(header["n"], header["tau"])
    values = {
        what: {glob: tensors[f"prior/{what}/{i}"] for i, glob in enumerate(header[what])}
        for what in ("precision", "mean")
    }
    return GaussianPrior(values["precision"], values["mean"])
