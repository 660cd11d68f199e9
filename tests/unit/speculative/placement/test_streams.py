"""Speculative streams: the drafter's own chain in fewer passes, and rows that nobody else ever sees."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from workbench.models.decoder import Decoder
from workbench.models.heads import read_head, write_head
from workbench.spec.errors import HeadMismatch, OptionError
from workbench.speculative.draft_model import cut_out
from workbench.speculative.placement.messages import ROOT, Candidates, DraftSync
from workbench.speculative.placement.mirror_stream import MirrorStream
from workbench.speculative.placement.mirror_worker import MirrorWorker, Windows
from workbench.speculative.placement.streams import (
    CARRY,
    MARKS,
    StreamedKV,
    Streams,
    passes_of,
    streams_of,
)
from workbench.speculative.placement.tree_kv import TreeKV

pytestmark = pytest.mark.usefixtures("inference")

PROMPT = [7, 3, 11, 2, 5, 17, 4, 9]


@pytest.fixture
def decoder(lab: ModuleType) -> Decoder:
    target = lab.make_engine("paged").executor.decoder
    return cut_out(target, range(target.config.num_layers))


def some_streams(decoder: Decoder, count: int, layers: int, scale: float = 1.0) -> Streams:
    generator = torch.Generator().manual_seed(count)
    h, dtype = decoder.config.hidden_size, decoder.weights.residual_dtype
    carry = torch.eye(h, dtype=dtype) + 0.1 * torch.randn(h, h, generator=generator, dtype=dtype)
    return Streams(carry, scale * torch.randn(count, h, generator=generator, dtype=dtype), layers)


class Oracle(StreamedKV):
    """Streams that guess as they are told: right where a chain of the drafter's own says so."""

    def __init__(self, decoder: Decoder, right: dict[int, list[int]], count: int) -> None:
        super().__init__(decoder, None, some_streams(decoder, count, 1))
        self.right = right

    def feed(self, tokens, positions, slots, sees, asked):  # type: ignore[no-untyped-def]
        fed = super().feed(tokens, positions, slots, sees, asked)
        told = tuple(tuple(self.right.get(p, [0] * 9)[: self.streams.count]) for p in positions[-asked:])
        return type(fed)(fed.logits, told)


def chain(kv: TreeKV, length: int) -> tuple[list[int], int, MirrorStream]:
    stream = MirrorStream(kv, PROMPT, length, 2)
    ends, levels = stream.extend([ROOT], length)
    return stream.tree.tokens(ends[0]), levels, stream


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_a_row_and_its_streams_are_what_equations_2_and_3_say(decoder, count, layers):
    """Written out: each stream as a row that sees its own row's context and the streams before it."""
    streams = some_streams(decoder, count, layers)
    kv = StreamedKV(decoder, None, streams)
    n, below = len(PROMPT), decoder.config.num_layers - layers
    slots = kv.take(n)
    sees = [slots[: i + 1] for i in range(n)]
    fed = kv.feed(PROMPT, range(n), slots, sees, 2)
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    scale = 1.0  # queries come scaled

    def full(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rows and streams of the last two rows in one pass, the mask written out."""
        total = len(k)
        mask = torch.zeros(total, total, dtype=torch.bool)
        mask[:n, :n] = torch.ones(n, n).tril().bool()
        for row in (n - 2, n - 1):
            first = n + (row - n + 2) * count
            for j in range(min(count, max(0, total - first))):
                mask[first + j, : row + 1] = True
                mask[first + j, first : first + j + 1] = True
        seen[layer] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q.double(), keys.double()) * scale
        law = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", law, values.double()).flatten(1).to(q.dtype)

    at = torch.arange(n)
    brought = decoder.embed(torch.tensor(PROMPT))
    if below:
        out = decoder.forward(torch.tensor(PROMPT), at, full, layers=range(below), capture=(below,))
        brought = out.captured[below]
    begun = brought[-2:, None] @ streams.carry.T + streams.marks
    states = torch.cat((brought, begun.flatten(0, 1)))
    places = torch.cat((at, *(torch.arange(row + 1, row + 1 + count) for row in (n - 2, n - 1))))
    rest = range(below, decoder.config.num_layers)
    wanted = decoder.forward(places, places, full, states=states, layers=rest).logits
    torch.testing.assert_close(fed.logits, wanted[n - 2 : n])
    assert fed.ahead == tuple(map(tuple, wanted[n:].view(2, count, -1).argmax(-1).tolist()))


def test_what_a_row_says_does_not_know_its_streams(decoder):
    """Bit for bit the KV and nearly bit for bit the law of a drafter without streams; no slot stays."""
    plain, streamed = TreeKV(decoder), StreamedKV(decoder, None, some_streams(decoder, 2, 2, scale=50.0))
    n = len(PROMPT)
    laws = []
    for kv in (plain, streamed):
        slots = kv.take(n)
        sees = [slots[: i + 1] for i in range(n)]
        laws.append(kv.feed(PROMPT, range(n), slots, sees, n).logits)
        assert kv.used == n
    torch.testing.assert_close(laws[1], laws[0])
    more = plain.take(1)[0], streamed.take(1)[0]
    again = [
        kv.feed([1], [n], [slot], [[*range(n), slot]], 1).logits
        for kv, slot in zip((plain, streamed), more, strict=True)
    ]
    torch.testing.assert_close(again[1], again[0])


def test_the_chain_is_the_drafters_own_whatever_streams_guess(decoder):
    wanted, levels, _ = chain(TreeKV(decoder), 12)
    assert levels == 12
    for count in (1, 2, 4):
        kv = StreamedKV(decoder, None, some_streams(decoder, count, 1))
        made, passes, stream = chain(kv, 12)
        assert made == wanted and passes == 12 - stream.borne_out
        stream.check()
        stream.close()
        assert kv.used == 0


def test_guesses_that_are_borne_out_save_passes(decoder):
    """Right guesses everywhere: each pass makes one token more than there are streams; half right: fewer."""
    wanted, _, _ = chain(TreeKV(decoder), 13)
    behind = [*PROMPT, *wanted]
    right = {p: behind[p + 2 : p + 6] for p in range(len(behind))}
    for count in (1, 2, 3):
        made, passes, stream = chain(Oracle(decoder, right, count), 12)
        assert made == wanted[:12] and stream.borne_out == stream.guessed == 12 - passes
        assert passes == 1 + -(-(12 - 1) // (count + 1))  # the root's pass makes one; the last is cut short
    wrong = {p: [t[0], (t[0] + 1) % 61] for p, t in right.items() if t}
    made, passes, stream = chain(Oracle(decoder, wrong, 2), 12)
    assert made == wanted[:12] and 0 < stream.borne_out < stream.guessed
    stream.check()


def test_a_branch_that_is_taken_up_keeps_what_was_guessed(decoder):
    wanted, _, _ = chain(TreeKV(decoder), 12)
    behind = [*PROMPT, *wanted]
    right = {p: behind[p + 2 : p + 6] for p in range(len(behind))}
    stream = MirrorStream(Oracle(decoder, right, 2), PROMPT, 4, 2)
    stream.extend([ROOT], 4)
    stream.settle(wanted[:2])
    ends, left, fed = stream.step(stream.chain(4)[-1:], [4])
    assert fed and stream.tree.tokens(ends[0]) == wanted[2 : 8 - left[0]] and left[0] < 3
    stream.settle([60, 60])  # nobody foresaw this
    assert not stream.ahead.keys() - {ROOT}
    stream.check()


def test_where_positions_end_there_are_no_streams(lab, decoder):
    kv = StreamedKV(decoder, None, some_streams(decoder, 3, 1))
    last = kv.limit - 1
    slots = kv.take(2)
    fed = kv.feed([3, 4], [last - 1, last], slots, [slots[:1], slots], 2)
    assert fed.ahead == ((), ()) and fed.logits.shape[0] == 2 and kv.used == 2


def test_a_file_says_what_it_lacks(decoder, tmp_path):
    h = decoder.config.hidden_size

    def file(facts: dict[str, object], **tensors: Tensor):
        path = tmp_path / "draft.safetensors"
        write_head(path, "draft", "0" * 8, facts, {"x": torch.zeros(1), **tensors})
        return read_head(path)

    with pytest.raises(OptionError, match="cut out"):
        streams_of(None, 1, decoder)
    with pytest.raises(OptionError, match="holds no streams") as caught:
        streams_of(file({}), 1, decoder)
    assert "train streams" in caught.value.hint
    whole = {CARRY: torch.eye(h), MARKS: torch.zeros(2, h)}
    with pytest.raises(OptionError, match="holds 2"):
        streams_of(file({"streams": {"layers": 1}}, **whole), 3, decoder)
    found = streams_of(file({"streams": {"layers": 1}}, **whole), 1, decoder)
    assert found.count == 1 and found.layers == 1
    for facts, tensors in (
        ({"streams": {"layers": 99}}, whole),
        ({"streams": {"layers": "1"}}, whole),
        ({}, whole),
        ({"streams": {"layers": 1}}, {**whole, CARRY: torch.eye(h + 1)}),
        ({"streams": 3}, whole),
    ):
        with pytest.raises(HeadMismatch):
            streams_of(file(facts, **tensors), 1, decoder)

    told = file({"streams": {"layers": 1, "passes": {"0": 1.0, "1": 1.25, "2": 1.5}}}, **whole)
    assert passes_of(told) == {0: 1.0, 1: 1.25, 2: 1.5} and passes_of(None) == {}
    for facts in (
        {},
        {"streams": 3},
        {"streams": {"passes": [1]}},
        {"streams": {"passes": {"x": "y", "1": "z"}}},
    ):
        assert passes_of(file(facts, **whole)) == {}


class Mute(TreeKV):
    """Logits that are no numbers from a position on."""

    def __init__(self, decoder: Decoder, since: int) -> None:
        super().__init__(decoder)
        self.since = since

    def feed(self, tokens, positions, slots, sees, asked):  # type: ignore[no-untyped-def]
        fed = super().feed(tokens, positions, slots, sees, asked)
        for row, position in enumerate(positions[-asked:]):
            if position >= self.since:
                fed.logits[row] = float("nan")
        return fed


@pytest.mark.parametrize("said", [0, 2])
def test_a_drafter_whose_logits_are_no_numbers_says_so_much_less(decoder, said):
    n = len(PROMPT)
    kv = Mute(decoder, n - 1 + said)
    wanted, _, _ = chain(TreeKV(decoder), 4)
    made, _, stream = chain(kv, 4)
    assert made == wanted[:said]
    stream.close()
    worker = MirrorWorker(kv, Windows(gamma=4, kappa=2))
    worker.handle(DraftSync(1, tuple(PROMPT)))
    tails = []
    while worker.has_work:
        tails.append(worker.work()[0])
    assert [node.token for node in tails[-1].nodes] == wanted[:said]
    places = tuple(((t, 0.0),) for t in (5, 6, 7, 8, 9))[: said + 1]
    worker.handle(Candidates(1, n, places))
    for _ in range(20):
        worker.work()
    assert not worker.has_work
