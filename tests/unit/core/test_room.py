"""A KV pool that the machine cannot hold is refused before it is allocated."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from workbench.core import room
from workbench.core.session import Session
from workbench.engine.page_bytes import pool_nbytes
from workbench.spec.errors import OptionError
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe


@pytest.mark.parametrize("uses", [(), ("kv_int8",), ("paged", "kivi:bits=2"), ("kv_fp8",)])
def test_bytes_asked_for_are_the_bytes_that_will_be_held(lab: ModuleType, uses: tuple[str, ...]) -> None:
    engine = lab.make_engine(*uses, dtype="bfloat16", numerics="fast")
    for store in engine.kv.stores:
        held = store.nbytes()
        assert pool_nbytes(store.codec, store.geometry) == held["kv_payload"] + held["kv_meta"]


def test_a_pool_larger_than_memory_is_refused_at_once(model_folder: Callable[[str], Path]) -> None:
    folder = str(model_folder("llama"))
    with pytest.raises(OptionError) as caught:
        Session(folder, limits=EngineLimits(kv_pool_tokens=2**38))
    said, hint = caught.value.message, caught.value.hint
    assert said.startswith("kv_pool_tokens = 274,877,906,944 needs") and "Lower kv_pool_tokens" in hint
    asked, there = (int(n.replace(",", "")) for n in re.findall(r"\(([\d,]+) bytes\)", said))
    fits = int(re.findall(r"about ([\d,]+) fit", hint)[0].replace(",", ""))
    assert there < asked and (fits - 1) * asked <= there * 2**38 <= (fits + 1) * asked


def test_a_recipe_for_which_memory_has_become_scarce_leaves_the_session_as_it_was(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = EngineLimits(kv_pool_tokens=512, max_context=128)
    with Session(str(model_folder("llama")), limits=limits) as session:
        before = session.generate("one", max_tokens=4).token_ids
        with monkeypatch.context() as scarce:
            scarce.setattr(room, "memory_limit", lambda: (2**34, 1000))
            with pytest.raises(OptionError, match="are available"):
                session.apply(Recipe.of("paged")).result(30)
        assert session.recipe == Recipe()
        assert session.generate("one", max_tokens=4).token_ids == before


def test_free_memory_of_a_gpu_counts_what_the_allocator_keeps_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * gib, 80 * gib))
    assert room.available("cuda:0") == 6 * gib
    with pytest.raises(OptionError, match="on cuda:0; 6"):
        room.require_pool(100, 7 * gib, "cuda:0")
    room.require_pool(100, 6 * gib, "cuda:0")


def test_a_device_is_present_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [room.present(d) for d in ("cpu", "cuda", "cuda:0", "cuda:1")] == [True, True, True, False]
