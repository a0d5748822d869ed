"""A chosen set of weights, element by element: the rest of the network is held where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lapwing.errors import InputError

if TYPE_CHECKING:
    from lapwing.laplace import Laplace


@dataclass(frozen=True, eq=False)
class Subnetwork:
    """The weights of a posterior with a full covariance: `elements` are indices into each flat parameter, by name.

    `Laplace(model, likelihood, "full", weights=subnetwork)` keeps a matrix k × k for its k weights; gradients of layers
    without any of them are not computed.

    Examples:
        >>> import torch
        >>> from lapwing import Laplace, Subnetwork
        >>> model = torch.nn.Linear(3, 2)
        >>> la = Laplace(model, "classification", "full", weights=Subnetwork.largest_magnitude(model, 4))
        >>> la.fit([(torch.randn(8, 3), torch.randint(2, (8,)))]).curvature.size
        4
    """

    elements: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        found = {}
        for name, indices in self.elements.items():
            unique = torch.as_tensor(indices).detach().cpu().long().flatten().unique()
            if unique.numel():
                found[name] = unique
        if not found:
            raise InputError("This subnetwork has no weight: choose at least one.")
        object.__setattr__(self, "elements", found)

    @property
    def size(self) -> int:
        """k, the number of its weights."""
        return sum(indices.numel() for indices in self.elements.values())

    @staticmethod
    def of(masks: Mapping[str, Tensor]) -> Subnetwork:
        """From boolean masks by parameter name, each in the shape of its parameter."""
        for name, mask in masks.items():
            if mask.dtype != torch.bool:
                raise InputError(f"The mask of {name!r} has dtype {mask.dtype}; it must be boolean.")
        return Subnetwork({name: mask.flatten().nonzero().squeeze(1) for name, mask in masks.items()})

    @staticmethod
    def largest_variance(la: Laplace, k: int) -> Subnetwork:
        """The k weights with the largest marginal variance under a fitted posterior, such as one of structure diag.

        Weights in which the outputs have no gradient, as those of dead channels, have the largest of all, that of the
        prior, and change no linearized prediction: where a network has many of them, another choice is better.
        """
        return _largest(la.posterior.variances(), k)

    @staticmethod
    def largest_magnitude(model: nn.Module, k: int) -> Subnetwork:
        """The k largest weights."""
        return _largest({name: value.abs() for name, value in _trainable(model).items()}, k)

    @staticmethod
    def random(model: nn.Module, k: int, generator: torch.Generator | None = None) -> Subnetwork:
        """K weights, each set of so many equally likely."""
        place = "cpu" if generator is None else generator.device

        def drawn(value: Tensor) -> Tensor:
            return torch.rand(value.shape, generator=generator, dtype=torch.float64, device=place)

        return _largest({name: drawn(value) for name, value in _trainable(model).items()}, k)

    @staticmethod
    def by_module(model: nn.Module, *globs: str) -> Subnetwork:
        """All weights of the modules whose names match one of the globs, and of those inside them."""
        chosen: dict[str, Tensor] = {}
        for glob in globs:
            found = {name: value for name, value in _trainable(model).items() if _inside(name, glob)}
            if not found:
                names = ", ".join(repr(name) for name, _ in model.named_modules() if name)
                raise InputError(f"by_module: {glob!r} matches no module with trainable weights. There are {names}.")
            chosen |= {name: torch.arange(value.numel()) for name, value in found.items()}
        return Subnetwork(chosen)

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that hold its weights, in the order of the model."""
        known = {name: value for name, value in model.named_parameters() if value.requires_grad}
        for name, indices in self.elements.items():
            if name not in known:
                raise InputError(
                    f"The subnetwork has weights of {name!r}, which is no trainable parameter of the model."
                )
            if int(indices[-1]) >= known[name].numel() or int(indices[0]) < 0:
                raise InputError(
                    f"The subnetwork has weight {int(indices[-1])} of {name!r}, a parameter of {known[name].numel()} "
                    "elements."
                )
        return {name: value for name, value in known.items() if name in self.elements}

    def __repr__(self) -> str:
        return f"Subnetwork({self.size} weights of {len(self.elements)} parameters)"


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def _inside(name: str, glob: str) -> bool:
    """Whether a parameter lies in a module that matches, or in one inside of it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:i]), glob) for i in range(1, len(parts)))


def _largest(scores: Mapping[str, Tensor], k: int) -> Subnetwork:
    flat = torch.cat([value.flatten().double().cpu() for value in scores.values()])
    if not 1 <= k <= flat.numel():
        raise InputError(f"A subnetwork of k weights needs k between 1 and {flat.numel()}, got {k}.")
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[flat.topk(k).indices] = True
    parts = mask.split([value.numel() for value in scores.values()])
    return Subnetwork({name: part.nonzero().squeeze(1) for name, part in zip(scores, parts, strict=True)})
