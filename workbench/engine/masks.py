"""Masks that allow or ban fixed sets of tokens, whatever was generated so far.

The simplest :class:`~workbench.engine.seams.LogitsMask`; grammars are masks that also look at the ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from workbench.spec.errors import MaskError


class TokenSetMask:
    """Only ``allow`` (None: all of the vocabulary) without ``ban`` may be generated.

    Raises :class:`MaskError` for ids the vocabulary lacks and when no token is left.
    ``key`` depends on the resulting set only, not on how it was written.
    """

    def __init__(
        self, vocab_size: int, *, allow: Iterable[int] | None = None, ban: Iterable[int] = ()
    ) -> None:
        kept = torch.full((vocab_size,), allow is None)
        if allow is not None:
            kept[_ids(allow, vocab_size, "allow")] = True
        kept[_ids(ban, vocab_size, "ban")] = False
        if not bool(kept.any()):
            raise MaskError(
                f"The mask allows none of the {vocab_size:,} tokens.", hint="Allow at least one token."
            )
        self._kept = kept
        digest = hashlib.blake2b(kept.numpy().tobytes(), digest_size=12).hexdigest()
        self.key = f"tokens:{vocab_size}:{digest}"

    def allowed(self, generated: Sequence[int], path: Sequence[int] = ()) -> Tensor | None:
        """The same boolean [V] at every position; not to be written to."""
        return self._kept


def _ids(ids: Iterable[int], vocab_size: int, name: str) -> Tensor:
    out = sorted(set(ids))
    wrong = [i for i in out if not 0 <= i < vocab_size]
    if wrong:
        shown = ", ".join(map(str, wrong[:5])) + (" …" if len(wrong) > 5 else "")
        raise MaskError(
            f"{name} names tokens the model lacks: {shown}.",
            hint=f"Token ids run from 0 to {vocab_size - 1}.",
        )
    return torch.tensor(out, dtype=torch.long)
