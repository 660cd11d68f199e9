"""Decoders for compiled programs: the same storages, linears that a compiler calls without looking into.

Packed kernels (oneDNN, FBGEMM, tiles of the pinned class) cannot be traced, and must not be exchanged for
others: a weight set's numbers would change with the compiler.
"""

from __future__ import annotations

from dataclasses import replace

from workbench.models.decoder import Decoder
from workbench.models.feature_decoder import FeatureDecoder
from workbench.models.packed import PackedLinear, opaque
from workbench.models.weightset import WeightSet


def opaque_weights(weights: WeightSet) -> WeightSet:
    """The same weights on the same storages."""

    def own(linear: PackedLinear) -> PackedLinear:
        return opaque(linear, weights.residual_dtype, weights.device)

    layers = tuple(
        replace(y, qkv=own(y.qkv), o=own(y.o), gate_up=own(y.gate_up), down=own(y.down))
        for y in weights.layers
    )
    return replace(weights, layers=layers, head=own(weights.head))


def opaque_decoder(decoder: Decoder) -> Decoder:
    """The same model, or the same head with its entrance."""
    weights = opaque_weights(decoder.weights)
    if not isinstance(decoder, FeatureDecoder):
        return Decoder(decoder.config, weights)
    for linear in decoder.entrance.held:
        opaque(linear, weights.residual_dtype, weights.device)
    return FeatureDecoder(decoder.config, weights, decoder.entrance, normed=decoder.normed)
