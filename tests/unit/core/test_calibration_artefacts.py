"""What calibrations of KV formats share: measured once, remembered whole, and nothing left when cancelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from workbench.core import kv_calibration, xquant_calibration
from workbench.spec.errors import Cancelled


@dataclass(frozen=True)
class Kind:
    """A format that is calibrated: what measures it, and where the measurements are in its codec."""

    use: str
    uncalibrated: tuple[str, ...]
    module: ModuleType
    measures: str
    held: str
    spoiled: tuple[str, ...]
    start: Callable[..., Any]


def ranges(engine: Any, **kwargs: Any) -> Any:
    return kv_calibration.kv_ranges(engine.executor.decoder, lambda: engine.executor.op, **kwargs)


def harm(engine: Any, **kwargs: Any) -> Any:
    codec = engine.kv.stores[0].codec
    return xquant_calibration.sharing_harm(
        engine.executor.decoder, lambda: engine.executor.op, codec, **kwargs
    )


KINDS = [
    Kind("kv_fp4", (), kv_calibration, "kv_rows", "ranges", (), ranges),
    Kind(
        "xquant:residual=32",
        ("xquant:residual=32,schedule=none",),
        *(xquant_calibration, "Trials", "harm", ("own",), harm),
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.held)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def codec_of(lab: Any, kind: Kind) -> Any:
    return lab.make_engine("paged", kind.use).kv.stores[0].codec


def test_the_second_engine_reads_what_the_first_measured(lab, calibrations, monkeypatch, kind):
    first = codec_of(lab, kind)
    (path,) = calibrations()
    monkeypatch.setattr(kind.module, kind.measures, None)  # calling it again would fail
    second = codec_of(lab, kind)
    measured = getattr(second, kind.held)
    assert second.key == first.key and "random token ids" in measured.origin and measured.tokens > 0
    assert calibrations() == [path]


@pytest.mark.parametrize("damage", [b"", b"\0" * 64], ids=["empty", "zeros"])
def test_a_damaged_artefact_is_measured_again(lab, calibrations, damage, kind):
    first = codec_of(lab, kind)
    calibrations()[0].write_bytes(damage)
    assert codec_of(lab, kind).key == first.key
    assert calibrations()[0].stat().st_size > 64


@pytest.mark.parametrize("change", [lambda t: t * float("nan"), lambda t: t[:, :0].contiguous()])
def test_an_artefact_of_other_shape_or_without_numbers_is_measured_again(lab, calibrations, change, kind):
    first = codec_of(lab, kind)
    (path,) = calibrations()
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
        tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    save_file(tensors | {n: change(tensors[n]) for n in kind.spoiled or tensors}, path, notes)
    spoiled = path.read_bytes()
    assert codec_of(lab, kind).key == first.key
    assert path.read_bytes() != spoiled


def test_progress_is_told_and_cancel_leaves_nothing(lab, calibrations, kind):
    engine = lab.make_engine("paged", *kind.uncalibrated)
    told: list[float] = []

    def measure(cancel: Any) -> Any:
        return kind.start(
            engine,
            model="none",
            weights=("w",),
            progress=lambda done, what: told.append(done),
            cancel=cancel,
        )

    with pytest.raises(Cancelled):
        measure(lambda: len(told) == 3)
    assert calibrations() == [] and told == sorted(told)
    assert measure(None).tokens > 0
    assert told[-1] == 1.0
