"""Self-made training data: loops are cut, shards are resumed, hidden states are those of the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.models.decoder import Decoder
from workbench.spec.errors import Cancelled, StorageError
from workbench.training.errors import TrainingError
from workbench.training.heads.capture import capture
from workbench.training.heads.conversations import Conversation, Making, opening
from workbench.training.heads.loops import cut_loops
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.rows import Rows, frequent, load, targets
from workbench.training.heads.run import Run
from workbench.training.heads.shards import HELD_OUT, Shards
from workbench.training.heads.target import open_target
from workbench.training.heads.unroll import Batch


def test_a_loop_is_kept_once():
    assert cut_loops([7, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3]) == 5
    assert cut_loops([5] * 30) == 1
    assert cut_loops(list(range(40)) * 2) == 80  # twice is no loop yet
    assert cut_loops([1, 2] * 3) == 6  # too short to be one


@given(st.lists(st.integers(0, 3), max_size=60))
def test_what_is_kept_holds_no_loop_and_is_the_beginning(ids):
    kept = cut_loops(ids)
    assert 0 <= kept <= len(ids)
    assert cut_loops(ids[:kept]) == kept


def test_hidden_states_are_those_that_the_engine_shows(target):
    """Many texts in one step, ragged, next to each alone; the last layer's output gives the logits."""
    texts = [[5, 6, 7, 8, 9], [3] * 70, [11, 12]]
    layers = (0, 2)
    together = list(capture(target.decoder, target.attention(), texts, layers))
    for text, streams in zip(texts, together, strict=True):
        ((first, last),) = capture(target.decoder, target.attention(), [text], layers)
        assert torch.equal(streams[0], first) and torch.equal(streams[1], last)
        assert torch.equal(first, target.decoder.embed(torch.tensor(text)))
    with target.engine(limits=replace(target.plan.limits, kv_pool_tokens=256)) as engine:
        from workbench.engine.params import SamplingParams
        from workbench.engine.sequence import Request

        engine.add(Request("a", tuple(texts[0]), SamplingParams(max_tokens=1, ignore_eos=True)))
        (event,) = engine.step()[1]
    logits = target.decoder.logits(target.decoder.final_norm(together[0][1][-1:]))
    assert int(logits.argmax()) == event.tokens[0].id


def test_shards_go_on_where_they_stopped(target, tmp_path, small_data):
    whole = Shards(target, small_data, tmp_path / "a").conversations()
    assert len(whole) > HELD_OUT and all(whole)
    asked = 0

    def cancel() -> bool:
        nonlocal asked
        asked += 1
        return asked > 40

    stopped = Shards(target, small_data, tmp_path / "b")
    with pytest.raises(Cancelled):
        stopped.conversations(cancel=cancel)
    assert [p for p in (tmp_path / "b").rglob("*") if p.suffix == ".part"] == []
    assert stopped.conversations() == whole
    more = Shards(target, replace(small_data, tokens=200), tmp_path / "b").conversations()
    assert more[: len(whole)] == whole and len(more) > len(whole)


def test_a_damaged_shard_is_made_again(target, tmp_path, small_data):
    shards = Shards(target, small_data, tmp_path)
    whole = shards.conversations()
    layers = (0, 2)
    streams = [s.clone() for s in shards.streams(0, whole[0], layers)]  # not the file, which is damaged now
    best = shards.best(0, whole[0], streams[-1])
    for path in sorted(tmp_path.glob("*.safetensors")):
        path.write_bytes(path.read_bytes()[:100])
    assert shards.conversations() == whole
    again = shards.streams(0, whole[0], layers)
    assert all(torch.equal(a, b) for a, b in zip(again, streams, strict=True))
    assert torch.equal(shards.best(0, whole[0], again[-1]), best)


def test_every_token_has_its_streams_and_what_the_model_says_next(target, tmp_path, small_data):
    """Layers asked for later are the same; where a token was drawn, the likeliest is the model's own."""
    shards = Shards(target, small_data, tmp_path)
    (shard, *_) = shards.conversations()
    both = shards.streams(0, shard, (0, 2))
    assert torch.equal(Shards(target, small_data, tmp_path).streams(0, shard, (1, 2))[1], both[1])
    assert all(s.shape[0] == sum(len(c.ids) for c in shard) and s.dtype == torch.bfloat16 for s in both)
    best = torch.split(shards.best(0, shard, both[1]), [len(c.ids) for c in shard])
    for c, likeliest, stream in zip(
        shard, best, torch.split(both[1], [len(c.ids) for c in shard]), strict=True
    ):
        assert (likeliest[: c.answer] == -1).all()
        if c.greedy:
            assert likeliest[c.answer : -1].tolist() == list(c.ids[c.answer + 1 :])
        else:
            logits = target.decoder.logits(target.decoder.final_norm(stream[c.answer :].float()))
            assert torch.equal(likeliest[c.answer :].long(), logits.argmax(-1))


def test_other_settings_and_weights_are_other_shards(target, model_folder, small_data):
    key = Shards(target, small_data).key
    assert key == Shards(target, replace(small_data, tokens=9)).key
    assert key != Shards(target, replace(small_data, making=Making(temperature=0.5))).key
    assert key != Shards(open_target(model_folder("qwen3"), dtype="float32"), small_data).key


def test_conversations_are_the_models_own_words(target, tmp_path, small_data):
    begin = opening(target.tokenizer)
    (shard, *_) = Shards(target, small_data, tmp_path).conversations()
    for c in shard:
        assert list(c.ids[: len(begin)]) == begin
        assert len(c.ids) - c.answer <= small_data.making.answer
    assert {c.greedy for c in shard} == {True, False}


def test_a_full_disk_says_so(target, tmp_path, small_data):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        Shards(target, small_data, tmp_path / "file").conversations()


def test_targets_end_with_their_conversation():
    made = [
        Rows.of(Conversation((9, 9, *answer), 2, True), torch.zeros(5, 2))
        for answer in ([1, 2, 3], [4, 5, 6])
    ]
    assert targets(made, 2).tolist() == [
        [2, 3],
        [3, -1],
        [-1, -1],
        [-1, -1],
        [5, 6],
        [6, -1],
        [-1, -1],
        [-1, -1],
    ]


def test_frequent_tokens_come_first():
    made = [Conversation((0, *ids), 1, True) for ids in ([5, 5, 2], [2, 5, 7])]
    assert frequent(made, 10, 8).tolist() == [5, 2, 7]
    assert frequent(made, 10, 2).tolist() == [5, 2]


def test_no_prompt_is_trained_on_and_held_out(target, tmp_path, monkeypatch, small_data):
    shards = Shards(target, small_data, tmp_path)
    made = shards.conversations()
    monkeypatch.setattr(shards, "conversations", lambda *_: [made[0], [*made[1], made[0][0]]])
    monkeypatch.setattr(
        shards, "streams", lambda n, shard, *_: [torch.zeros(sum(len(c.ids) for c in shard), 2)]
    )
    trained, held = load(shards, (2,))
    assert len(held) == len(made[0]) and len(trained) == len(made[1])


def test_paths(tmp_path, target, monkeypatch, small_data):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    assert Path(tmp_path) in Shards(target, small_data).folder.parents


def test_a_model_that_says_nothing_is_not_asked_for_ever(target, tmp_path, monkeypatch, small_data):
    monkeypatch.setattr("workbench.training.heads.shards.converse", lambda *args: [])
    with pytest.raises(TrainingError, match="answered none of"):
        Shards(target, small_data, tmp_path / "a").conversations()
    with pytest.raises(TrainingError, match="answered none of"):  # nor when the empty shards are read again
        Shards(target, small_data, tmp_path / "a").conversations()


def test_a_model_whose_logits_are_no_numbers_is_named_at_once(target, tmp_path, monkeypatch, small_data):
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda *args, **more: logits(*args, **more) * float("nan"))
    with pytest.raises(TrainingError, match="logits are not finite") as raised:
        Shards(target, small_data, tmp_path).conversations()
    assert "weights" in raised.value.hint


def test_a_shard_without_an_answer_is_passed_over(target, tmp_path, monkeypatch, small_data):
    talk = Conversation((3, 4, 5, *range(6, 20)), 3, True)
    other = Conversation((3, 9, 5, *range(6, 20)), 3, True)
    made = iter([[talk], [], [other] * 8])
    monkeypatch.setattr("workbench.training.heads.shards.converse", lambda *args: next(made))
    trained, held = load(Shards(target, small_data, tmp_path / "a"), (1,))
    assert (len(held), len(trained)) == (1, 8)


def test_questions_are_learnt_from_where_that_is_asked(target, small_data, cache):
    """Rows from where the user's words begin; what is held out, and what the model says often, stay."""
    answers = Shards(target, small_data)
    whole = Shards(target, replace(small_data, whole=True))
    assert whole.folder == answers.folder
    layer = target.source.config.num_layers
    trained, held = load(answers, (layer,), best=True)
    more, same = load(whole, (layer,), best=True)
    since = len(opening(target.tokenizer))
    assert since > 0 and [s.begin for s in same] == [s.conversation.answer for s in held]
    assert [s.conversation for s in more] == [s.conversation for s in trained]
    batch, wide = Batch.of(trained), Batch.of(more)
    assert len(wide.answers) == sum(len(s.conversation.ids) - 1 - since for s in more) > len(batch.answers)
    for one, other in zip(trained, more, strict=True):
        ids, answer = one.conversation.ids, one.conversation.answer
        assert other.begin == since and torch.equal(other.best[answer:], one.best[answer:])
        assert other.best[since:answer].tolist() == list(ids[since + 1 : answer + 1])
        assert bool((one.best[:answer] == -1).all())  # what was read is not written into
        rows = Rows.of(other.conversation, other.streams[0], other.begin)
        assert rows.following.tolist() == [*ids[since:], -1] and len(rows.stream) == len(rows.following)
    assert wide.best().min() >= 0 and len(wide.best()) == len(wide.following()) == len(wide.answers)
    assert torch.equal(
        wide.last(torch.float32)[: len(trained[0].conversation.ids) - 1 - since],
        more[0].streams[-1][since:-1].float(),
    )
    keys = {Run("m", "eagle3", s, Schedule(), Schedule()).key(3) for s in (answers, whole)}
    assert len(keys) == 2
