"""A greedy chain of drafts as one call: every step of a head of one layer, for some sequences.

The compiled kernels run what :class:`~workbench.models.feature_decoder.FeatureDecoder` runs step by step, on
the same rows in the same order, so the ids are the same. What Python does between the steps, and costs more
than the steps, falls away.
"""

from __future__ import annotations

from array import array
from ctypes import addressof
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.cpu import library
from workbench.models.compiled import LOW, Native, native_layer
from workbench.models.compiled_join import native_join
from workbench.models.feature_decoder import FeatureDecoder


@dataclass
class ChainBatch:
    """Sequences to draft for: ``spans`` int32 [n, 4] (committed tokens to be fed, slot and position of the
    first, tokens to be drafted at most, where its pages begin in ``tables``), ``tokens`` int64 to be fed, all
    sequences in order, and their ``states`` [R, H]. A chain ends behind a token that the head gives, with all
    before it, less than ``confidence``."""

    spans: array[int]
    tables: array[int]
    tokens: array[int]
    states: Tensor
    confidence: float


class ChainProgram:
    """A head bound to the kernels; see :func:`chain_program`. ``ids``: int64, the tokens it drafts from."""

    LONGEST = 16
    """Committed tokens that one call feeds per sequence, as many as attention takes for a short span."""

    def __init__(self, decoder: FeatureDecoder, head: library.Head, held: tuple[object, ...]) -> None:
        self._decoder = decoder
        self._head = head
        self._held = held
        self._run = decoder.weights.layers[0].qkv.native.kernels.draft_chain

    def __call__(self, batch: ChainBatch, k: Tensor, v: Tensor) -> list[list[int]]:
        """Drafted tokens of each sequence; K and V of all rows are written.

        ``k``, ``v``: bfloat16 [N, Hkv, P, D], contiguous. Raises ``PromptTooLong`` beyond the context limit.
        """
        config = self._decoder.config
        size, page = len(batch.spans) // 4, k.shape[2]
        shape = library.Shape(
            config.num_heads, config.num_kv_heads, config.head_dim, page, config.attn_softcap or 0.0
        )
        most = max(batch.spans[2::4])
        reach = max(map(sum, zip(batch.spans[::4], batch.spans[1::4], batch.spans[2::4], strict=True)))
        turns = self._decoder.turns(reach - 2)  # the last token of a draft is not fed
        states = batch.states.contiguous()
        out, lengths = array("q", bytes(8 * size * most)), array("i", bytes(4 * size))
        self._run(
            addressof(self._head),
            addressof(shape),
            _at(batch.spans),
            size,
            _at(batch.tokens),
            states.data_ptr(),
            _at(batch.tables),
            turns.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            batch.confidence,
            most,
            _at(out),
            _at(lengths),
            torch.get_num_threads(),
        )
        return [out[i * most : i * most + n].tolist() for i, n in enumerate(lengths)]


def chain_program(decoder: FeatureDecoder, ids: Tensor | None) -> ChainProgram | None:
    """The program of a head, or None where the kernels do not have its form.

    They have one layer behind an entrance of embedding and state side by side, with all its weights and those
    of the output matrix in panels, and logits that are not capped.
    """
    config, weights, entrance = decoder.config, decoder.weights, decoder.entrance.joined
    out, layer = weights.head, weights.layers[0]
    if type(decoder) is not FeatureDecoder or entrance is None or config.num_layers != 1:
        return None
    parts = [out, *layer.linears, *([] if entrance.project is None else [entrance.project])]
    if not all(isinstance(x.native, Native) for x in parts) or config.final_softcap is not None:
        return None
    embed = weights.embed
    if embed.dtype is not LOW or not embed.is_contiguous():
        return None
    width, eps = config.hidden_size, config.norm_eps
    native = native_layer(layer, config)
    both = native_join(entrance.join.gains, eps, width)
    gains = [layer.attn_gain] if entrance.first is None else entrance.first.gains
    first = native_join(gains, eps, width)
    final = weights.final_gain.to(torch.float32).contiguous() if decoder.normed else None
    tokens = None if ids is None else ids.to(torch.int64).contiguous()
    head = library.Head(
        project=library.Linear() if entrance.project is None else entrance.project.native.struct,
        out=out.native.struct,
        entrance=both.struct,
        first=first.struct,
        layer=addressof(native.struct),
        embed=embed.data_ptr(),
        final_gain=None if final is None else final.data_ptr(),
        ids=None if tokens is None else tokens.data_ptr(),
        embed_scale=decoder.embed_scale,
    )
    return ChainProgram(decoder, head, (native, both, first, final, tokens, parts, embed))


def _at(values: array[int]) -> int:
    return values.buffer_info()[0]
