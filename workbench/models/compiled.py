"""Weights and layers for the compiled CPU kernels (:mod:`workbench.kernels.cpu`).

A 16-bit weight set stores the values of the plain one (``sixteen_bit``) once, in panels that serve one row as
well as a whole prompt. Rules of rounding are those of the torch path; a layer becomes two calls.
What a kernel writes to always says its dtype: torch's default one belongs to the whole process.
"""

from __future__ import annotations

from ctypes import CDLL, addressof
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.kernels.cpu import compiler, library
from workbench.kernels.cpu.library import ACTIVATIONS, COLUMNS
from workbench.models.block import Block, Rotation
from workbench.models.cache import cache_dir
from workbench.models.config import ModelConfig
from workbench.models.packed import LinearFn, PackedLinear
from workbench.models.plain import sixteen_bit
from workbench.models.weightset import GATE_UP, HEAD, LayerWeights, Pack, WeightSet

LOW, HIGH = torch.bfloat16, torch.float32
KERNEL = "compiled bf16"


@dataclass(frozen=True)
class Native:
    """What the kernels read: a structure, and the tensors its pointers lead to."""

    kernels: CDLL
    struct: library.Linear
    panels: Tensor
    bias: Tensor | None


def kernels() -> CDLL:
    """The compiled library, from the cache or made now (seconds). Raises ``CompilerError``."""
    return library.load(compiler.build(cache_dir() / "kernels" / "cpu"))


def panels_of(weight: Tensor) -> Tensor:
    """Bfloat16 ``weight`` [n, k] as int32 [ceil(n / 32), ceil(k / 2), 32]: pairs of inputs, zero-padded."""
    n, k = weight.shape
    padded = F.pad(weight.contiguous(), (0, k % 2, 0, -n % COLUMNS)).contiguous()
    return padded.view(torch.int32).view(-1, COLUMNS, padded.shape[1] // 2).transpose(1, 2).contiguous()


def taking_turns(weight: Tensor) -> Tensor:
    """Gate and up rows [2F, k] as blocks of 32 that take turns, each half padded to whole blocks."""
    gate, up = (F.pad(half, (0, 0, 0, -len(half) % COLUMNS)) for half in weight.chunk(2))
    return torch.stack((gate.view(-1, COLUMNS, gate.shape[1]), up.view(-1, COLUMNS, up.shape[1])), 1).flatten(
        0, 2
    )


def compiled_pack(lib: CDLL, activation: str) -> Pack:
    """The pack of a compiled 16-bit weight set; ``activation`` is the MLP's, a key of ``ACTIVATIONS``."""

    def pack(name: str, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        if name.endswith(GATE_UP):
            return gated_linear(lib, weight, bias, activation)
        return linear(lib, weight, bias, rounded=name != HEAD)

    return pack


def linear(lib: CDLL, weight: Tensor, bias: Tensor | None, *, rounded: bool) -> PackedLinear:
    """``weight`` [n, k] in panels for every row count.

    ``rounded``: sums are rounded to bfloat16, as those of layers are.
    """
    n, k = weight.shape
    low = None if bias is None else bias.to(LOW)
    native = native_linear(lib, panels_of(sixteen_bit(weight)), low, n, k)
    run = plain_fn(native)
    return PackedLinear(
        (lambda x: run(x).to(LOW)) if rounded else run, n, k, KERNEL, held(native), native=native
    )


def gated_linear(lib: CDLL, weight: Tensor, bias: Tensor | None, activation: str) -> PackedLinear:
    """The fused gate and up rows ``weight`` [2F, H] with activation and product, bfloat16 [M, F]."""
    n, k = weight.shape
    low = None if bias is None else bias.to(LOW)
    native = native_linear(lib, panels_of(taking_turns(sixteen_bit(weight))), low, n, k)
    return PackedLinear(
        gated_fn(native, activation), n, k, f"{KERNEL}, {activation}", held(native), gated=True, native=native
    )


def native_linear(
    lib: CDLL, panels: Tensor, bias: Tensor | None, n: int, k: int, bits: int = 16, group: int = 0
) -> Native:
    """Describe weights [n, k] in ``panels`` to the kernels; ``bias`` [n] of any dtype, or None."""
    wide = None if bias is None else bias.to(HIGH).contiguous()
    struct = library.Linear(panels.data_ptr(), None if wide is None else wide.data_ptr(), n, k, bits, group)
    return Native(lib, struct, panels, wide)


def gated_fn(native: Native, activation: str) -> LinearFn:
    """Gate and up rows with activation and product: x [M, k] -> bfloat16 [M, n / 2]."""
    n, k = native.struct.n, native.struct.k
    address, run, kind = addressof(native.struct), native.kernels.gated, ACTIVATIONS[activation]

    def fn(x: Tensor) -> Tensor:
        _ = native  # what the address leads to
        x = wide_rows(x)
        rows = x.shape[0]
        out = torch.empty(rows, n // 2, dtype=LOW)
        scratch = torch.empty(rows, k + k % 2, dtype=LOW)
        run(address, kind, rows, x.data_ptr(), scratch.data_ptr(), out.data_ptr(), torch.get_num_threads())
        return out

    return fn


def plain_fn(native: Native) -> LinearFn:
    """x [M, k] -> float32 sums [M, n], bias added."""
    n, k = native.struct.n, native.struct.k
    address, run = addressof(native.struct), native.kernels.linear

    def fn(x: Tensor) -> Tensor:
        _ = native  # what the address leads to
        x = wide_rows(x)
        rows = x.shape[0]
        out = torch.empty(rows, n, dtype=HIGH)
        scratch = torch.empty(rows, k + k % 2, dtype=LOW)
        run(address, rows, x.data_ptr(), scratch.data_ptr(), out.data_ptr(), torch.get_num_threads())
        return out

    return fn


def held(native: Native) -> tuple[Tensor, ...]:
    """The tensors that the weights live in."""
    return (native.panels,) if native.bias is None else (native.panels, native.bias)


def is_compiled(weights: WeightSet, config: ModelConfig) -> bool:
    """Whether every linear of every layer is in panels, so that layers can run as compiled blocks."""
    linears = [linear for layer in weights.layers for linear in layer.linears]
    return config.head_dim <= 1024 and all(isinstance(x.native, Native) for x in linears)


@dataclass(frozen=True)
class NativeLayer:
    """A layer as the kernels read it, and the gains and weights that its pointers lead to."""

    kernels: CDLL
    struct: library.Layer
    held: tuple[Any, ...]


def native_layer(layer: LayerWeights, config: ModelConfig) -> NativeLayer:
    """Describe a layer whose linears are all in panels."""
    gains = [layer.attn_gain, layer.mlp_gain, layer.qk_gain, layer.attn_out_gain, layer.mlp_out_gain]
    wide_gains = [None if gain is None else gain.to(HIGH).contiguous() for gain in gains]
    struct = library.Layer(
        *(x.native.struct for x in layer.linears),
        *(None if gain is None else gain.data_ptr() for gain in wide_gains),
        eps=config.norm_eps,
        query_scale=config.query_scale,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        activation=ACTIVATIONS[config.activation],
    )
    return NativeLayer(layer.qkv.native.kernels, struct, (*wide_gains, *layer.linears))


def compiled_block(layer: LayerWeights, config: ModelConfig) -> Block:
    """A layer as two calls; rotations are [T, D] rows of the rotary table, which the kernel scales for q."""
    heads, kv_heads, dim, hidden_size = (
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.hidden_size,
    )
    width, q_width, inner = heads + 2 * kv_heads, heads * dim, config.intermediate_size
    native = native_layer(layer, config)
    lib, struct = native.kernels, native.struct
    address, layer_in, layer_out = addressof(struct), lib.layer_in, lib.layer_out
    wide = max(hidden_size + hidden_size % 2, q_width + q_width % 2)
    product = inner + inner % 2
    normed = layer.mlp_out_gain is not None

    def enter(hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        hidden, (cos, sin) = wide_rows(hidden), rotation
        rows = hidden.shape[0]
        qkv, scratch = torch.empty(rows, width, dim, dtype=HIGH), torch.empty(rows, wide, dtype=LOW)
        layer_in(
            address,
            rows,
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            scratch.data_ptr(),
            qkv.data_ptr(),
            torch.get_num_threads(),
        )
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]

    def leave(out: Tensor, hidden: Tensor, keep: Tensor | None) -> Tensor:
        _ = native  # what the address leads to
        out, hidden = wide_rows(out), wide_rows(hidden)
        rows = (hidden if keep is None else keep).shape[0]
        result = torch.empty(rows, hidden_size, dtype=HIGH)
        scratch = torch.empty(rows, wide + product, dtype=LOW)
        first = scratch.data_ptr()
        spare = torch.empty(rows, hidden_size, dtype=HIGH) if normed else None
        layer_out(
            address,
            rows,
            out.data_ptr(),
            hidden.data_ptr(),
            None if keep is None else keep.data_ptr(),
            first,
            first + 2 * rows * wide,
            None if spare is None else spare.data_ptr(),
            result.data_ptr(),
            torch.get_num_threads(),
        )
        return result

    return Block(enter, leave)


def wide_rows(x: Tensor) -> Tensor:
    """``x`` as the kernels read it: float32, contiguous."""
    return x if x.dtype is HIGH and x.is_contiguous() else x.to(HIGH).contiguous()
