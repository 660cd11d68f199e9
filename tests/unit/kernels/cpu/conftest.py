"""The compiled kernels in two forms: for this processor, and as any x86-64 of ten years ago."""

from __future__ import annotations

import platform
from ctypes import CDLL

import pytest

from workbench.kernels.cpu import compiler, library
from workbench.models.cache import cache_dir

FORMS = {"native": compiler.NATIVE, "portable": ("-march=x86-64-v3",)}


@pytest.fixture(scope="session", params=FORMS)
def compiled_kernels(request: pytest.FixtureRequest) -> CDLL:
    """The library of one form, from the cache or compiled now."""
    if not compiler.supported() or compiler.find() is None:
        pytest.skip("needs 64-bit Linux and a C++ compiler")
    if request.param == "portable" and platform.machine() != "x86_64":
        pytest.skip("the native form is the portable one here")
    return library.load(compiler.build(cache_dir() / "kernels" / "cpu", FORMS[request.param]))
