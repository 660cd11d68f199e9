"""One output of a request as it grows: what the events deliver, and its JSON form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from workbench.engine.params import SamplingParams
from workbench.engine.text import TextStream
from workbench.spec.events import FinishReason, RequestEvent, TokenInfo


@dataclass
class Output:
    """One sample of one prompt; ``deliveries`` are (time, tokens so far), ``pieces`` the text of each token.

    A token that only starts a character has an empty piece; the next one brings the whole character.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    sample: int
    params: SamplingParams | None = None
    stream: TextStream | None = None
    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)
    error: Mapping[str, str] | None = None

    def take(self, event: RequestEvent) -> None:
        """Add what one event delivers."""
        self.text += event.text
        self.tokens.extend(event.tokens)
        if self.stream is not None:
            self.pieces += [self.stream.push([t.id]) for t in event.tokens]
        if event.tokens:
            self.deliveries.append((event.time, len(self.tokens)))
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        self.finish = event.finish or self.finish
        self.error = event.error or self.error

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``sampling`` holds what differs from the defaults, temperature always."""
        return {
            "prompt": self.prompt,
            "prompt_tokens": len(self.prompt_ids),
            "sample": self.sample,
            "sampling": _sampling(self.params) if self.params is not None else None,
            "text": self.text,
            "token_ids": [t.id for t in self.tokens],
            "tokens": [asdict(t) for t in self.tokens],
            "pieces": self.pieces,
            "finish": self.finish,
            "cached_tokens": self.cached_tokens,
            "prompt_logprobs": {str(k): v for k, v in self.prompt_logprobs.items()},
            "error": self.error,
        }


def live_tokens(outputs: Sequence[Output], steps: Sequence[int]) -> list[tuple[int, int]]:
    """For each engine step: outputs that still run after it, and the tokens whose KV they hold.

    The newest token of an output has no KV yet; an output that ended has given its pages back.
    """
    marks = [[t.step for t in out.tokens] for out in outputs]
    rows = []
    for step in steps:
        running = tokens = 0
        for out, mark in zip(outputs, marks, strict=True):
            so_far = bisect_right(mark, step)
            if so_far and (out.finish is None or so_far < len(mark)):
                running += 1
                tokens += len(out.prompt_ids) + so_far - 1
        rows.append((running, tokens))
    return rows


def _sampling(params: SamplingParams) -> dict[str, Any]:
    # The seed differs from prompt to prompt of one run; the run's own seed stands for it.
    set_ = {f.name: getattr(params, f.name) for f in fields(params) if getattr(params, f.name) != f.default}
    set_.pop("seed", None)
    return {"temperature": params.temperature, "max_tokens": params.max_tokens, **set_}
