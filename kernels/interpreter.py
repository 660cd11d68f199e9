"""Repair of Triton's CPU interpreter, so that bf16 and fp8 behave there as on the device.

Under ``TRITON_INTERPRET=1`` triton 3.6 to 3.9 computes on the raw bits of bfloat16 (a dot is wrong by ten
orders of magnitude), truncates fp32 -> bf16, and rounds fp32 -> fp8 wrongly where the device saturates.
``repair()`` replaces the affected builder methods: values are widened to fp32, computed in numpy, and rounded
once by torch's casts (nearest even; fp8 saturates at its largest finite value, as ``cvt.rn.satfinite`` does).
Interpreted results then differ from the device only by the order of accumulation. Without the variable, or
without triton, ``repair()`` does nothing. It patches triton's private names and says so when one is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from workbench.spec.errors import CompilerError, UnsupportedInput

Array = np.ndarray[Any, np.dtype[Any]]

_TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_SATURATES = {"fp8e4nv", "fp8e5"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Formats that numpy lacks: the interpreter holds them as unsigned integers of the same width.
_HELD_AS_BITS = {"bf16", "fp8e4nv", "fp8e5"}


def wanted() -> bool:
    """Whether kernels of this process are interpreted on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "y", "yes"}


def repair() -> bool:
    """Patch the interpreter of the installed triton once; whether it is (now) repaired.

    Raises ``CompilerError`` when the installed triton lacks a name that the repair replaces.
    """
    if not wanted():
        return False
    try:
        from triton.runtime import interpreter
    except ImportError:
        return False
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "repaired_numbers", False):
        return True
    needed = ("cast_impl", "binary_op", "unary_op", "ternary_op", "create_dot", "create_fma")
    missing = [name for name in needed if not hasattr(builder, name)]
    missing += [name for name in ("_convert_float", "_get_np_dtype") if not hasattr(interpreter, name)]
    if missing:
        import triton

        raise CompilerError(
            f"The interpreter of triton {triton.__version__} has no {', '.join(missing)}.",
            hint="Install triton 3.6 to 3.9 or run on a GPU.",
        )
    _repair_casts(interpreter)
    _repair_arithmetic(interpreter)
    _repair_reductions(interpreter)
    _repair_index(interpreter)
    builder.repaired_numbers = True
    return True


def widen(data: Array, name: str) -> Array:
    """Values of an array in the interpreter's storage: fp32 for formats numpy lacks, else unchanged.

    ``name`` is triton's name of the element type, e.g. ``"bf16"`` held as uint16.
    """
    if name not in _HELD_AS_BITS:
        return data
    if name == "bf16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(data.shape)
    values = torch.from_numpy(data.copy(order="C").view(np.uint8)).view(_TORCH[name])
    return values.float().numpy().reshape(data.shape)


def narrow(values: Array, name: str) -> Array:
    """Round floating-point values to a format and return the interpreter's storage of it.

    Nearest even; fp8 saturates at its largest finite value and keeps NaN.
    """
    tensor = torch.from_numpy(np.array(values, order="C", copy=True))
    target = _TORCH[name]
    if name in _SATURATES:
        limit = torch.finfo(target).max
        tensor = tensor.float().clamp(-limit, limit)
    rounded = tensor.to(target)
    if name not in _HELD_AS_BITS:
        return rounded.numpy()
    bits = rounded.view(_BITS[target.itemsize]).numpy()
    return bits.view(np.dtype(f"uint{8 * target.itemsize}"))


def _repair_casts(interpreter: Any) -> None:
    original = interpreter._convert_float
    to_zero = getattr(interpreter._ir.ROUNDING_MODE, "RTZ", None)

    def convert_float(data: Array, source: Any, target: Any, rounding: Any) -> Array:
        towards_zero = rounding is not None and rounding == to_zero
        if towards_zero or source.name not in _TORCH or target.name not in _TORCH:
            return original(data, source, target, rounding)  # type: ignore[no-any-return]
        stored = narrow(widen(data, source.name), target.name)
        return stored.view(np.dtype(f"uint{8 * stored.itemsize}"))

    def cast_impl(self: Any, handle: Any, kind: Any) -> Any:
        source, target = handle.dtype.scalar, kind.scalar
        values = widen(handle.data, source.name)
        if target.name in _HELD_AS_BITS:
            data = narrow(values.astype(np.float32), target.name)
        else:
            data = values.astype(interpreter._get_np_dtype(kind))
        return interpreter.TensorHandle(data, target)

    def get_bf16(self: Any, value: float) -> Any:
        kind = interpreter.tl.bfloat16
        return interpreter.TensorHandle(narrow(np.array([value], dtype=np.float32), kind.name), kind)

    interpreter._convert_float = convert_float
    if not hasattr(interpreter.InterpreterBuilder, "get_bf16"):  # a number next to a bf16 scalar or tensor
        interpreter.InterpreterBuilder.get_bf16 = get_bf16
    interpreter.InterpreterBuilder.cast_impl = cast_impl


def _repair_arithmetic(interpreter: Any) -> None:
    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def rounding(method: str, count: int) -> None:
        """Let a method compute on widened operands, and round a floating result once."""
        original = getattr(builder, method)

        def repaired(self: Any, *arguments: Any) -> Any:
            operands, rest = arguments[:count], arguments[count:]
            held = {o.dtype.scalar.name for o in operands} & _HELD_AS_BITS
            if not held:
                return original(self, *arguments)
            wide = interpreter.tl.float32
            widened = [
                handle_of(widen(o.data, name), wide) if (name := o.dtype.scalar.name) in _HELD_AS_BITS else o
                for o in operands
            ]
            result = original(self, *widened, *rest)
            if result.data.dtype == np.bool_:  # a comparison: nothing to round
                return handle_of(result.data, result.dtype)
            kind = operands[-1].dtype.scalar
            return handle_of(narrow(result.data, kind.name), kind)

        setattr(builder, method, repaired)

    # create_select goes through ternary_op and moves bits only; widening and rounding back is exact.
    for method, count in {"binary_op": 2, "unary_op": 1, "ternary_op": 3, "create_fma": 3}.items():
        rounding(method, count)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = widen(a.data, a.dtype.scalar.name), widen(b.data, b.dtype.scalar.name)
        whole = not np.issubdtype(left.dtype, np.floating)
        # Integers: float64 sums of int8 products are exact, and go through BLAS where numpy's do not.
        work: Any = np.float64 if whole else np.result_type(left.dtype, right.dtype, np.float32)
        product = np.matmul(left.astype(work), right.astype(work)).astype(d.data.dtype)
        return handle_of(product + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


def _repair_reductions(interpreter: Any) -> None:
    """Refuse sums, extremes and atomics of formats numpy lacks: they would be taken over the bits."""
    for owner, methods in (
        (interpreter.ReduceOps, ("min_max", "sum", "generic_reduce")),
        (interpreter.ScanOps, ("cumsum", "cumprod", "generic_scan")),
    ):
        for method in methods:
            setattr(owner, method, _refusing(getattr(owner, method), owner.__name__))
    builder = interpreter.InterpreterBuilder
    atomic = builder.create_atomic_rmw

    def create_atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, *rest: Any) -> Any:
        _refuse("An atomic operation", value.dtype.scalar.name)
        return atomic(self, operation, pointer, value, *rest)

    builder.create_atomic_rmw = create_atomic_rmw


def _refusing(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    def checked(self: Any, values: Any, *arguments: Any, **options: Any) -> Any:
        first = values[0] if isinstance(values, tuple | list) else values
        _refuse(what, first.dtype.scalar.name)
        return original(self, values, *arguments, **options)

    return checked


def _refuse(what: str, name: str) -> None:
    if name in _HELD_AS_BITS:
        raise UnsupportedInput(
            f"{what} on {name} values is not interpreted correctly.",
            hint="Convert to float32 first, as the kernels of this library do.",
        )


def _repair_index(interpreter: Any) -> None:
    """numpy 2.4 refuses int() of a one-element array, which triton 3.6 uses for loop bounds."""
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
