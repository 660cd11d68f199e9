"""Checks that every linear kernel makes before a launch: where tensors live, and how their rows lie.

Operands are read by TMA, which wants a last axis without gaps, rows a multiple of 16 bytes apart and a base
on a 16-byte boundary. What does not fit is refused with the reason; nothing is copied behind one's back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.checks import require_runnable
from workbench.spec.errors import UnsupportedInput

FLOATS = (torch.bfloat16, torch.float16)


def check_device(kernel: str, x: Tensor, *others: Tensor | None) -> None:
    """All tensors on one CUDA device, or on the CPU when triton is interpreted there.

    Raises :class:`UnsupportedInput` otherwise, ``CompilerError`` for a triton outside the tested range.
    """
    require_runnable(kernel, x)
    devices = {x.device, *(t.device for t in others if t is not None)}
    if len(devices) != 1:
        raise UnsupportedInput(
            f"{kernel}: operands on several devices: {', '.join(sorted(map(str, devices)))}.",
            hint="Move them to one device.",
        )


def check_rows(
    kernel: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], rank: int = 2
) -> None:
    """A tensor of one of ``dtypes`` whose rows TMA can read; raises :class:`UnsupportedInput` otherwise."""
    if tensor.ndim != rank or tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise UnsupportedInput(
            f"{kernel}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}.",
            hint=f"It must be {wanted} with {rank} axes.",
        )
    size, *outer = tensor.element_size(), *tensor.stride()[:-1]
    gaps = tensor.shape[-1] > 1 and tensor.stride(-1) != 1
    if gaps or any(s <= 0 or s * size % 16 for s in outer) or tensor.data_ptr() % 16:
        raise UnsupportedInput(
            f"{kernel}: {name} has strides {tensor.stride()} and address {tensor.data_ptr():#x}.",
            hint="Its last axis must be dense; rows and start must lie on multiples of 16 bytes.",
        )


def check_shape(kernel: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """The exact shape; raises :class:`UnsupportedInput` otherwise."""
    if tuple(tensor.shape) != shape:
        raise UnsupportedInput(
            f"{kernel}: {name} is {tuple(tensor.shape)}, not {shape}.", hint="Check sizes of both operands."
        )


def check_dense(kernel: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """A contiguous tensor of one of ``dtypes``; raises :class:`UnsupportedInput` otherwise."""
    if tensor.dtype not in dtypes or not tensor.is_contiguous():
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise UnsupportedInput(
            f"{kernel}: {name} is {tensor.dtype} with strides {tensor.stride()}.",
            hint=f"It must be {wanted}, contiguous.",
        )


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; 4 for the interpreter, whose programs are serial."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
