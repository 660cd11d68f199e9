"""Planes that differ by layer: who owns bytes, who reads another's, and that a page is all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch

from workbench.engine.page_bytes import pool_nbytes
from workbench.engine.planes import group_planes
from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.engine.store import PageStore
from workbench.kv.constants import NoConstants
from workbench.kv.plain import PlainCodec
from workbench.spec.errors import InvariantError, OptionError

GEOMETRY = PageGeometry(layers=4, kv_heads=1, head_dim=2, page_size=4, pages=3, dtype=torch.float32)
AXES = ("head", "slot", "dim")


@dataclass(frozen=True)
class Halves(NoConstants):
    """Stores K as it is, and V only in layers that ``reads`` does not send to another's."""

    reads: tuple[tuple[int, int], ...] = ((1, 0), (3, 2))
    owner: int | None = None
    grain: Literal["token", "page"] = "token"
    in_place: bool = False
    key: str = "halves"

    def at(self, layer: int) -> Halves:
        return replace(self, owner=dict(self.reads).get(layer))

    def page_sizes(self, head_dim: int) -> None:
        return None

    def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        shape = (geometry.kv_heads, geometry.page_size, geometry.head_dim)
        return (
            PlaneSpec("k", geometry.dtype, shape, AXES),
            PlaneSpec("v", geometry.dtype, shape, AXES, owner=self.owner),
        )

    def encode(self, planes: Any, where: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            if name == "k" or self.owner is None:
                planes[name].view(-1, x.shape[-1])[where] = x[:, 0]  # one head

    def decode(self, planes: Any, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        k.copy_(planes["k"][pages])
        v.copy_(planes["v"][pages])


@pytest.fixture
def store() -> PageStore:
    return PageStore(Halves(), PlainCodec(torch.float32), GEOMETRY)


def write(store: PageStore, page: int, value: float, rows: int = 4) -> None:
    store.reset([page])
    where = store.begin(page * 4 + torch.arange(rows), torch.arange(rows))
    for layer in range(4):
        x = torch.full((rows, 1, 2), value + layer)
        store.write(layer, where, x, -x)


def seen(store: PageStore, page: int) -> list[tuple[float, float]]:
    """First row of a page in every layer, K and V."""
    plan = store.plan_read([page])
    return [tuple(float(x[0, 0, 0, 0]) for x in store.read(layer, plan)) for layer in range(4)]  # type: ignore[misc]


def test_a_plane_holds_the_layers_that_own_it(store: PageStore) -> None:
    assert store.planes["k"].shape == (4, 4, 1, 4, 2) and store.planes["v"].shape == (2, 4, 1, 4, 2)
    assert store.nbytes()["kv_payload"] == (4 + 2) * 4 * 8 * 4
    assert pool_nbytes(store.codec, GEOMETRY) > store.nbytes()["kv_payload"]  # nothing shared is the most


def test_layers_read_their_own_or_the_owners_bytes(store: PageStore) -> None:
    write(store, 2, 10.0)
    assert seen(store, 2) == [(10, -10), (11, -10), (12, -12), (13, -12)]


def test_copies_moves_and_resets_take_every_layer_along(store: PageStore) -> None:
    write(store, 1, 10.0)
    store.copy(1, 3)
    assert seen(store, 3) == seen(store, 1)
    write(store, 1, 20.0)  # a copy is of its own
    assert seen(store, 3) == [(10, -10), (11, -10), (12, -12), (13, -12)]
    store.move(torch.tensor([3 * 4 + 2]), torch.tensor([1 * 4 + 0]))
    assert seen(store, 1) == seen(store, 3)
    store.reset([3])
    assert seen(store, 3) == [(0, 0)] * 4


def test_an_owner_outside_the_group_or_behind_is_refused() -> None:
    for reads, layers in (((1, 0),), (1, 2, 3, 4)), (((1, 2),), (0, 1, 2, 3)), (((1, 1),), (0, 1, 2, 3)):
        with pytest.raises(OptionError, match="not in its KV group"):
            PageStore(Halves(reads), PlainCodec(torch.float32), GEOMETRY, layers)
    chain = group_planes(Halves(((1, 0), (2, 1))), GEOMETRY, (0, 1, 2, 3))
    assert [r["v"] for r in chain.rows] == [0, 0, 0, 1]  # an owner may be one that reads another's


def test_a_name_means_one_shape() -> None:
    class Ragged(Halves):
        """Layer 2 has wider pages."""

        def at(self, layer: int) -> Ragged:
            return Ragged(owner=layer)

        def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
            return (PlaneSpec("k", torch.uint8, (1, 4, 2 + (self.owner == 2)), AXES),)

    with pytest.raises(InvariantError, match="two shapes"):
        group_planes(Ragged(), GEOMETRY, range(4))


def test_formats_alike_in_all_layers_are_laid_out_as_before() -> None:
    made = group_planes(PlainCodec(torch.float32), GEOMETRY, range(4))
    assert made.owners == {"k": [0, 1, 2, 3], "v": [0, 1, 2, 3]}
    assert [r["k"] for r in made.rows] == [0, 1, 2, 3]
