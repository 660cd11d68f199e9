"""Moving kept rows of a sequence to other pages: gathered per layer and head, coded bytes and all.

Rows move as they are stored, so nothing is coded twice. A format can be compacted if each of its planes has a
slot axis, and a head axis where heads keep different tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workbench.engine.seams import KVCodec, PlaneSpec
from workbench.engine.store import PageStore

Rows = dict[str, Tensor]
"""By plane: [layers, heads, k, ...] as integers where torch cannot index the dtype."""


def movable(codec: KVCodec, planes: Sequence[PlaneSpec]) -> bool:
    """Whether single rows of single heads can be moved between pages of this format."""
    return codec.grain == "token" and all({"head", "slot"} <= set(p.axes) for p in planes)


def gather_rows(store: PageStore, pages: Sequence[int], keep: Tensor) -> tuple[Rows, Tensor]:
    """The rows at slots ``keep`` int64 [layers, heads, k] of the sequence whose table is ``pages``.

    With them the newest position among the tokens of each new slot, int32 [k].
    """
    where = torch.tensor(pages, device=store.geometry.device)
    out: Rows = {}
    for spec in store.specs:
        rows = _by_row(store, spec, where)  # [L, H, n, P, ...]
        flat = rows.flatten(2, 3)
        index = keep.to(flat.device)[(...,) + (None,) * (flat.dim() - 3)].expand(-1, -1, -1, *flat.shape[3:])
        out[spec.name] = flat.gather(2, index)
    positions = store.positions.view(-1, store.geometry.page_size)[where].flatten()
    return out, positions[keep.to(where.device)].amax((0, 1))


def put_rows(store: PageStore, pages: Sequence[int], rows: Mapping[str, Tensor], positions: Tensor) -> None:
    """Write rows to the first slots of fresh ``pages``; int32 ``positions`` [k] are noted for them."""
    size = store.geometry.page_size
    where = torch.tensor(pages, device=store.geometry.device)
    for spec in store.specs:
        part = rows[spec.name]
        layers, heads, k = part.shape[:3]
        whole = part.new_zeros(layers, heads, len(pages) * size, *part.shape[3:])
        whole[:, :, :k] = part
        paged = whole.view(layers, heads, len(pages), size, *part.shape[3:])
        _raw(store, spec)[:, where] = _to_plane(paged, spec)
    index = torch.arange(len(positions), device=where.device)
    store.positions[where[index // size] * size + index % size] = positions.to(where.device)
    store.written(pages)


def _by_row(store: PageStore, spec: PlaneSpec, pages: Tensor) -> Tensor:
    """A plane's pages [L, H, n, P, ...]."""
    plane = _raw(store, spec).index_select(1, pages)
    head, slot = 2 + spec.axes.index("head"), 2 + spec.axes.index("slot")
    return plane.movedim((head, 1, slot), (1, 2, 3))


def _to_plane(rows: Tensor, spec: PlaneSpec) -> Tensor:
    """The inverse: [L, n, *shape] of rows [L, H, n, P, ...]."""
    head, slot = 2 + spec.axes.index("head"), 2 + spec.axes.index("slot")
    return rows.movedim((1, 2, 3), (head, 1, slot))


def _raw(store: PageStore, spec: PlaneSpec) -> Tensor:
    """The plane [L, N, *shape], as integers where torch cannot index its dtype (fp8)."""
    plane = store.planes[spec.name]
    return plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane
