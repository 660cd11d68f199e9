"""The compiled kernels as Python functions: structures mirrored field by field, pointers passed as integers.

A call costs one to two microseconds and releases the interpreter lock. Nothing is checked here; the callers
(:mod:`workbench.models.compiled`, :mod:`workbench.attention.compiled`) own shapes, dtypes and lifetimes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from workbench.spec.errors import CompilerError

COLUMNS = 32
"""Output columns of one panel of weights."""

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}

_P, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_F64 = ctypes.c_double


class Linear(ctypes.Structure):
    """Weights [n, k] in panels, with an optional float32 bias [n]; ``bits`` 16, or 4 or 8 in groups."""

    _fields_ = (("panels", _P), ("bias", _P), *((name, _I32) for name in ("n", "k", "bits", "group")))


class Join(ctypes.Structure):
    """Rows of up to four parts of ``width`` inputs side by side, each normed by its gain, or not (null)."""

    _fields_ = (("gains", _P * 4), ("eps", _F32), *((name, _I32) for name in ("parts", "width", "spare")))


class Layer(ctypes.Structure):
    """One decoder layer; gains that a family does not have are null."""

    _fields_ = (
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _P) for name in ("attn_gain", "mlp_gain", "qk_gain", "attn_out_gain", "mlp_out_gain")),
        *((name, _F32) for name in ("eps", "query_scale")),
        *((name, _I32) for name in ("hidden", "heads", "kv_heads", "head_dim", "activation", "spare")),
    )


class Head(ctypes.Structure):
    """A draft head of one layer around its ``layer``; see ``layer.h``."""

    _fields_ = (
        *((name, Linear) for name in ("project", "out")),
        *((name, Join) for name in ("entrance", "first")),
        *((name, _P) for name in ("layer", "embed", "final_gain", "ids")),
        ("embed_scale", _F32),
        ("spare", _I32),
    )


class Shape(ctypes.Structure):
    """Attention of one KV group; a soft-cap of 0 is none."""

    _fields_ = (
        *((name, _I32) for name in ("heads", "kv_heads", "head_dim", "page")),
        ("soft_cap", _F32),
        ("spare", _I32),
    )


_FUNCTIONS = {
    "linear": (_P, _I64, _P, _P, _P, _I32),
    "gated": (_P, _I32, _I64, _P, _P, _P, _I32),
    "joined": (_P, _P, _I64, _P, _P, _P, _I32),
    "norm_rows": (_P, _F32, _I32, _I64, _P, _P),
    "joined_in": (_P, _P, _I64, _P, _P, _P, _I64, _P, _P, _I32),
    "draft_chain": (_P, _P, _P, _I32, _P, _P, _P, _P, _P, _P, _F64, _I32, _P, _P, _I32),
    "layer_in": (_P, _I64, _P, _P, _P, _I64, _P, _P, _I32),
    "layer_out": (_P, _I64, _P, _P, _P, _P, _P, _P, _P, _I32),
    "attend": (_P, _P, _I32, _P, _P, _P, _P, _I64, _P, _P, _P, _I32),
    "attend_chunk": (_P, _I64, _I64, _I64, _I64, _P, _P, _P, _I64, _P, _P, _P, _P, _P, _I32),
    "encode_bytes": (_I32, _I32, _P, _I64, _P, _I64, _I64, _I64, _I64, _P, _P, _I32),
    "decode_bytes": (_I32, _P, _P, _P, _P, _I64, _I64, _I64, _I64, _P, _I32),
    "decode_nibbles": (_P, _P, _P, _P, _I64, _I64, _I64, _I64, _I64, _P, _I32),
    "decode_keys": (_I32, _P, _P, _P, _P, _I64, _I64, _I64, _I64, _P, _I32),
    "decode_values": (_I32, _P, _P, _P, _P, _I64, _I64, _I64, _I64, _I64, _P, _I32),
    "write_kv": (_I32, _I32, _I32, _I64, _P, _P, _P, _I64, _P, _P),
}


@cache
def load(path: Path) -> ctypes.CDLL:
    """The library at ``path``, its functions declared; raises :class:`CompilerError` if it is damaged."""
    import torch  # noqa: F401 - brings the OpenMP runtime that the library must share

    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
    except (OSError, AttributeError) as error:
        raise CompilerError(
            f"The compiled CPU kernels cannot be loaded: {error}.", hint=f"Delete {path} and try again."
        ) from None
    return library
