"""What is measured on: a network, its data, and how it was trained.

A workload is prepared once in a run: built, trained with a fixed seed and written with its data to a file outside
the repository. Lapwing and every rival read the same file, each case in a process of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks import data, models, text_models

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """`data(n)` gives n examples or fewer; `steps` of Adam over the first `seen` of them train the network, with a rate
    that falls to 0.

    A fit sees `batches` batches of size `batch`, a prediction the first `inputs` examples.
    """

    title: str
    about: str
    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    batch: int
    batches: int
    inputs: int = 0
    steps: int = 0
    train_batch: int = 128
    rate: float = 1e-3
    seen: int = 60_000
    weights: Callable[[], dict[str, Tensor]] | None = None
    size: int = 0
    """What grows, for workloads that measure growth."""

    @property
    def examples(self) -> int:
        return self.batch * self.batches


@dataclass(frozen=True)
class Problem:
    """A prepared workload: the network in evaluation mode, the batches of a fit, the inputs of a prediction."""

    model: nn.Module
    batches: list[Batch]
    inputs: Tensor
    targets: Tensor

    @property
    def examples(self) -> int:
        return sum(len(y) for _, y in self.batches)


def cifar_resnet_weights(layers: int = 20) -> dict[str, Tensor]:
    """Of the published network with 20, 32 or 56 layers."""
    path = data.folder().parent / "weights" / f"resnet{layers}_cifar10.safetensors"
    if not path.is_file():
        raise data.MissingDataError(f"needs {path.name} in the folder `weights` beside that which LAPWING_DATA names")
    return {name.removeprefix("module."): value for name, value in load_file(path).items()}


def _minilm_weights() -> dict[str, Tensor]:
    return text_models.minilm_weights(load_file(text_models.minilm_folder() / "model.safetensors"))


def _sentences(count: int) -> tuple[Tensor, Tensor]:
    vocabulary = (text_models.minilm_folder() / "vocab.txt").read_text(encoding="utf-8").split("\n")
    return data.sentences(count, vocabulary)


def _noise(classes: int, *shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda count: data.random_images(classes, count, *shape)


MAIN: dict[str, Workload] = {
    "mlp": Workload(
        "MLP 784-1024-1024-10", "MNIST, trained for five epochs",
        models.mlp, data.flat_mnist, 128, 64, 1000, steps=2345,
    ),
    "lenet5": Workload(
        "LeNet-5", "MNIST, trained for 15 epochs",
        models.lenet5, data.mnist, 128, 64, 1000, steps=7035,
    ),
    "resnet18": Workload(
        "ResNet-18", "CIFAR-10, trained for ten epochs of 20,000 images",
        models.ResNet18, data.cifar10, 128, 4, 128, steps=1570,
    ),
    "resnet20": Workload(
        "ResNet-20", "CIFAR-10, published weights (91.7 % on test images)",
        models.CifarResNet, data.cifar10, 128, 4, 128, weights=cifar_resnet_weights,
    ),
    "wrn16-4": Workload(
        "WRN-16-4, 100 classes", "a subset of CIFAR-100, trained for 60 epochs of 1,117 images (99.9 % of them right)",
        models.WideResNet, data.cifar100, 32, 2, 32, steps=1050, train_batch=64,
    ),
    "transformer": Workload(
        "transformer, 4 layers", "AG News (d = 256, 10k words, length 64, 4 classes), trained for 12 epochs of 2,048",
        text_models.transformer, data.headlines, 32, 16, 64, steps=768, train_batch=32, rate=3e-4, seen=2048,
    ),
    "minilm": Workload(
        "MiniLM, 6 layers", "SST-2 (length 32), published weights, trained on with a head for six epochs of 1,024",
        text_models.minilm, _sentences, 32, 8, 64, steps=192, train_batch=32, rate=1e-4, seen=1024,
        weights=_minilm_weights,
    ),
}  # fmt: skip

CLASSES = Workload(
    "last layer 128 → 3,100", "random inputs and labels, random weights",
    functools.partial(models.mlp, width=128, depth=1, classes=3100), _noise(3100, 784), 128, 4, 1000,
)  # fmt: skip


def _growing() -> dict[str, Workload]:
    """One thing at a time, everything else fixed; random data and weights but for growth in N."""
    found = {}
    for count in (1, 2, 4, 8, 16):
        found[f"grow-examples-{count * 512}"] = Workload(
            f"LeNet-5, N = {count * 512:,}", "MNIST, random weights", models.lenet5, data.mnist, 128, 4 * count,
            size=512 * count,
        )  # fmt: skip
    for width in (256, 512, 1024, 2048):
        found[f"grow-width-{width}"] = Workload(
            f"MLP of width {width}", "random", functools.partial(models.mlp, inputs=width, width=width),
            _noise(10, width), 128, 2, size=width,
        )  # fmt: skip
    for depth in (2, 4, 8, 16):
        found[f"grow-depth-{depth}"] = Workload(
            f"MLP of depth {depth}", "random", functools.partial(models.mlp, inputs=512, width=512, depth=depth),
            _noise(10, 512), 128, 4, size=depth,
        )  # fmt: skip
    for classes in (5, 10, 20, 40, 80):
        found[f"grow-classes-{classes}"] = Workload(
            f"MLP with {classes} classes", "random", functools.partial(models.mlp, 512, 512, 2, classes),
            _noise(classes, 512), 128, 4, size=classes,
        )  # fmt: skip
    return found


GROWING: dict[str, Workload] = _growing()
WORKLOADS: dict[str, Workload] = MAIN | {"classes3100": CLASSES} | GROWING


def prepare(name: str, folder: Path, quick: bool) -> Path:
    """Build, train and write a workload; `quick` takes a handful of examples and steps."""
    workload = WORKLOADS[name]
    steps = min(workload.steps, 2) if quick else workload.steps
    train_batch = min(workload.train_batch, 8) if quick else workload.train_batch
    kept = max(8, min(workload.inputs, 8)) if quick else max(workload.examples, workload.inputs)
    torch.manual_seed(0)
    model = workload.build()
    if workload.weights is not None:
        model.load_state_dict(model.state_dict() | workload.weights())
    x, y = workload.data(max(kept, min(steps * train_batch, workload.seen)))
    if steps:
        train(model, x, y, workload, steps, train_batch)
    tensors = {f"model.{key}": value.detach().contiguous() for key, value in model.state_dict().items()}
    path = folder / f"{name}.safetensors"
    save_file(tensors | {"x": x[:kept].contiguous(), "y": y[:kept].contiguous()}, path)
    return path


def train(model: nn.Module, x: Tensor, y: Tensor, workload: Workload, steps: int, batch: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), workload.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    model.train()
    order = torch.cat([torch.randperm(len(y)) for _ in range(1 + steps * batch // len(y))])
    for step in range(steps):
        pick = order[step * batch : (step + 1) * batch]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()
        schedule.step()


def load(name: str, folder: Path, quick: bool) -> Problem:
    """Read a prepared workload back."""
    workload = WORKLOADS[name]
    with torch.random.fork_rng():
        model = workload.build()
    stored = load_file(folder / f"{name}.safetensors")
    x, y = stored.pop("x"), stored.pop("y")
    model.load_state_dict({key.removeprefix("model."): value for key, value in stored.items()})
    size, count = (4, 2) if quick else (workload.batch, workload.batches)
    parts = [slice(i * size, (i + 1) * size) for i in range(count)]
    inputs = min(len(y), workload.inputs or len(y))
    return Problem(model.eval(), [(x[part], y[part]) for part in parts], x[:inputs], y[:inputs])


def dense_modules(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Linear layers and convolutions by name: what every library has in Kronecker form."""
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}


def dense_parameters(model: nn.Module) -> set[str]:
    """The names of their weights and biases."""
    return {
        f"{name}.{leaf}" if name else leaf
        for name, part in dense_modules(model).items()
        for leaf, _ in part.named_parameters()
    }
