"""Methods with one thing taken away, each through the code of the method itself: what must make it worse.

Every one is an option of the functions it is made of, never a copy of them. Factors of rows are powers of
two, so that what is seen is the format's doing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from workbench.core import catalog
from workbench.core.bound import context_of
from workbench.core.build import standalone_engine
from workbench.core.kv_prepared import Prepared
from workbench.core.kv_storage_methods import (
    Bench,
    cachegen_codec,
    cachegen_method,
    kvtc_calibrated,
    kvtc_method,
)
from workbench.engine.seams import KVCodec, PageGeometry, PlaneSpec
from workbench.kv.cached import CachedRows, Reconstructed, RoundTrip, page_format
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.config import Config as CacheGenConfig
from workbench.kv.cachegen.config import level_of
from workbench.kv.cachegen.context import cut, join, spans
from workbench.kv.cachegen.quantize import decode_rows, encode_rows
from workbench.kv.kivi import KiviCodec, decode_values, encode_values
from workbench.kv.kvtc.artefact import Calibration
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.joint import JointRows
from workbench.kv.kvtc.plan import truncated_plan
from workbench.kv.selection.baseline import RandomConfig, random_selector

PAGE = 64
LARGE, SMALL = 1024.0, 2.0**-8


def scaled(trip: RoundTrip, k: float, v: float) -> RoundTrip:
    """A round trip of rows whose keys and values were multiplied beforehand, and divided afterwards."""

    def times(rows: CachedRows, k: float, v: float) -> CachedRows:
        return replace(rows, k=tuple(x * k for x in rows.k), v=tuple(x * v for x in rows.v))

    def run(rows: CachedRows) -> Reconstructed:
        found = trip(times(rows, k, v))
        return replace(found, rows=times(found.rows, 1 / k, 1 / v))

    return run


def fp8_unit_large(bench: Bench) -> Prepared:
    """FP8 without a scale, keys times 1,024: what lies beyond 448 saturates."""
    codec = _unscaled(bench, "kv_fp8")
    return Prepared(scaled(page_format(codec, PAGE), LARGE, 1.0), f"{codec.key}/k*{LARGE:g}")


def fp4_unit_small(bench: Bench) -> Prepared:
    """NVFP4 without the scale per layer, rows times 2^-8: block scales fall into E4M3's subnormals."""
    codec = _unscaled(bench, "kv_fp4")
    return Prepared(scaled(page_format(codec, PAGE), SMALL, SMALL), f"{codec.key}/kv*{SMALL:g}")


def kivi_keys_per_token(bench: Bench) -> Prepared:
    """KIVI at 2 bits with keys grouped as values are, per token: a loud channel costs its neighbours."""
    codec = _KeysPerToken(2)
    return Prepared(page_format(codec, codec.residual), f"{codec.key}/keys per token")


@dataclass(frozen=True)
class _KeysPerToken(KiviCodec):
    """Planes of keys have the form of those of values."""

    def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        made = {p.name: p for p in KiviCodec.planes(self, geometry)}
        return tuple(replace(made[f"v{n[1:]}"], name=n) if n[0] == "k" else p for n, p in made.items())

    def encode(self, planes: Mapping[str, Tensor], where: Tensor, k: Tensor, v: Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            found = encode_values(x, self.bits, self.group)
            for part, values in zip(("", "_min", "_step"), found, strict=True):
                planes[f"{name}{part}"][where] = values

    def decode(self, planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
        for name, out in (("k", k), ("v", v)):
            codes, low, step = (planes[f"{name}{p}"].index_select(0, pages) for p in ("", "_min", "_step"))
            decode_values(codes, low, step, self.bits, out)


def kvtc_no_sinks(bench: Bench) -> Prepared:
    """KVTC 8x with the first tokens coded like all others."""
    return _kvtc(bench, 8, kvtc_calibrated(bench), sinks=0)


def kvtc_by_head(bench: Bench) -> Prepared:
    """KVTC 16x whose components mix the features of one head only."""
    return _kvtc(bench, 16, kvtc_calibrated(bench, block=bench.decoder.config.head_dim))


def kvtc_by_layer(bench: Bench) -> Prepared:
    """KVTC 16x whose components mix the features of one layer only."""
    return _kvtc(bench, 16, kvtc_calibrated(bench, block=JointRows(bench.decoder.config).width))


def kvtc_no_program(bench: Bench) -> Prepared:
    """KVTC 32x with its budget spent on leading components alone, all in fp8."""
    joint, calibration = JointRows(bench.decoder.config), kvtc_calibrated(bench)
    artefact = calibration.artefact(32, 32, truncated_plan)
    return kvtc_method(Kvtc(artefact, joint, bench.decoder.weights.fingerprint))


def cachegen_pooled(bench: Bench) -> Prepared:
    """CacheGen with one probability table per side instead of one per layer and channel."""
    codec = cachegen_codec(bench)
    return cachegen_method(
        CacheGen(codec.artefact.pooled(), codec.layout, codec.artefact.model), CacheGenConfig()
    )


def cachegen_exact_anchors(bench: Bench) -> Prepared:
    """CacheGen's deltas taken to anchors as they were, not as they decode; nothing is coded to bytes."""
    config, layers = CacheGenConfig(delta=True), bench.decoder.config.num_layers
    level = level_of(config)

    def side(x: Tensor, name: str, layer: int) -> Tensor:
        alphabet = level.alphabet("k" if name == "k" else "v", layer, layers)
        back = decode_rows(encode_rows(x.float().flatten(1), alphabet, decoded=False), alphabet)
        return back.view(x.shape).to(x.dtype)

    def run(rows: CachedRows) -> Reconstructed:
        out = []
        for begin, end in spans(rows.tokens, config.chunk):
            piece = cut(rows, begin, end)
            k = tuple(side(x, "k", i) for i, x in enumerate(piece.k))
            out.append(CachedRows(k, tuple(side(x, "v", i) for i, x in enumerate(piece.v)), piece.positions))
        return Reconstructed(join(out), 0)

    return Prepared(run, f"cachegen/exact anchors/{level}/{config.chunk}")


def curdkv_random(bench: Bench) -> Prepared:
    """CurDKV's number of tokens drawn at random, for each layer and head; recent ones kept as well."""
    selector = random_selector(RandomConfig(recent=64))
    plan = replace(bench.plan, provides=(*bench.plan.provides, "paged"))  # what is dropped is freed by pages
    return Prepared(
        None, f"{selector.key}/engine", engine=lambda: standalone_engine(plan, bench.decoder, selector)
    )


ABLATIONS: dict[str, Callable[[Bench], Prepared]] = {
    "fp8, scale 1, K × 1024": fp8_unit_large,
    "nvfp4, scale 1, rows × 2^-8": fp4_unit_small,
    "kivi 2 bits, K per token": kivi_keys_per_token,
    "kvtc 8×, no sinks": kvtc_no_sinks,
    "kvtc 16×, basis per head": kvtc_by_head,
    "kvtc 16×, basis per layer": kvtc_by_layer,
    "kvtc 32×, no bit program": kvtc_no_program,
    "cachegen, pooled tables": cachegen_pooled,
    "cachegen delta, exact anchors": cachegen_exact_anchors,
    "curdkv, random tokens": curdkv_random,
}


def _unscaled(bench: Bench, id: str) -> KVCodec:
    technique = catalog.get(id)
    context = context_of(bench.plan, bench.decoder.config)
    codec: KVCodec = technique.bind(technique.configure({"scale": "unit"}), context)
    return codec


def _kvtc(bench: Bench, ratio: float, calibration: Calibration, sinks: int = 4) -> Prepared:
    artefact = calibration.artefact(ratio, ratio)
    joint = JointRows(bench.decoder.config)
    return kvtc_method(Kvtc(artefact, joint, bench.decoder.weights.fingerprint, sinks=sinks))
