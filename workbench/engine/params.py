"""What a request asks of sampling: one frozen, validated record.

Field names and meanings are those of the OpenAI and vLLM interfaces. A value out of range raises
:class:`~workbench.spec.errors.SamplingError` naming the field, the value and the range, for that
request only; nothing later in the engine has to check again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.spec.errors import SamplingError


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request; ``n`` samples of one prompt share them.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``repetition_penalty``
    counts prompt and output, ``presence_penalty`` and ``frequency_penalty`` output only.
    ``logprobs`` None: none; m: of each token, and of the m most likely ones. ``prompt_logprobs`` likewise.
    What ``seed`` means for several samples and prompts: :mod:`workbench.engine.noise`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 128
    n: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._real("temperature", 0.0, math.inf, "a finite number of at least 0")
        self._real("top_p", 0.0, 1.0, "a number above 0 and at most 1", open_low=True)
        self._real("min_p", 0.0, 1.0, "a number from 0 to 1")
        self._real("repetition_penalty", 0.0, math.inf, "a finite number above 0 (1 is off)", open_low=True)
        self._real("presence_penalty", -2.0, 2.0, "a number from -2 to 2 (0 is off)")
        self._real("frequency_penalty", -2.0, 2.0, "a number from -2 to 2 (0 is off)")
        self._whole("top_k", 0, "a whole number of at least 0 (0 is off)")
        self._whole("max_tokens", 0, "a whole number of at least 0 (0 scores the prompt only)")
        self._whole("n", 1, "a whole number of at least 1")
        self._whole("seed", 0, "a whole number from 0 to 2**64 - 1", high=2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, "None or a whole number of at least 0")
        for name in ("include_stop", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise self._error(name, "True or False")
        self._stops()

    @property
    def greedy(self) -> bool:
        """The most likely token always wins; no randomness is used."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Scores depend on what was said before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def plain_greedy(self) -> bool:
        """Greedy on the model's own logits: the argmax needs no processing at all."""
        return self.greedy and not self.penalised

    def _error(self, name: str, allowed: str) -> SamplingError:
        return SamplingError(f"{name} = {getattr(self, name)!r} cannot be used.", hint=f"It takes {allowed}.")

    def _real(self, name: str, low: float, high: float, allowed: str, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or not low <= value <= high or (open_low and value == low):
            raise self._error(name, allowed)

    def _whole(self, name: str, low: int, allowed: str, *, high: int | None = None) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self._error(name, allowed)
        if high is not None and value > high:
            raise self._error(name, allowed)

    def _stops(self) -> None:
        # One bare string is one stop: taken as a sequence it would stop at each of its letters.
        given: object = self.stop
        stops = (given,) if isinstance(given, str) else given
        if not isinstance(stops, tuple | list) or not all(isinstance(s, str) and s for s in stops):
            raise self._error("stop", "a tuple of non-empty strings")
        object.__setattr__(self, "stop", tuple(stops))
