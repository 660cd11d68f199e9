"""A run's code path in words: names and options, and digits only where names do not tell two paths apart."""

from __future__ import annotations

import re

from workbench.core import catalog
from workbench.records.code_path import in_words

KVTC = "rest:kvtc/1/4/0/7fa6e20598dc040d3140ccceef9f1d44"
OTHER = "rest:kvtc/1/4/0/0123456789abcdef0123456789abcdef"
PATH = (
    "attention:torch-pages", "kv:plain/bfloat16", "linear:oneDNN bf16", "linear:FBGEMM fp16", KVTC,
    "draft:ngram",
)  # fmt: skip


def test_a_path_is_named_by_techniques_and_their_options() -> None:
    recipe = [{"id": "kvtc", "k_ratio": 8}, {"id": "ngram"}]
    assert in_words(PATH, recipe) == (
        "attention: torch-pages",
        "KV: bfloat16",
        "linear: oneDNN bf16 + FBGEMM fp16",
        "KV at rest: KVTC k_ratio=8",
        "drafting: N-gram lookup",
    )


def test_an_option_at_its_default_is_left_out() -> None:
    bits = next(o.default for o in catalog.get("kivi").options if o.name == "bits")
    assert in_words(("kv:kivi/1/2/32/128",), [{"id": "kivi", "bits": 2}]) == ("KV: KIVI bits=2",)
    assert in_words(("kv:kivi/1/4/32/128",), [{"id": "kivi", "bits": bits}]) == ("KV: KIVI",)


def test_a_selection_and_quest_are_named_too() -> None:
    select = "select:adacurdkv/1/keep=0.5/sinks=4/recent=0/protocol='aware'/score='product'"
    assert in_words((select,), [{"id": "adacurdkv"}]) == ("KV selection: AdaCurDKV",)
    quest = in_words(("attention:quest/1/128/2/torch-pages",), [{"id": "quest", "budget": 128}])
    assert quest == ("attention: Quest budget=128 on torch-pages",)


def test_digits_appear_only_where_two_paths_read_alike_and_are_not() -> None:
    assert in_words((KVTC,), beside=(KVTC,)) == ("KV at rest: KVTC",)
    assert in_words((KVTC,), beside=(OTHER,)) == ("KV at rest: KVTC #7fa6e20",)
    assert in_words(("kv:kivi/1/2/32/128",), beside=("kv:kivi/1/4/32/128",))[0].startswith("KV: KIVI #")


def test_no_long_digest_reaches_the_screen() -> None:
    unknown = ("kv:later/1/7fa6e20598dc040d3140ccceef9f1d44", *PATH)
    assert not re.search(r"[0-9a-f]{12}", " ".join(in_words(unknown)))
    assert "KV: later/1/7fa6e20" in in_words(unknown)[0]
