"""What two engines say about the same tokens: negative log-likelihood, KL divergence, top-1 agreement.

All from logits in float64. Windows are the repetitions: a figure's value is over all tokens, its spread the
lowest and highest window, and ``n`` the number of windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from workbench.spec.errors import RequestError
from workbench.spec.run import Metric


@dataclass
class WindowScores:
    """Per scored token of one window: ``nll`` and ``plain_nll`` (nats), ``kl`` (nats), ``agree`` (top-1)."""

    scored_bytes: int = 0
    nll: list[float] = field(default_factory=list)
    plain_nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)

    def add(self, logits: Tensor, plain: Tensor, targets: Sequence[int]) -> None:
        """Compare rows ``logits`` and ``plain`` [n, V] that predict ``targets``.

        Raises :class:`RequestError` where the plain model's are no numbers: two broken engines agree in all.
        """
        if bool(plain.isnan().any()):
            raise broken_plain()
        log_q, log_p = (torch.log_softmax(x.double(), dim=-1) for x in (logits, plain))
        index = torch.tensor(targets, device=logits.device)[:, None]
        self.nll += (-log_q.gather(1, index)[:, 0]).tolist()
        self.plain_nll += (-log_p.gather(1, index)[:, 0]).tolist()
        self.kl += kl_divergence(log_p, log_q).tolist()
        self.agree += (logits.argmax(-1) == plain.argmax(-1)).tolist()


def broken_plain() -> RequestError:
    """The error of a plain model that says nothing."""
    return RequestError(
        "The plain model's logits are not finite: there is nothing to compare with.",
        hint="Use a wider dtype, or check the model's weights.",
    )


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) per row, in nats, of log-probabilities [n, V]; tokens with p = 0 add nothing."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p)).sum(-1)


def quality_metrics(windows: Sequence[WindowScores]) -> list[Metric]:
    """Perplexity, bits per byte, KL and top-1 agreement over all windows."""
    n = len(windows)
    plain = _over(windows, lambda w: w.plain_nll, math.exp)
    ppl = _over(windows, lambda w: w.nll, math.exp)
    tokens = sum(len(w.nll) for w in windows)
    note = f"{tokens} tokens"
    ratios = [100 * math.expm1(_mean(w.nll) - _mean(w.plain_nll)) for w in windows]
    change = 100 * (ppl[0] / plain[0] - 1)
    out = [
        _metric("perplexity", ppl, "", "lower", n, note),
        _metric("perplexity_plain", plain, "", "", n, f"plain engine, {note}"),
        Metric("perplexity_change", change, "%", n=n, spread=_range(ratios), of="plain", better="lower"),
        _metric(
            "kl", _over(windows, lambda w: w.kl), "nats", "lower", n, f"KL(plain‖recipe) per token, {note}"
        ),
        Metric(
            "kl_max",
            max(v for w in windows for v in w.kl),
            "nats",
            n=tokens,
            better="lower",
            note="worst token",
        ),
        _metric(
            "top1", _over(windows, lambda w: w.agree, _percent), "%", "higher", n, f"same best token, {note}"
        ),
    ]
    if all(w.scored_bytes for w in windows):
        bits = [sum(w.nll) / math.log(2) / w.scored_bytes for w in windows]
        total = sum(sum(w.nll) for w in windows) / math.log(2) / sum(w.scored_bytes for w in windows)
        out.append(
            Metric("bits_per_byte", total, "bit/B", n=n, spread=_range(bits), better="lower", note=note)
        )
    return out


def _over(
    windows: Sequence[WindowScores],
    values: Callable[[WindowScores], Sequence[float]],
    form: Callable[[float], float] = float,
) -> tuple[float, tuple[float, float]]:
    """Mean over all tokens, and the range of the windows' means."""
    return form(_mean([v for w in windows for v in values(w)])), _range(
        [form(_mean(values(w))) for w in windows]
    )


def _metric(
    name: str,
    value: tuple[float, tuple[float, float]],
    unit: str,
    better: Literal["lower", "higher", ""],
    n: int,
    note: str,
) -> Metric:
    return Metric(name, value[0], unit, n=n, spread=value[1], better=better, note=note)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _percent(share: float) -> float:
    return 100 * share
