"""What a fit leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.errors import InputError
from lapwing.spectrum import Spectrum
from lapwing.tape import Tape

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of an element, so that sums fit
_EVERY = 61
_AT_ONCE = 2048


class Fitted:
    """The tape with the layers it found, the spectrum, the weights' values, and how the model looked."""

    def __init__(self, tape: Tape, spectrum: Spectrum) -> None:
        self.tape, self.spectrum = tape, spectrum
        self.weights = {name: parameter.detach().clone() for name, parameter in tape.parameters.items()}
        self.looks = Looks.of(tape.model)

    def check_unchanged(self) -> None:
        """Raise if a parameter or buffer of the model is not what it was at the fit."""
        self.looks.check(self.tape.model)


@dataclass(frozen=True)
class Looks:
    """How a model looked: sums over each of its parameters and buffers."""

    sums: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module) -> Looks:
        return Looks(_looks(model))

    def check(self, model: nn.Module) -> None:
        """Raise if a parameter or buffer is not what it was."""
        now = _looks(model)
        for name, before in self.sums.items():
            if not torch.equal(now[name], before):
                raise InputError(
                    f"{name!r} of the model changed since the fit, so the posterior no longer belongs to it. Restore "
                    "its values, or call la.fit(loader) again."
                )


def _looks(model: nn.Module) -> dict[str, Tensor]:
    """Sums over the bits of each parameter and buffer, of every 61st word each, and the words that are left: quick,
    and what small changes and new orders of rows and columns hardly ever leave as they were.

    A prime number, as few sizes are a multiple of it. A few words at a time, so that what they are converted to for
    the sum takes no memory anew.
    """
    found = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        numbers = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        flat = numbers.reshape(-1)
        flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
        bits = flat.view(_BITS[numbers.element_size()])
        whole = len(bits) // _EVERY * _EVERY
        sums = torch.zeros(_EVERY, dtype=torch.int64, device=bits.device)
        for part in bits[:whole].view(-1, _EVERY).split(_AT_ONCE):
            sums += part.sum(0)
        found[name] = torch.cat([sums, bits[whole:].long()])
    return found
