"""The typed seams that techniques plug into. The engine never asks which technique it has.

A *step* runs a ragged batch: each sequence is a *span* of ``n_new`` tokens on top of what it
has committed. Prefill chunks, decodes and draft trees are the same thing. Stateful seams
follow one protocol: what a step does becomes final only in ``commit``; anything proposed and
not committed must leave no trace.

Shape letters: T rows of the step, V vocabulary, Hq / Hkv query / KV heads, D head size,
P page size in slots, N pages. A *slot* is ``page * P + offset``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

CPU = torch.device("cpu")

# -- the step as plain data -----------------------------------------------------------------


@dataclass(frozen=True)
class SpanPlan:
    """One sequence's share of a step.

    ``start`` tokens are committed before it, in as many slots unless a selector dropped some: then ``slots``
    says how many of each KV group are in use. New token ``i`` goes to the ``i``-th slot behind them, at
    absolute position ``positions[i]``. ``parents`` is None for a chain, else the draft
    tree: ``parents[i]`` is the row (in this span) whose KV row ``i`` also sees, -1 for the root.
    ``tables`` holds the sequence's page ids, one tuple per KV group.
    ``logits`` is how many of the last rows need logits. ``decodes``: all rows come after the prompt.
    """

    seq: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    start: int
    tables: tuple[tuple[int, ...], ...]
    logits: int
    parents: tuple[int, ...] | None = None
    slots: tuple[int, ...] | None = None
    decodes: bool = False

    @property
    def n_new(self) -> int:
        """Tokens this span adds."""
        return len(self.tokens)

    def used(self, group: int) -> int:
        """Committed slots of a KV group."""
        return self.slots[group] if self.slots is not None else self.start


@dataclass(frozen=True)
class StepPlan:
    """What every rank executes in one step: plain data, made by the scheduler on rank 0."""

    step: int
    spans: tuple[SpanPlan, ...]

    @property
    def rows(self) -> int:
        """Tokens forwarded in the step (T)."""
        return sum(s.n_new for s in self.spans)


# -- KV bytes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageGeometry:
    """Sizes of one KV group's pages. ``dtype`` is what attention computes on."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    dtype: torch.dtype
    device: torch.device = CPU


@dataclass(frozen=True)
class PlaneSpec:
    """One tensor of a page: the pool holds it as ``[layers, pages, *shape]``, of the layers that own it.

    ``axes`` names each axis of ``shape`` (``head``, ``slot``, ``dim``, ``group``, ``byte``);
    ``category`` is the memory category it counts under.
    ``owner`` is the model layer whose plane of that name is read instead of one of the layer's own; it comes
    before the layer and lies in the same KV group. None: the layer has its own.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    category: Literal["kv_payload", "kv_meta"] = "kv_payload"
    owner: int | None = None


class KVCodec(Protocol):
    """How K and V rows become bytes and back; pure functions on planes, no state of its own.

    ``grain`` says when bytes are encoded. *token*: on every write; what a step wrote it reads back
    encoded. *page*: the page stays in full precision while it is open, and is encoded once, when a
    commit has filled it; blocks are cut at page ends so that what a position sees is a function of
    absolute positions only.
    ``in_place``: planes ``k`` and ``v`` are ``[*, Hkv, P, D]`` in ``geometry.dtype`` and attention reads them
    directly; otherwise referenced pages are decoded into a bounded, counted workspace of one layer.
    ``key`` identifies everything that shapes the bytes (codec, version, options, calibration).
    """

    @property
    def key(self) -> str:
        """Names codec, version, options and calibration."""
        ...

    @property
    def grain(self) -> Literal["token", "page"]:
        """When bytes are encoded."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether attention reads the planes as they are."""
        ...

    @property
    def calibration(self) -> Literal["none", "ranges", "sharing"]:
        """What must be measured, and bound with it, before it can run: the ranges of keys and values, or what
        layers that share codes do to the model."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of constants it holds beside the planes, of all layers: calibration."""
        ...

    def at(self, layer: int) -> KVCodec:
        """The codec of one of the model's layers: itself, unless it holds constants per layer.

        -1 is a layer that belongs to no model layer (a drafter's).
        """
        ...

    def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        """The planes of a page of one layer; raises :class:`OptionError` when it cannot be encoded.

        Layers (:meth:`at`) may differ: a name means one dtype and shape, but not every layer needs to have
        it. Before it is bound to a layer, a codec answers for the layer that needs most.
        """
        ...

    def page_sizes(self, head_dim: int) -> tuple[int, ...] | None:
        """Page sizes it can work with, or None for any."""
        ...

    def encode(self, planes: Mapping[str, Tensor], where: Tensor, k: Tensor, v: Tensor) -> None:
        """Write rows of one layer; planes are ``[N, *shape]``.

        token grain: ``where`` int64 [T] slots, ``k``/``v`` [T, Hkv, D].
        page grain: ``where`` int64 [n] page ids, ``k``/``v`` [n, Hkv, P, D].
        """
        ...

    def decode(self, planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
        """Decode pages (int64 [n]) of one layer into ``k`` and ``v`` [n, Hkv, P, D]."""
        ...


# -- attention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionSpan:
    """A span as attention sees it: ``table`` holds ids into the K/V tensors given (pool or workspace).

    ``decodes``: its rows come after the prompt; forms that read all they may see do not care.
    """

    n_new: int
    start: int
    table: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int] | None = None
    decodes: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """What attention of one KV group needs to know once."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int | None = None
    soft_cap: float | None = None


class AttentionOp(Protocol):
    """Attention of a ragged batch over pages, causal or tree mask, bottom-right aligned.

    Row ``i`` of a span sees every committed slot of its sequence, itself, and the rows it descends
    from (all earlier rows for a chain); with a window ``w`` only positions ``> own - w``. Rows that see
    nothing give exactly 0. Whatever lies in slots no row may see never reaches an output, NaN included.
    """

    name: str

    def prepare(self, spans: Sequence[AttentionSpan], shape: AttentionShape, previous: Any = None) -> Any:
        """Index work shared by all layers of a step; ``previous`` may be reused when only lengths moved."""
        ...

    def run(self, plan: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [T, Hq*D] in ``q``'s dtype. ``q`` [T, Hq, D] scaled; ``k``, ``v`` [N, Hkv, P, D]."""
        ...


@runtime_checkable
class KernelAttention(AttentionOp, Protocol):
    """Attention that the compiled kernels may do as a part of more, on bfloat16 pages read in place."""

    kernels: CDLL


FixedRead = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``q`` [B * rows, Hq, D] scaled, ``k``, ``v`` [N, Hkv, P, D] -> [B * rows, Hq * D] in ``q``'s dtype."""


@runtime_checkable
class FixedAttention(AttentionOp, Protocol):
    """An attention whose shapes may be fixed: lengths are tensors that nobody reads on the host."""

    def fixed(self, tables: Tensor, first: Tensor, rows: int, shape: AttentionShape) -> FixedRead:
        """What ``rows`` rows of each sequence see, for all layers of a pass.

        ``tables`` int64 [B, P] page ids, of a multiple of 64 slots; ``first`` int64 [B] positions of the
        first rows. Row ``i`` sees the slots of the positions up to its own, ``first + i``; what lies in
        later ones never reaches an output.
        """
        ...


# -- output -----------------------------------------------------------------------------------


class LogitsMask(Protocol):
    """Which tokens may come next, as a pure function of a sequence's ids.

    ``path`` are uncommitted ids of a draft (or none): a mask must answer for them without moving.
    """

    key: str

    def allowed(self, generated: Sequence[int], path: Sequence[int] = ()) -> Tensor | None:
        """Boolean [V] of allowed tokens after ``generated + path``; None allows all."""
        ...
