"""What every loop that trains does: train mode while it lasts, and steps of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Train mode as a whole, unless the model is in train mode, whose parts then stay as they are; put back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def step(scheduler: LRScheduler | None, loss: float) -> None:
    """Step a scheduler, if there is one, with the loss where it asks for that."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    elif scheduler is not None:
        scheduler.step()
