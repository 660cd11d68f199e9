"""Pages at rest as they are: every plane of every page, bit for bit, whatever the KV format.

The planes of coded formats are kept, not the rows behind them, so that nothing is coded twice and what comes
back is what attention would have read. A page means what its format and page size say, so both must agree
where it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workbench.engine.at_rest import Coded, Pages
from workbench.engine.store import PageStore
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.spec.errors import PayloadError

_WHAT = "Reading or writing cached pages"


class RawPages:
    """All planes of all KV groups, those of a drafter's layers too."""

    name = "raw"
    lossy = False
    key = "raw/1"
    nbytes = 0

    def encode(self, pages: Pages, progress: Progress | None = None, cancel: Cancel | None = None) -> Coded:
        """One stream per plane; raises ``Cancelled`` between two."""
        return plane_bytes(pages, range(len(pages.stores)), progress, cancel)

    def decode(
        self, coded: Coded, pages: Pages, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> None:
        """Raises :class:`PayloadError` for planes that these pages do not have."""
        put_planes(coded, pages, range(len(pages.stores)), progress, cancel)


def plane_bytes(
    pages: Pages, groups: Sequence[int], progress: Progress | None = None, cancel: Cancel | None = None
) -> Coded:
    """The planes of some KV groups: stream ``g.name`` holds [layers, pages, ...] of those not given back."""
    names = _names(pages, groups)
    streams: dict[str, memoryview] = {}
    for i, (g, name) in enumerate(names):
        check_cancel(cancel, _WHAT)
        plane, where = _raw(pages.stores[g], name), _index(pages, g)
        streams[f"{g}.{name}"] = _bytes(plane.index_select(1, where).cpu())
        report(progress, (i + 1) / len(names), "reading cached pages")
    return Coded({"gone": [pages.gone(g) for g in groups]}, streams)


def put_planes(
    coded: Coded,
    pages: Pages,
    groups: Sequence[int],
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> None:
    """The inverse; raises :class:`PayloadError` unless these are the planes of pages like these."""
    if coded.header.get("gone") != [pages.gone(g) for g in groups]:
        raise PayloadError(
            "The stored pages are not those that the windows of this model still see.",
            hint="Restore them into the model they were saved from.",
        )
    names = _names(pages, groups)
    for i, (g, name) in enumerate(names):
        check_cancel(cancel, _WHAT)
        plane, where = _raw(pages.stores[g], name), _index(pages, g)
        shape = (len(plane), len(where), *plane.shape[2:])
        data = coded.streams.get(f"{g}.{name}")
        size = int(np.prod(shape)) * plane.element_size()
        if data is None or len(data) != size:
            found = "is not there" if data is None else f"has {len(data):,} bytes"
            raise PayloadError(
                f"Plane {name!r} of KV group {g} {found}; these pages take {size:,}.",
                hint="Restore pages into the KV format and page size they were saved from.",
            )
        if size:
            flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
            plane.index_copy_(1, where, flat.view(plane.dtype).view(shape).to(plane.device))
        report(progress, (i + 1) / len(names), "writing cached pages")


def _names(pages: Pages, groups: Sequence[int]) -> list[tuple[int, str]]:
    return [(g, name) for g in groups for name in pages.stores[g].planes]


def _index(pages: Pages, group: int) -> Tensor:
    device = pages.stores[group].geometry.device
    return torch.tensor(pages.present(group), dtype=torch.int64, device=device)


def _raw(store: PageStore, name: str) -> Tensor:
    """The plane, as integers where torch cannot index its dtype (fp8)."""
    plane = store.planes[name]
    return plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane


def _bytes(x: Tensor) -> memoryview:
    view: memoryview = x.contiguous().view(-1).view(torch.uint8).numpy().data
    return view
