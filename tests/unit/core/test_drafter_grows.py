"""A draft head of another size, trained while a session is open."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from workbench.core.session import Session
from workbench.models.registry import open_source
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

ASKED = {"max_tokens": 12, "ignore_eos": True}


def test_pages_have_room_for_the_head_that_is_there_now(
    random_heads: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    source = open_source("tiny")
    limits = EngineLimits(kv_pool_tokens=256, max_context=64)
    with Session("tiny", dtype="float64", numerics="pinned", limits=limits) as session:
        plain = session.generate("Why?", **ASKED)
        held = []
        for layers in (2, 4):
            tensors = random_heads.fasteagle(source.config, layers=layers)
            random_heads.put(
                tmp_path, "tiny", "fasteagle", source.fingerprint, tensors, features=[0, 1, 2], layers=layers
            )
            session.apply(Recipe.of("fasteagle")).result(timeout=60)
            run = session.generate("Why?", **ASKED)
            assert run.token_ids == plain.token_ids
            held.append(sum(v for k, v in run.memory.items() if k.startswith("kv")))
        assert held[1] > held[0]
