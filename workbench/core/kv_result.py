"""What came of a KV method: scores and bytes of every window, and the numbers made of them.

Ratios are to 16-bit KV: of the coded rows (*codec ratio*), and of all rows with those kept exact (*whole
ratio*). What a model's payloads share is in neither; it stands beside them, in bytes, as a share of the
model's parameters, and as the tokens after which it has paid for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.core.quality_scores import WindowScores, quality_metrics
from workbench.kv.cached import CachedRows, Reconstructed
from workbench.models.decoder import Decoder
from workbench.spec.run import Metric


@dataclass
class WindowResult:
    """One window: scores, bytes, and seconds of encoding and decoding (None: not timed).

    ``tokens`` rows were given; ``sixteen`` is their size in 16 bits, ``coded_sixteen`` that of those coded;
    ``payload`` and ``coded`` are the same here. ``error`` is that of keys and values, squared, over their own
    squares (None where rows were dropped, or never came out of an engine).
    """

    scores: WindowScores
    tokens: int
    sixteen: int
    payload: int
    coded_sixteen: int
    coded: int
    encode: float | None = None
    decode: float | None = None
    error: float | None = None

    @classmethod
    def of(
        cls,
        scores: WindowScores,
        rows: CachedRows,
        found: Reconstructed,
        seconds: tuple[float, float] | None,
    ) -> WindowResult:
        """The bytes of what a method gave back for ``rows``."""
        sixteen = rows.nbytes_16bit()
        exempt = sixteen * found.exempt // max(rows.tokens, 1)
        out = cls(scores, rows.tokens, sixteen, found.payload, sixteen - exempt, found.payload - exempt)
        if seconds is not None:
            out.encode, out.decode = seconds
        out.error = squared_error(rows, found.rows)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WindowResult:
        """What :meth:`to_dict` gave; raises ``TypeError`` or ``KeyError`` for anything else."""
        made = cls(**{**data, "scores": WindowScores(**data["scores"])})
        made.check()
        return made

    def check(self) -> None:
        """Raises ``TypeError`` for a number that is none, or for lists of different lengths."""
        whole = (self.tokens, self.sixteen, self.payload, self.coded_sixteen, self.coded)
        if not all(type(n) is int and n >= 0 for n in (*whole, self.scores.scored_bytes)):
            raise TypeError("tokens and bytes are whole numbers")
        rest = (self.encode, self.decode, self.error)
        if not all(n is None or type(n) in (int, float) for n in rest):
            raise TypeError("seconds and the error are numbers, or nothing")
        s = self.scores
        lists: tuple[list[Any], ...] = (s.nll, s.plain_nll, s.kl, s.agree)
        if not all(isinstance(x, list) and len(x) == len(s.nll) > 0 for x in lists):
            raise TypeError("scores are lists of one length")
        if not all(type(n) in (int, float) for n in (*s.nll, *s.plain_nll, *s.kl)):
            raise TypeError("scores are numbers")
        if not all(type(a) is bool for a in s.agree):
            raise TypeError("agreement is true or false")

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)


@dataclass
class MethodResult:
    """All windows of one method; ``shared`` bytes of artefacts, beside ``parameters`` of the model."""

    results: list[WindowResult] = field(default_factory=list)
    shared: int = 0
    parameters: int = 0

    @property
    def windows(self) -> list[WindowScores]:
        """Scores of every window."""
        return [r.scores for r in self.results]

    def ratio(self, whole: bool) -> float | None:
        """All windows' 16-bit bytes over theirs here; None when nothing was coded."""
        if whole:
            return _over(sum(r.sixteen for r in self.results), sum(r.payload for r in self.results))
        return _over(sum(r.coded_sixteen for r in self.results), sum(r.coded for r in self.results))

    def metrics(self) -> list[Metric]:
        """Quality against exact KV, ratios, artefacts, and speed where it was timed."""
        out = quality_metrics(self.windows)
        n = len(self.results)
        for name, whole, note in (("codec_ratio", False, "coded rows"), ("whole_ratio", True, "all rows")):
            value = self.ratio(whole)
            if value is not None:
                note = f"{note}, 16-bit KV = 1"
                out.append(Metric(name, value, "×", n=n, better="higher", note=note))
        errors = [r.error for r in self.results if r.error is not None]
        if errors and len(errors) == n:
            spread = (min(errors), max(errors))
            note = "squares of the errors over those of the rows"
            out.append(
                Metric("row_error", math.fsum(errors) / n, "", n=n, spread=spread, better="lower", note=note)
            )
        return out + self._artefact() + self._rates()

    def _artefact(self) -> list[Metric]:
        if not self.shared:
            return []
        out = [Metric("artefact", self.shared, "B", better="lower", note="once per model")]
        if self.parameters:
            share = 100 * self.shared / (2 * self.parameters)
            out.append(Metric("artefact_share", share, "%", of="16-bit parameters", better="lower"))
        saved = sum(r.coded_sixteen - r.coded for r in self.results)
        tokens = sum(r.tokens * r.coded_sixteen / r.sixteen for r in self.results)
        if saved > 0:
            note = "coded tokens until what they save exceeds the artefact"
            out.append(Metric("break_even", self.shared * tokens / saved, "tok", better="lower", note=note))
        return out

    def _rates(self) -> list[Metric]:
        out = []
        sides: tuple[tuple[str, Callable[[WindowResult], float | None]], ...] = (
            ("encode_rate", lambda r: r.encode),
            ("decode_rate", lambda r: r.decode),
        )
        for name, seconds in sides:
            rates = [r.coded_sixteen / s / 1e6 for r in self.results if (s := seconds(r))]
            if rates and len(rates) == len(self.results):
                spread = (min(rates), max(rates))
                total = sum(r.coded_sixteen for r in self.results) / sum(
                    seconds(r) or 0 for r in self.results
                )
                out.append(
                    Metric(
                        name,
                        total / 1e6,
                        "MB/s",
                        n=len(rates),
                        spread=spread,
                        better="higher",
                        note="of 16-bit KV",
                    )
                )
        return out


def parameters_of(decoder: Decoder) -> int:
    """Numbers that a model has learnt; a tied head counts once."""
    weights = decoder.weights
    linears = [linear for layer in weights.layers for linear in layer.linears]
    gains = [gain for layer in weights.layers for gain in layer.gains]
    head = 0 if decoder.config.tie_embeddings else weights.head.n * weights.head.k
    tensors = (*gains, weights.embed, weights.final_gain)
    return head + sum(x.n * x.k for x in linears) + sum(t.numel() for t in tensors)


def squared_error(rows: CachedRows, back: CachedRows) -> float | None:
    """Squares of the differences over squares of the rows, summed over keys and values of all layers."""
    if back.tokens != rows.tokens:
        return None
    pairs = list(zip((*rows.k, *rows.v), (*back.k, *back.v), strict=True))
    wrong = math.fsum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    whole = math.fsum(float(a.float().square().sum()) for a, _ in pairs)
    return wrong / whole if whole else 0.0


def _over(a: int, b: int) -> float | None:
    return a / b if a and b > 0 else None
