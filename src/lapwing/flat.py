"""Parameters by name as one vector, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Flat:
    """The order in which parameters are counted: that of `sizes`, each row by row."""

    sizes: Mapping[str, torch.Size]

    @property
    def length(self) -> int:
        """p, the number of all elements."""
        return sum(size.numel() for size in self.sizes.values())

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Parameters by name, each `[*lead, *shape]`, to `[*lead, p]`."""
        return torch.cat(
            [
                values[name].reshape(*values[name].shape[: values[name].dim() - len(size)], -1)
                for name, size in self.sizes.items()
            ],
            dim=-1,
        )

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`: `[*lead, p]` to parameters by name."""
        parts = vector.split([size.numel() for size in self.sizes.values()], dim=-1)
        return {
            name: part.reshape((*vector.shape[:-1], *size))
            for (name, size), part in zip(self.sizes.items(), parts, strict=True)
        }
