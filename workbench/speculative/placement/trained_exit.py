"""The exit adapter that was trained for a model, where there is one: a file of kind ``exit_adapter``."""

from __future__ import annotations

from typing import NamedTuple

from workbench.models.heads import HeadFile, find_head
from workbench.spec.errors import HeadMismatch, MissingHead
from workbench.speculative.placement.early_exit import ExitAdapter

KIND = "exit_adapter"


class TrainedExit(NamedTuple):
    """``layer`` layers run before the exit; ``adapter`` stands before the last norm then."""

    layer: int
    adapter: ExitAdapter


def find_exit(model: str, fingerprint: str, layers: int) -> TrainedExit | None:
    """The adapter for these weights of a model of ``layers`` layers; None where there is none.

    Raises :class:`HeadMismatch` for a file that does not fit what it says of itself.
    """
    try:
        return read_exit(find_head(model, KIND, fingerprint), layers)
    except MissingHead:
        return None


def read_exit(head: HeadFile, layers: int) -> TrainedExit:
    """The adapter of a file. Raises :class:`HeadMismatch`."""
    layer, tensors = head.facts.get("layer"), head.tensors()
    gain, matrix = tensors.get("gain"), tensors.get("matrix")
    fits = gain is not None and matrix is not None and gain.ndim == 1 and matrix.shape == (len(gain),) * 2
    if not fits or not isinstance(layer, int) or not 1 <= layer < layers:
        raise HeadMismatch(
            f"The exit adapter {head.path} does not fit a model of {layers} layers.",
            hint=f"Train it again: 'workbench train {KIND}'",
        )
    return TrainedExit(layer, ExitAdapter(gain, matrix))  # type: ignore[arg-type]
