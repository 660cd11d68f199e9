"""Sampling: laws against float64, draws against the law they are drawn from, then a large vocabulary."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench.case import Case, Lab, Outputs, Trial
from workbench.kernels.decode.sample import KERNELS, Filters, Noise, draw, pack_mask, reference, sample

#: Temperature, top-k, top-p, min-p of the rows, in turn.
SETTINGS = (
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.8, 50, 0.8, 0.02),
)


def settings(lab: Lab, rows: int, only: int | None = None) -> Filters:
    """Filters of ``rows`` rows: all kinds in turn, or one kind."""
    taken = [SETTINGS[i % len(SETTINGS) if only is None else only] for i in range(rows)]
    columns = [list(column) for column in zip(*taken, strict=True)]
    return Filters.rows(columns[0], columns[1], columns[2], columns[3], lab.device)


def noise(lab: Lab, rows: int) -> Noise:
    """A seed a row, all at one position."""
    seeds = lab.integers(0, 2**62, rows, dtype=torch.int64)
    return Noise(seeds, torch.zeros_like(seeds), torch.full_like(seeds, 1000))


def make(lab: Lab, *, rows: int, vocabulary: int, masked: bool = False, only: int | None = None) -> Trial:
    """Logits as a model's: bf16, a few likely tokens; the token must be one that its law allows."""
    logits = (lab.normal(rows, vocabulary, dtype=torch.float32) * 3).bfloat16()
    allowed = lab.integers(0, 3, rows, vocabulary) > 0
    allowed[:, 1] = True
    filters, keys = settings(lab, rows, only), noise(lab, rows)
    arguments: dict[str, Any] = {"logits": logits, "filters": filters, "noise": keys}
    arguments["mask"] = pack_mask(allowed) if masked else None

    def outputs(found: tuple[Tensor, Tensor]) -> Outputs:
        token, p = found
        chosen = p.gather(1, token.clamp(0, vocabulary - 1)[:, None])
        return {"law": p, "outside": (chosen <= 0) | (token[:, None] < 0)}

    def exact() -> Outputs:
        p = reference(logits, filters, allowed if masked else None)
        return {"law": p, "outside": torch.zeros(rows, 1, dtype=torch.bool, device=lab.device)}

    def sorting(logits: Tensor, filters: Filters, noise: Noise, mask: Any) -> Outputs:
        _sorting(logits, filters)
        return {}

    return Trial(
        arguments,
        functools.partial(sample, check=False),
        exact,
        outputs=outputs,
        within={"law": 2e-5, "outside": 0.0},
        baselines={"torch sort": sorting},
    )


def _sorting(logits: Tensor, filters: Filters) -> Tensor:
    """The usual way: sort, cut by rank and by mass, softmax, exponential race."""
    x = logits.float() / filters.temperature.clamp(min=1e-5)[:, None]
    x, order = x.sort(dim=-1, descending=True)
    rank = torch.arange(x.shape[1], device=x.device)
    x = x.masked_fill((rank >= filters.top_k[:, None]) & (filters.top_k[:, None] > 0), -torch.inf)
    p = x.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= filters.top_p[:, None], 0.0)
    p = p.masked_fill(p.log() < p[:, :1].log() + filters.min_log[:, None], 0.0)
    won = (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)
    return order.gather(1, won)


def make_draws(lab: Lab, *, rows: int, vocabulary: int) -> Trial:
    """Many rows of one law: frequencies are the law, up to what ``rows`` draws give (about 1.5 %)."""
    p = (lab.normal(1, vocabulary, dtype=torch.float32) * 1.5).softmax(-1)

    arguments = {"p": p.expand(rows, -1).contiguous(), "noise": noise(lab, rows)}
    return Trial(
        arguments,
        draw,
        exact=lambda: {"frequency": p.double()},
        outputs=lambda found: {"frequency": frequency(found, vocabulary)},
        within={"frequency": 0.08},
    )


def frequency(drawn: Tensor, vocabulary: int) -> Tensor:
    """How often each token was drawn, float64 [1, V]; what is no token counts as none."""
    kept = drawn[(drawn >= 0) & (drawn < vocabulary)]
    return torch.bincount(kept, minlength=vocabulary).double()[None] / len(drawn)


def _case(name: str, timed: bool = False, only: int | None = None, **sizes: Any) -> Case:
    rows, vocabulary = sizes["rows"], sizes["vocabulary"]
    laws, race = (k.cost for k in KERNELS[:2])
    filtered = only is None or only >= 2
    one, two = laws(rows, vocabulary, filtered=filtered), race(rows, vocabulary)
    work = type(one)(one.flops + two.flops, one.bytes + two.bytes)
    return Case("sample", name, make, {**sizes, "only": only}, work, timed=timed)


_DRAWS = {"rows": 16384, "vocabulary": 40}
CASES = (
    _case("6 rows of 50", rows=6, vocabulary=50),
    _case("6 rows of 3000, masked", rows=6, vocabulary=3000, masked=True),
    _case("24 rows of 32000", rows=24, vocabulary=32000, masked=True),
    Case("sample", "frequencies", make_draws, _DRAWS, KERNELS[1].cost(**_DRAWS)),
    _case("64 rows of 128256, plain", rows=64, vocabulary=128256, only=0, timed=True),
    _case("64 rows of 128256, top-k and top-p", rows=64, vocabulary=128256, only=5, timed=True),
)
