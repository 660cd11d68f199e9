"""Codecs for KV at rest, made for a model: raw, or one of the catalogue's, calibrated on its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.core import catalog
from workbench.core.binding import BindContext
from workbench.core.cachegen_calibration import cachegen_artefact
from workbench.core.kvtc_calibration import kvtc_calibration
from workbench.core.kvtc_plans import remembered_plan
from workbench.engine.at_rest import AtRest, ColdCodec
from workbench.engine.seams import AttentionOp
from workbench.kv.at_rest import CodedPages
from workbench.kv.kvtc.artefact import Artefact, Calibration
from workbench.kv.raw import RawPages
from workbench.kv.storage import Storage
from workbench.models.decoder import Decoder
from workbench.models.progress import Cancel, Progress
from workbench.models.tokenizer import Tokenizer
from workbench.spec.errors import RecipeError
from workbench.spec.recipe import Use

RAW = "raw"


def storage_ids() -> tuple[str, ...]:
    """Techniques of the catalogue that keep KV at rest."""
    return tuple(i for i in catalog.MODULES if catalog.get(i).spec.seam == "kv_storage")


def storage_use(text: str | Use) -> Use:
    """A codec for saved conversations from text such as ``kvtc:k_ratio=8``, checked; ``raw`` is one too.

    Raises :class:`RecipeError` for what is none, :class:`OptionError` for its options.
    """
    use = Use.parse(text) if isinstance(text, str) else text
    names = (RAW, *storage_ids())
    if not isinstance(use, Use) or use.id not in names:
        raise RecipeError(
            f"{getattr(use, 'id', use)!r} stores no conversations.", hint=f"Choose one of {', '.join(names)}."
        )
    if use.id == RAW:
        if use.options:
            raise RecipeError("raw has no options.", hint="It keeps pages as they are.")
        return use
    catalog.get(use.id).configure(dict(use.options))
    return use


def bound_storage(use: Use, context: BindContext) -> Storage:
    """What the technique of a use binds to."""
    technique = catalog.get(use.id)
    storage: Storage = technique.bind(technique.configure(dict(use.options)), context)
    return storage


def at_rest_codec(
    storage: Storage,
    decoder: Decoder,
    op: Callable[[], AttentionOp],
    *,
    model: str,
    weights: tuple[str, ...],
    whole: bool,
    tokenizer: Tokenizer | None = None,
    known: bool = False,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> ColdCodec:
    """The codec behind a storage technique, for conversations (``whole``) or for single pages.

    Minutes when the weights were not calibrated for it yet. ``known``: only a calibration on disk will do,
    else :class:`PayloadError`. Raises what the calibration raises, ``Cancelled`` among it.
    """
    measured = _CALIBRATIONS[storage.calibration](
        decoder,
        op,
        model=model,
        weights=weights,
        tokenizer=tokenizer,
        known=known,
        progress=progress,
        cancel=cancel,
    )
    return CodedPages(storage.make(measured, decoder.config, decoder.weights.fingerprint, whole))


def raw_codec() -> AtRest:
    """Pages as they are."""
    return RawPages()


class _Planned:
    """A KVTC calibration whose bit plans are remembered on disk."""

    def __init__(self, measured: Calibration) -> None:
        self._measured = measured

    def artefact(self, k_ratio: float, v_ratio: float) -> Artefact:
        """As :meth:`Calibration.artefact`."""
        return self._measured.artefact(k_ratio, v_ratio, remembered_plan)


def _kvtc(*args: Any, **kwargs: Any) -> Any:
    return _Planned(kvtc_calibration(*args, **kwargs))


_CALIBRATIONS: dict[str, Callable[..., Any]] = {"kvtc": _kvtc, "cachegen": cachegen_artefact}
"""What is measured of a model for the codecs at rest, once per weight set."""
