"""An early exit of the target as the proxy of its law: its first layers, an adapter, and its own head.

Mirror Speculative Decoding (arXiv 2510.13161) sends the likeliest tokens of an intermediate layer to the
drafter. Without an adapter this is the logit lens; an adapter is a norm and a residual H x H, trained towards
the law of the last layer (``workbench.training.heads.exit_adapter``). What the target verifies with never
passes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from workbench.models.decoder import Decoder
from workbench.models.norms import fast_norm
from workbench.spec.errors import HeadMismatch, OptionError
from workbench.speculative.draft_model import cut_out
from workbench.speculative.placement.branches import Path
from workbench.speculative.placement.tree_kv import TreeKV


@dataclass(frozen=True)
class ExitAdapter:
    """``gain`` [H] of its norm, ``matrix`` [H, H] (out, in): a stream x becomes x + matrix · norm(x)."""

    gain: Tensor
    matrix: Tensor


Leave = Callable[[Tensor], Tensor]
"""What the head is given [R, H], of the stream [R, H] that leaves a layer."""


def adapted(leave: Leave, adapter: ExitAdapter | None, decoder: Decoder) -> Leave:
    """The last norm ``leave`` with an adapter before it, in the decoder's precision.

    Raises :class:`HeadMismatch` for an adapter of another width.
    """
    if adapter is None:
        return leave
    if adapter.matrix.shape != (decoder.config.hidden_size,) * 2:
        raise HeadMismatch(
            f"The exit adapter is {len(adapter.matrix)} wide, and the model {decoder.config.hidden_size}.",
            hint="Train it again: 'workbench train exit_adapter'",
        )
    dtype = decoder.weights.residual_dtype
    norm, matrix = fast_norm(adapter.gain.to(dtype), decoder.config.norm_eps), adapter.matrix.to(dtype).T
    return lambda stream: leave(stream + norm(stream) @ matrix)


class ExitDecoder(Decoder):
    """The first ``layers`` layers of a target, its final norm and head; an ``adapter`` before them."""

    def __init__(self, target: Decoder, layers: int, adapter: ExitAdapter | None = None) -> None:
        config = target.config
        if not 1 <= layers <= config.num_layers:
            raise OptionError(
                f"An exit behind layer {layers} is not to be had.", hint=f"Choose 1 to {config.num_layers}."
            )
        part = cut_out(target, range(layers))
        super().__init__(part.config, part.weights)
        self._final_norm = adapted(self._final_norm, adapter, self)


class ExitProxy:
    """Ranks what may follow committed ids and a path, as :class:`~.mirror.MirrorDrafter` asks for it.

    It remembers the K and V of what it was asked last, so a window costs a row per token.
    """

    def __init__(self, decoder: ExitDecoder, ranks: int) -> None:
        self._kv = TreeKV(decoder)
        self._ranks = ranks
        self._known: list[int] = []
        self._slots: list[int] = []

    def __call__(self, tokens: Sequence[int], path: Path) -> list[int]:
        """The ``ranks`` likeliest ids, likeliest first."""
        context = [*tokens, *path]
        same = 0
        for mine, wanted in zip(self._known, context[:-1], strict=False):  # the last row has the logits
            if mine != wanted:
                break
            same += 1
        self._kv.give(self._slots[same:])
        del self._slots[same:]
        self._slots += self._kv.take(len(context) - same)
        self._known = context
        sees = [self._slots[: i + 1] for i in range(same, len(context))]
        fed = self._kv.feed(context[same:], range(same, len(context)), self._slots[same:], sees, 1)
        best: list[int] = fed.logits[0].topk(min(self._ranks, fed.logits.shape[-1])).indices.tolist()
        return best
