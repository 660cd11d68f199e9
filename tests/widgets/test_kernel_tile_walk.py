"""The tile walk of a real row: what is drawn is attention, and every step is there."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from workbench.spec.errors import OptionError
from workbench.widgets.kernel_views.row import Row, attention_row
from workbench.widgets.kernel_views.tile_walk import TileWalk, walk_row


@pytest.fixture(scope="module")
def row() -> Row:
    return attention_row("tiny", keys=70, tile=16)


@pytest.fixture(scope="module")
def walked(row: Row) -> TileWalk:
    return walk_row(row, 16)


def test_the_row_is_what_the_model_computes_with(row: Row) -> None:
    """The row against the model's own attention, taken from outside at the same place."""
    from workbench.attention.reference import attend
    from workbench.models.datadir import data_dir
    from workbench.models.decoder import Decoder
    from workbench.models.plain import plain_pack
    from workbench.models.registry import open_source
    from workbench.models.tokenizer import load_tokenizer
    from workbench.models.weightset import build_weight_set

    source = open_source("tiny")
    decoder = Decoder(source.config, build_weight_set(source, plain_pack(torch.float32), torch.float32))
    text = (data_dir() / "text" / "eval.txt").read_text("utf-8")[:2000]
    ids = load_tokenizer("tiny").encode(text)[:70]
    seen: dict[int, Any] = {}

    def listening(layer: int, q: Any, k: Any, v: Any) -> Any:
        out = attend(q, k, v, torch.ones(len(q), len(q)).tril().bool())
        seen[layer] = out[-1]
        return out.flatten(1)

    with torch.inference_mode():
        decoder.forward(torch.tensor(ids), torch.arange(70), listening)
    ours = torch.softmax(row.k @ row.q, 0) @ row.v
    torch.testing.assert_close(seen[row.layer][row.head], ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("last_first", [True, False])
def test_the_last_state_is_softmax_attention_in_float64(row: Row, last_first: bool) -> None:
    found = walk_row(row, 16, last_first=last_first)
    exact = torch.softmax(row.k.double() @ row.q.double(), 0) @ row.v.double()
    torch.testing.assert_close(found.steps[-1].normalised, exact, rtol=1e-12, atol=1e-14)
    assert found.distance(len(found.steps) - 1) < 1e-12 < found.distance(0)


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_each_stop_of_the_slider_shows_one_step(walked: TileWalk, theme: Any) -> None:
    figure = walked.figure(theme)
    stops = figure.layout.sliders[0].steps
    assert len(stops) == len(walked.steps) == 5
    for number, stop in enumerate(stops):
        shown = [t for t, on in zip(figure.data, stop.args[0]["visible"], strict=True) if on]
        by_name = {t.name: t for t in shown}
        step = walked.steps[number]
        assert sorted(by_name["this tile"].x) == list(range(step.first, step.end))
        assert len(by_name["read"].x) + len(by_name["this tile"].x) + len(by_name["not read yet"].x) == 70
        assert list(by_name["running max m"].y) == pytest.approx([step.top] * 2, abs=1e-4)
        assert list(by_name["output so far"].y) == pytest.approx(step.normalised.tolist(), abs=1e-5)
        assert list(by_name["attention over all keys"].y) == pytest.approx(walked.exact.tolist(), abs=1e-5)
    assert [t.visible for t in figure.data] == list(stops[-1].args[0]["visible"])
    assert "NaN" not in figure.to_json() and len(figure.to_json()) < 100_000


def test_the_table_tells_the_lse_and_what_is_kept(walked: TileWalk) -> None:
    text = walked.table().to_text()
    lse = float(torch.logsumexp(walked.row.k.double() @ walked.row.q.double(), 0))
    assert f"{lse:.6g}" in text and "Measured" in text
    assert json.dumps(walked.table().to_dicts())


def test_rows_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(OptionError, match="layer = 99"):
        attention_row("tiny", layer=99)
    with pytest.raises(OptionError, match="head = -1"):
        attention_row("tiny", head=-1)
    for keys in (1, 10**6):
        with pytest.raises(OptionError, match="keys"):
            attention_row("tiny", keys=keys)
    chosen = attention_row("tiny", keys=20, layer=1, head=2)
    assert (chosen.layer, chosen.head, len(chosen.k)) == (1, 2, 20)
