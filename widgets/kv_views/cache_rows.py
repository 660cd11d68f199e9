"""What lies in a KV cache: keys and values of a text as a model computes them, and a picture of one head.

Keys have channels that are loud for every token, values hardly; the first token, on which attention rests (a
sink), has rows unlike all others. Formats and codecs are built around that, so it is the first thing to see.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.core.bound import attention_op
from workbench.core.kv_calibration import kv_rows
from workbench.core.texts import shipped_text
from workbench.kv.cached import CachedRows
from workbench.spec.errors import OptionError
from workbench.widgets import figures
from workbench.widgets.palette import INKS, Theme
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine

SINKS = 4
DRAWN = 160  # tokens in the picture


@dataclass(frozen=True)
class CachePicture:
    """``rows`` of ``model``, and the ``words`` of each token."""

    model: str
    rows: CachedRows
    words: tuple[str, ...]

    def head(self, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """Keys and values [T, D] of one KV head; raises :class:`OptionError` for one that is not there."""
        heads = self.rows.k[0].shape[1]
        if not 0 <= layer < len(self.rows.k) or not 0 <= head < heads:
            raise OptionError(
                f"layer {layer}, head {head}.",
                hint=f"{self.model} has {len(self.rows.k)} layers of {heads} KV heads, both from 0 on.",
            )
        return self.rows.k[layer][:, head].float(), self.rows.v[layer][:, head].float()

    def loudest(self, layer: int, head: int, side: int) -> float:
        """How much the loudest channel stands out: its mean magnitude over the median channel's.

        ``side`` 0: keys, 1: values; the first tokens are left out.
        """
        loud = self.head(layer, head)[side][SINKS:].abs().mean(0)
        return float(loud.max() / loud.median())

    def figure(self, layer: int | None = None, head: int | None = None, theme: Theme = "auto") -> Any:
        """Magnitudes of keys and of values, token by channel, of the head whose key channels differ most."""
        layer, head = self.where(layer, head)
        k, v = self.head(layer, head)
        shown = min(len(k), DRAWN)
        title = f"One head's cache: {self.model}, layer {layer}, KV head {head} (measured)"
        out = figures.new(title, theme=theme)
        out.set_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04)
        top = float(torch.cat([k[SINKS:shown], v[SINKS:shown]]).abs().quantile(0.999))
        for col, (name, x) in enumerate((("keys", k), ("values", v)), 1):
            values = [[round(float(e), 3) for e in row] for row in x[:shown].abs()]
            out.add_heatmap(
                z=values, zmin=0, zmax=top, colorscale="Cividis", showscale=col == 2, row=1, col=col,
                hovertemplate=f"{name}, channel %{{x}}, token %{{y}}: %{{z:.3g}}<extra></extra>",
                colorbar={"title": {"text": "|x|"}, "tickcolor": INKS[theme]["axis"], "len": 0.9},
            )  # fmt: skip
            out.update_xaxes(title={"text": f"channel of the {name}"}, showgrid=False, row=1, col=col)
        token = f"token, the first {shown} of {len(k):,}" if shown < len(k) else "token"
        out.update_yaxes(title={"text": token}, autorange="reversed", row=1, col=1)
        out.update_yaxes(autorange="reversed", showgrid=False)
        out.update_layout(height=420, margin={"t": 48})  # no legend
        return out

    def where(self, layer: int | None, head: int | None) -> tuple[int, int]:
        """The head asked for; what is not given is chosen so that the loudest key channel stands out most."""
        layers = range(len(self.rows.k)) if layer is None else (layer,)
        heads = range(self.rows.k[0].shape[1]) if head is None else (head,)
        return max(((a, b) for a in layers for b in heads), key=lambda at: self.loudest(*at, 0))

    def table(self) -> Table:
        """Per layer: how far the loudest channel stands out, and how unlike the others the first token is."""
        rows = []
        for layer, (k, v) in enumerate(zip(self.rows.k, self.rows.v, strict=True)):
            heads = range(k.shape[1])
            out = [max(self.loudest(layer, h, side) for h in heads) for side in (0, 1)]
            first = [float(x[0].float().norm() / x[SINKS:].float().norm(dim=(1, 2)).median()) for x in (k, v)]
            rows.append((layer, *out, *first, "measured"))
        columns = ("layer", "key channel ×", "value channel ×", "first key ×", "first value ×", "tag")
        note = (
            f"{self.rows.tokens} tokens. Channels: the loudest one's mean magnitude over the median's in the "
            f"head where it is most, {SINKS} first tokens left out. First: its norm over the median token's."
        )
        return Table.of(columns, rows, note=note)


def read_cache(session: Session, tokens: int = 256, *, ids: Sequence[int] | None = None) -> CachePicture:
    """Keys and values of the first ``tokens`` of the shipped evaluation text, or of ``ids``.

    Computed with the session's weights, KV uncompressed, as a task of the session. Raises
    :class:`OptionError` for fewer than 8 tokens, or more than text or model hold.
    """
    if ids is None:
        ids = session.tokenizer.encode(shipped_text("evaluation")[: 16 * tokens])[:tokens]
    config = session.facts.config
    if not 8 <= len(ids) <= config.max_position or len(ids) < tokens:
        raise OptionError(
            f"A cache of {max(tokens, len(ids))} tokens.",
            hint=f"From 8 tokens on; the model reads {config.max_position:,}.",
        )
    given, plan = list(ids), session.plan

    def work(job: Job, _: Engine) -> Generator[None, None, CachedRows]:
        decoder = session.decoder(plan, lambda f, what: job.progress(f, 1.0, "", what), job.token)
        yield
        found = {layer: (k, v) for layer, k, v in kv_rows(decoder, attention_op(plan, config), given, 64)}
        k, v = (tuple(found[i][side].clone() for i in sorted(found)) for side in (0, 1))
        return CachedRows(k, v, torch.arange(len(given)))

    rows: CachedRows = session.task("reading a cache", work).result()
    words = tuple(session.tokenizer.decode([i], skip_special=False) for i in given)
    return CachePicture(str(session.plan.model), rows, words)
