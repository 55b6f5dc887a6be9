"""What the Python side must know before an op can check its arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_prefill import _library  # noqa: F401  (registers the ops)


def last_entry(cu_seqlens: Tensor) -> int:
    """The last entry, read on the host; 0 where the op is going to refuse the tensor."""
    return max(int(cu_seqlens[-1]), 0) if cu_seqlens.ndim == 1 and cu_seqlens.numel() else 0


def expect_no_grad(**tensors: object) -> None:
    """Refuses tensors that require a gradient, in grad mode: the op's result would be silently cut off from them."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{name}: expected a tensor that requires no gradient (inference only: no op has one; call it under "
                "torch.no_grad()), got requires_grad=True"
            )


def expect_one_device(op_name: str) -> Callable[..., None]:
    """A function of the op's arguments that raises where its tensors are on several devices.

    The op checks it too, but among tensors on the meta device it is the fake implementation that runs.
    """
    names = [argument.name for argument in getattr(torch.ops.mla_prefill, op_name).default._schema.arguments]

    def check(*args: object) -> None:
        tensors = [(name, arg) for name, arg in zip(names, args, strict=False) if isinstance(arg, Tensor)]
        first_name, first = tensors[0]
        for name, tensor in tensors[1:]:
            if tensor.device != first.device:
                raise RuntimeError(f"{name}: expected {first_name}'s device, {first.device}, got {tensor.device}")

    return check
