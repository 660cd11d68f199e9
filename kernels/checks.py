"""Typed refusals of what a kernel does not take: one line per fact, in the words of the caller.

A kernel never guesses and never falls back in silence: what is outside its table raises, with the way out.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from workbench.kernels import interpreter, target
from workbench.spec.errors import CompilerError, UnsupportedInput


def require(holds: bool, message: str, hint: str = "") -> None:
    """Raise ``UnsupportedInput`` unless ``holds``."""
    if not holds:
        raise UnsupportedInput(message, hint=hint)


def require_runnable(kernel: str, x: Tensor) -> None:
    """Raise unless a kernel can run where ``x`` lies: on a GPU, or in the CPU's interpreter.

    ``UnsupportedInput`` for the wrong place, ``CompilerError`` for a triton outside the tested range.
    """
    require(
        x.is_cuda or (interpreter.wanted() and x.device.type == "cpu"),
        f"{kernel} runs on an NVIDIA GPU, but its tensors lie on {x.device}.",
        "Use the kernel's reference(), or set TRITON_INTERPRET=1 before importing triton to interpret it.",
    )
    version = target.triton_version()
    if not target.in_range(version):
        raise CompilerError(
            f"{kernel} is tested with triton 3.6 to 3.9, not {version or 'none'}.",
            hint="Install a triton in that range.",
        )


def require_dtype(name: str, x: Tensor, allowed: Collection[torch.dtype]) -> None:
    """Raise ``UnsupportedInput`` unless ``x`` has one of the dtypes."""
    names = ", ".join(sorted(str(d).removeprefix("torch.") for d in allowed))
    require(x.dtype in allowed, f"{name} is {x.dtype}.", f"It takes: {names}.")


def require_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ``UnsupportedInput`` unless ``x`` is ``shape``."""
    require(tuple(x.shape) == shape, f"{name} is {tuple(x.shape)}, not {shape}.")


def require_contiguous(name: str, x: Tensor) -> None:
    """Raise ``UnsupportedInput`` for a view that is not contiguous."""
    require(
        x.is_contiguous(),
        f"{name} is a view with strides {x.stride()}.",
        "Pass a contiguous tensor (.contiguous()).",
    )


def require_device(like: Tensor, **others: Tensor | None) -> None:
    """Raise ``UnsupportedInput`` unless all tensors lie where ``like`` does."""
    for name, x in others.items():
        if x is not None and x.device != like.device:
            raise UnsupportedInput(
                f"{name} lies on {x.device}, the others on {like.device}.", hint="Move them to one device."
            )
