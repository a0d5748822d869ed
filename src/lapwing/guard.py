"""Borrow the user's model for one call and give it back exactly as it was."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def borrowed(model: nn.Module, bayesian: Collection[str]) -> Iterator[None]:
    """Put `model` into eval mode, with gradients for the parameters in `bayesian` only.

    Eval mode makes BatchNorm use its running statistics, so that examples stay independent, and
    turns dropout off. Training flags, `requires_grad` and buffers are put back on the way out,
    also after an exception. `.grad` is never written.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        for module, _ in modes:
            module.training = False
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in bayesian)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            one_attention(),
            _norms_of_one(model),
            # cuDNN's recurrent layers have no backward pass in eval mode.
            torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and not _recurrent(model)),
        ):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, name, buffer, value in buffers:
            if buffer is not None and value is not None and not _identical(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)
            module._buffers[name] = buffer


@contextmanager
def one_attention() -> Iterator[None]:
    """Without the kernel that `nn.TransformerEncoder` takes only where no gradient is wanted.

    It returns 0 at padded positions, so that predictions would be those of another function than was fitted.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _norms_of_one(model: nn.Module) -> Iterator[None]:
    """Plain memory layout around batch and instance norms for a single example.

    torch 2.13 differentiates them in eval mode wrongly on CPU where a batch of one comes, or its gradient comes back,
    in a transposed layout.
    """

    def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (_plain(args[0]), *args[1:]) if args and args[0].shape[0] == 1 else args

    def after(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if (
            output.shape[0] == 1
            and output.requires_grad
            and not torch._C._functorch.is_functorch_wrapped_tensor(output)
        ):
            output.register_hook(_plain)

    handles = []
    try:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.contiguous_format)


def _recurrent(model: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def _identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = torch.equal(left, right)
    return same or bool(
        left.is_floating_point()
        and torch.equal(left.isnan(), right.isnan())
        and torch.equal(left.nan_to_num(), right.nan_to_num())
    )


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Attention and recurrent layers in kernels that have a second derivative."""
    fused = torch.backends.mkldnn.enabled and not _recurrent(model)
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=fused, allow_tf32=None):
        yield


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave torch's global generators as they were found."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
