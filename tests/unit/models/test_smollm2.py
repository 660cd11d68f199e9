"""The default real model, where it has been fetched: decoder against transformers, and the engine on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from workbench import EngineLimits, Recipe, Session
from workbench.models.decoder import Decoder
from workbench.models.plain import plain_pack
from workbench.models.registry import open_source, resolve
from workbench.models.tokenizer import load_tokenizer
from workbench.models.weightset import build_weight_set
from workbench.spec.errors import ModelNotFound

NAME = "smollm2-135m"
TEXT = (
    "Paging splits the cache of keys and values into blocks of one size. A table maps positions to them, so "
    "memory is taken when tokens arrive and given back when a request ends, in 1, 2, 3 or 12345 steps."
)


@pytest.fixture(scope="module")
def folder() -> Any:
    try:
        return resolve(NAME)
    except ModelNotFound:
        pytest.skip(f"needs the model: workbench fetch {NAME}")


def dense(config: Any) -> Any:
    """Plain causal attention over one sequence."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = config.num_heads // config.num_kv_heads
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        s = torch.einsum("thd,shd->hts", q, k)
        hidden = torch.ones(s.shape[1:], dtype=torch.bool).triu(1)
        p = s.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", p, v).flatten(1)

    return attend


def logits_of(folder: Any, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    source = open_source(folder)
    decoder = Decoder(source.config, build_weight_set(source, plain_pack(dtype), dtype))
    with torch.inference_mode():
        return decoder.forward(ids, torch.arange(len(ids)), dense(source.config)).logits.double()


@pytest.mark.timeout(300)
def test_float32_logits_err_at_most_twice_as_much_as_transformers_own(folder: Any) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(load_tokenizer(folder).encode(TEXT))
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float64, local_files_only=True
    ).eval()
    with torch.inference_mode():
        exact = model(ids[None]).logits[0]
        theirs = model.float()(ids[None]).logits[0].double()
    ours = logits_of(folder, torch.float32, ids)
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 1e-6
    assert torch.equal(ours.argmax(-1), exact.argmax(-1))


@pytest.fixture(scope="module")
def session(folder: Any) -> Iterator[Session]:
    limits = EngineLimits(kv_pool_tokens=1024, max_context=512)
    with Session(str(folder), dtype="float32", numerics="pinned", limits=limits) as session:
        yield session


@pytest.mark.timeout(300)
def test_techniques_that_promise_exactness_keep_the_plain_answer(session: Session) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Say it twice."}]
    plain = session.generate(question, max_tokens=24)
    assert "Paris" in plain.text
    session.apply(
        Recipe.of("paged:page_size=16", "prefix_cache", "chunked_prefill:budget=16", "ngram")
    ).result()
    for _ in range(2):  # the second run finds its prompt in the prefix cache
        run = session.generate(question, max_tokens=24)
        assert run.token_ids == plain.token_ids
    assert run.outputs[0]["cached_tokens"] > 0
    session.apply(Recipe()).result()
    assert session.generate(question, max_tokens=24).token_ids == plain.token_ids


def test_numbers_are_split_into_digits(folder: Any) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("12345")
    assert [tokenizer.token(i) for i in ids] == list("12345")
