"""Images `[N, C, H, W]` whose channels come last in memory, as the processor's convolutions want them.

Others they put in order at every call, in memory of its own: that takes up to as long as the convolution. Gradients at
their outputs are rows of channels as they lie, too, which Kronecker factors are sums of. Numbers and shapes do not
depend on it; which models see it, `either_order` tells.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.matmul import is_plain

_FEW = 128  # pairs of channels in and out, below which there is nothing to gain


def gains(x: Tensor, w: Tensor) -> bool:
    """Whether a convolution of images `x: [N, C_in, H, W]` with kernels `w: [C_out, C_in/Q, kh, kw]` does.

    Of a single image torch differentiates some norms wrongly where its channels come last.
    """
    return (
        x.dim() == w.dim() == 4
        and len(x) > 1
        and x.shape[1] * w.shape[0] >= _FEW
        and all(tensor.dtype == torch.float32 and is_plain(tensor) for tensor in (x, w))
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.is_available()
    )


def put_last(images: Tensor) -> Tensor:
    """The same numbers, channels last in memory."""
    return images.contiguous(memory_format=torch.channels_last)


def are_last(images: Tensor) -> bool:
    """Whether the channels come last in memory, and not in either order, as those of one pixel do. Under `vmap` nobody
    can tell.
    """
    return (
        images.dim() == 4
        and not torch._C._functorch.is_functorch_wrapped_tensor(images)
        and images.is_contiguous(memory_format=torch.channels_last)
        and not images.is_contiguous()
    )


def as_rows(images: Tensor, last: bool) -> Tensor:
    """Images `[N, C, *space]` as `[N, C·pixels]`, or as `[N, pixels·C]` where their channels come `last`."""
    return (images.movedim(1, -1) if last else images).flatten(1)
