"""A cell without its optional package shows a sentence; any other error is an error."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.spec.errors import MissingExtra, OptionError
from workbench.widgets import kernel_views
from workbench.widgets.kernel_views.missing import Notice, optional


def test_a_missing_package_becomes_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    with optional():
        raise MissingExtra("triton<x>", "gpu", "Compiling")
    (notice,) = shown
    assert isinstance(notice, Notice)
    forms = notice._repr_mimebundle_()
    assert "Install it with" in forms["text/plain"] and "triton&lt;x&gt;" in forms["text/html"]


def test_other_errors_stay_errors_and_success_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.display.display", pytest.fail)
    with optional():
        pass
    with pytest.raises(OptionError), optional():
        raise OptionError("no")


def test_every_public_name_of_the_views_is_there() -> None:
    for name in kernel_views.__all__:
        assert callable(getattr(kernel_views, name))
    with pytest.raises(AttributeError, match="nothing"):
        kernel_views.nothing  # noqa: B018
