"""Codecs for storage as methods that can be measured: KVTC and CacheGen, calibrated on the model at hand.

All methods of one codec are prepared together, so that one calibration serves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench.core.bound import attention_op
from workbench.core.build_weights import weights_key
from workbench.core.cachegen_calibration import cachegen_artefact
from workbench.core.kv_prepared import Clock, Prepared
from workbench.core.kvtc_calibration import kvtc_calibration
from workbench.core.kvtc_plans import remembered_plan
from workbench.kv.cached import CachedRows, Reconstructed
from workbench.kv.cachegen import config as cachegen_options
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.context import encode_context, join
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import DELTA_LEVELS, LEVELS, Level, alphabets
from workbench.kv.kvtc import config as kvtc_options
from workbench.kv.kvtc.artefact import Calibration
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.graded import Graded, grades
from workbench.kv.kvtc.joint import JointRows
from workbench.models.decoder import Decoder
from workbench.models.progress import Cancel, Progress
from workbench.spec.plan import Plan
from workbench.spec.recipe import Use
from workbench.spec.technique import Scalar, make_config


@dataclass(frozen=True)
class Bench:
    """Where methods are prepared: a plain plan, its decoder, whom to tell and whom to ask."""

    plan: Plan
    decoder: Decoder
    progress: Progress | None = None
    cancel: Cancel | None = None

    @property
    def calibrating(self) -> dict[str, Any]:
        """What every calibration is told of the model."""
        return {
            "model": self.plan.model,
            "weights": weights_key(self.plan),
            "progress": self.progress,
            "cancel": self.cancel,
        }


@dataclass(frozen=True)
class Later:
    """A method that is made once the model is there."""

    make: Callable[[Bench], Prepared]


@dataclass(frozen=True)
class Storage:
    """One codec: its options, the points of its curve, and how methods with some options are prepared.

    ``aliases``: an option's short name, and the options it sets.
    """

    config: type
    sweep: tuple[str, ...]
    prepare: Callable[[Bench, Sequence[Any]], list[Prepared]]
    aliases: Mapping[str, tuple[str, ...]]

    def configure(self, id: str, options: Mapping[str, Scalar]) -> Any:
        """Its config; raises :class:`OptionError`."""
        full: dict[str, Scalar] = {}
        for name, value in options.items():
            for one in self.aliases.get(name, (name,)):
                full.setdefault(one, value)
        return make_config(
            self.config, {**full, **{n: v for n, v in options.items() if n not in self.aliases}}, id
        )


def kvtc(bench: Bench, configs: Sequence[kvtc_options.Config]) -> list[Prepared]:
    """KVTC at several options, calibrated once."""
    calibration, joint, out = kvtc_calibrated(bench), JointRows(bench.decoder.config), []
    for c in configs:
        codec = Kvtc(
            calibration.artefact(c.k_ratio, c.v_ratio, remembered_plan),
            joint,
            bench.decoder.weights.fingerprint,
            sinks=c.sinks,
            window=c.window,
            entropy=c.entropy,  # type: ignore[arg-type]  # Kvtc refuses what is no stage
        )
        out.append(kvtc_method(codec))
    return out


def kvtc_calibrated(bench: Bench, **how: Any) -> Calibration:
    """KVTC's calibration of the model; ``how`` are keywords of :func:`kvtc_calibration`."""
    config = bench.decoder.config
    op = partial(attention_op, bench.plan, config)
    return kvtc_calibration(bench.decoder, op, **{**bench.calibrating, **how})


def kvtc_method(codec: Kvtc) -> Prepared:
    """One KVTC codec as a method."""
    clock = Clock()

    def run(rows: CachedRows) -> Reconstructed:
        with clock.encoding():
            data = codec.encode(rows)
        with clock.decoding():
            stored = codec.open(data)
            back = stored.rows()
        return Reconstructed(back, len(data), stored.header.tokens - stored.header.coded)

    return Prepared(run, f"{codec.key}/{codec.entropy}", codec.shared_bytes, clock)


def graded(bench: Bench, configs: Sequence[kvtc_options.GradedConfig]) -> list[Prepared]:
    """KVTC by age at several options, calibrated once."""
    calibration, joint = kvtc_calibrated(bench), JointRows(bench.decoder.config)
    model, out = bench.decoder.weights.fingerprint, []
    for c in configs:
        codec = Graded(
            calibration,
            joint,
            model,
            grades(c.near),
            (c.k_ratio, c.v_ratio),
            sinks=c.sinks,
            window=c.window,
            entropy=c.entropy,  # type: ignore[arg-type]  # Kvtc refuses what is no stage
            planner=remembered_plan,
        )
        out.append(_graded_method(codec))
    return out


def _graded_method(codec: Graded) -> Prepared:
    clock = Clock()

    def run(rows: CachedRows) -> Reconstructed:
        with clock.encoding():
            payloads = codec.encode(rows)
        with clock.decoding():
            back = codec.decode(rows, payloads)
        return Reconstructed(back, sum(map(len, payloads)), codec.exempt(rows))

    return Prepared(run, codec.key, codec.shared_bytes, clock)


def cachegen(bench: Bench, configs: Sequence[cachegen_options.Config]) -> list[Prepared]:
    """CacheGen at several levels, calibrated once."""
    codec = cachegen_codec(bench, [cachegen_options.level_of(c) for c in configs])
    return [cachegen_method(codec, c) for c in configs]


def cachegen_codec(bench: Bench, wanted: Sequence[Level] = ()) -> CacheGen:
    """CacheGen with tables of the model for the usual levels, and for those ``wanted`` beyond."""
    config = bench.decoder.config
    usual = (*LEVELS, *DELTA_LEVELS, *map(cachegen_options.level_of, _swept()))
    known = set(alphabets(usual))
    more = tuple(level for level in wanted if set(alphabets((level,))) - known)
    op = partial(attention_op, bench.plan, config)
    artefact = cachegen_artefact(bench.decoder, op, levels=(*usual, *more), **bench.calibrating)
    return CacheGen(artefact, Layout(config), bench.decoder.weights.fingerprint)


def cachegen_method(codec: CacheGen, config: cachegen_options.Config) -> Prepared:
    """One level of a CacheGen codec as a method."""
    clock, level = Clock(), cachegen_options.level_of(config)

    def run(rows: CachedRows) -> Reconstructed:
        if not rows.tokens:
            return Reconstructed(rows, 0)
        with clock.encoding():
            payloads = [v[0] for v in encode_context(codec, rows, [level], chunk=config.chunk)]
        with clock.decoding():
            back = join([codec.decode(data) for data in payloads])
        return Reconstructed(back, sum(map(len, payloads)))

    return Prepared(run, f"{codec.key(level)}/{config.chunk}", codec.artefact.nbytes(level), clock)


STORAGE: dict[str, Storage] = {
    "kvtc": Storage(kvtc_options.Config, kvtc_options.SWEEP, kvtc, kvtc_options.SHORT),
    "kvtc_graded": Storage(kvtc_options.GradedConfig, kvtc_options.GRADED_SWEEP, graded, kvtc_options.SHORT),
    "cachegen": Storage(cachegen_options.Config, cachegen_options.SWEEP, cachegen, cachegen_options.SHORT),
}


def _swept() -> list[cachegen_options.Config]:
    texts = cachegen_options.SWEEP
    return [
        STORAGE["cachegen"].configure("cachegen", dict(Use.parse(f"cachegen:{t}").options)) for t in texts
    ]
