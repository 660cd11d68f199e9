"""Whose fault it is when a mask fails: the request's that brought it, and no other's.

A mask is code or a grammar of a request. Whatever it raises, or gives in place of a mask, becomes the typed
error that ends its request alone; what goes wrong anywhere else is not taken for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workbench.engine.seams import LogitsMask
from workbench.spec.errors import MaskError, RequestError


@contextmanager
def asking(mask: LogitsMask) -> Iterator[None]:
    """Around a question to ``mask``: raises :class:`MaskError` for all but a :class:`RequestError`."""
    try:
        yield
    except RequestError:
        raise
    except Exception as err:
        raise MaskError(f"The mask {mask.key!r} failed with {type(err).__name__}: {err}") from err
