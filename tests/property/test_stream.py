"""Streamed text: pieces join to the whole, whatever the tokens and however they are cut into blocks."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from workbench.models.stream import ByteFallbackPieces, ByteLevelPieces, StreamDecoder, WindowPieces

MARK = "\ufffd"


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello world naïve 안녕 👋"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens(["<think>", "<｜tool▁call｜>"])
    return tokenizer


@functools.cache
def byte_fallback(strip: int) -> Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "▁a": 2, "b": 3, "é": 4, "▁▁": 5} | {
        f"<0x{b:02X}>": 6 + b for b in range(256)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))  # noqa: S106
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", strip, 0)] if strip else []))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    vocab = {t: i for i, t in enumerate(["<unk>", "▁hello", "▁world", "s", "▁", "é"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))  # noqa: S106
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def stream(tokenizer: Tokenizer, blocks: list[list[int]], skip: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip)
    return [*(decoder.push(block) for block in blocks), decoder.finish()]


def blocks_of(size: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, size - 1), max_size=6), max_size=24)


@given(blocks=blocks_of(byte_level().get_vocab_size()), skip=st.booleans())
def test_smp_01_byte_level_pieces_join_to_the_whole_for_any_ids(blocks, skip):
    whole = byte_level().decode([i for block in blocks for i in block], skip_special_tokens=skip)
    assert "".join(stream(byte_level(), blocks, skip)) == whole


@given(blocks=blocks_of(262), strip=st.integers(0, 2))
def test_smp_01_byte_fallback_pieces_join_to_the_whole_for_any_ids(blocks, strip):
    tokenizer = byte_fallback(strip)
    whole = tokenizer.decode([i for block in blocks for i in block])
    assert "".join(stream(tokenizer, blocks)) == whole


@given(blocks=blocks_of(6))
def test_pieces_of_other_decoders_join_to_the_whole(blocks):
    whole = metaspace().decode([i for block in blocks for i in block])
    assert "".join(stream(metaspace(), blocks)) == whole


@given(text=st.text(max_size=40), size=st.integers(1, 5))
@pytest.mark.parametrize("make", [byte_level, lambda: byte_fallback(0)])
def test_smp_01_no_piece_of_real_text_holds_a_replacement_mark(make, text, size):
    ids = make().encode(text.replace(MARK, "")).ids
    whole = make().decode(ids)
    pieces = stream(make(), [ids[i : i + size] for i in range(0, len(ids), size)])
    assert "".join(pieces) == whole
    assert not any(MARK in piece for piece in pieces)


@pytest.mark.parametrize("make", [byte_level, lambda: byte_fallback(0)])
@pytest.mark.parametrize("text", ["👋", "안녕하세", "👋🏽 e\u0301 안녕하세 ok"])
def test_smp_01_waving_hand_and_korean_one_token_at_a_time(make, text):
    ids = make().encode(text).ids
    assert len(ids) > 1
    each_alone = "".join(make().decode([i]) for i in ids)
    assert MARK in each_alone  # what decoding token by token would show
    pieces = stream(make(), [[i] for i in ids])
    assert "".join(pieces) == make().decode(ids) == text
    assert not any(MARK in piece for piece in pieces)


def test_text_is_not_held_back_longer_than_its_character():
    decoder, ids = StreamDecoder(byte_level()), byte_level().encode("안a").ids
    shown = ""
    for i in ids[:-1]:
        shown += decoder.push([i])
    assert shown == "안"


def test_a_bad_byte_shows_once_it_cannot_be_completed():
    vocab = byte_level().get_vocab()
    lead = vocab["ì"]  # 0xEC, the first byte of three
    decoder = StreamDecoder(byte_level())
    assert decoder.push([lead]) == ""
    assert decoder.push([vocab["a"]]) == MARK + "a"
    assert decoder.push([lead]) == ""
    assert decoder.finish() == MARK


def test_the_rule_is_chosen_from_the_decoder():
    assert isinstance(StreamDecoder(byte_level())._pieces, ByteLevelPieces)
    assert isinstance(StreamDecoder(byte_fallback(1))._pieces, ByteFallbackPieces)
    assert isinstance(StreamDecoder(metaspace())._pieces, WindowPieces)


def test_work_per_token_does_not_grow_with_the_text():
    seen: list[int] = []
    pieces = WindowPieces(lambda ids: seen.append(len(ids)) or "x" * len(ids))
    for i in range(500):
        pieces.push("x", i)
    assert max(seen) < 16
