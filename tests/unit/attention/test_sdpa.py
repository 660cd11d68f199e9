"""The default entry binds the form its numerics class asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from workbench.attention.sdpa import SPEC, Config, bind
from workbench.spec.technique import options_of


@pytest.mark.parametrize(("numerics", "name"), [("fast", "torch-pages"), ("pinned", "torch-pinned")])
def test_bind_follows_the_numerics_class(numerics, name):
    context = SimpleNamespace(numerics=numerics, dtype=torch.float32, device=torch.device("cpu"))
    assert bind(Config(), context).name == name


def test_spec_is_exact_and_takes_the_attention_slot():
    assert (SPEC.id, SPEC.family, SPEC.seam, SPEC.kind) == ("sdpa", "attention", "attention", "exact")
    assert SPEC.claims_slot == ("attention",) and options_of(Config) == ()
