"""Attention by the workbench's own GPU kernels, over pages, for decodes, drafts and prompts.

The kernels are files of `workbench.kernels.attention`: split-KV paged decode, tree attention,
FlashAttention-3 on Hopper and its plain-Triton twin on other GPUs, for small pages and for windows. They are
chosen once, when the plan is bound; what was chosen, or why none was, is the op's name and so part of every
run's code path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.attention.kernel_pages import Batch, Kernel, KernelPages
from workbench.attention.pages import TorchPages
from workbench.attention.pinned import PinnedAttention
from workbench.engine.seams import AttentionOp, AttentionShape
from workbench.kernels import dispatch, target
from workbench.kernels.layouts import kv_plain
from workbench.kernels.layouts.pages import PageLayout
from workbench.kernels.layouts.tree import chain, tree_rows
from workbench.spec.technique import TechniqueSpec


@dataclass(frozen=True)
class Config:
    """No options: kernels follow from the device, the dtype, the head size and the page size."""


SPEC = TechniqueSpec(
    id="triton",
    title="GPU kernels for attention",
    family="attention",
    seam="attention",
    kind="exact",
    summary=(
        "Triton and Gluon kernels that read the page pool where it lies: split-KV decode, tree attention for "
        "drafts, FlashAttention-3 on Hopper or its Triton twin for prompts. Coded KV is decoded first. "
        "Without a GPU, in float64 and with pinned numerics the torch form runs, and the code path says so."
    ),
    paper="https://arxiv.org/abs/2407.08608",
    stages=("attention",),
    claims_slot=("attention",),
)

PAGE_OF_FA3 = 64
"""FlashAttention-3 reads whole KV tiles: smaller pages go to its twin, and so do layers with a window, since
a tile may reach behind it, where anything may lie."""


def bind(config: Config, context: Any) -> AttentionOp:
    """The op on the kernels chosen for the context, or the torch form with the reason in its name."""
    if context.numerics == "pinned":
        return PinnedAttention(context.device)
    where = target.probe(context.device)

    def choose(kernel: str) -> dispatch.Choice:
        return dispatch.choose(kernel, where, dtype=context.dtype, head_dim=context.config.head_dim)

    prefill = choose("fa_fwd" if context.page_size % PAGE_OF_FA3 else "fa3_fwd")
    chosen = (choose("paged_decode"), choose("tree_attention"), prefill)
    against = next((c.reason for c in chosen if not c.runs), "")
    if against:
        op = TorchPages(context.device)
        op.name = f"{op.name} ({against})"
        return op
    names = [f"{c.kernel}:{c.path}" for c in chosen]
    if prefill.kernel == "fa3_fwd" and any(group.window for group in context.config.kv_groups):
        names.append("fa_fwd:triton")
    return KernelPages(
        "+".join(names),
        context.device,
        decode=_decode,
        tree=_tree,
        prefill=_prefill(prefill.kernel),
    )


def _decode(batch: Batch, shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from workbench.kernels.attention.paged_decode import paged_decode

    return paged_decode(
        q,
        {"k": k, "v": v},
        _layout(shape, k.dtype),
        batch.table,
        batch.lengths,
        longest=max(batch.kv_lens),
        scale=1.0,
        window=shape.window,
        soft_cap=shape.soft_cap,
    ).out


def _tree(batch: Batch, shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from workbench.kernels.attention.tree_attention import tree_attention

    return tree_attention(
        q,
        {"k": k, "v": v},
        _layout(shape, k.dtype),
        batch.table,
        batch.starts,
        batch.tree if batch.tree is not None else tree_rows([chain(n) for n in batch.q_lens]).to(q.device),
        longest=max(n - new for n, new in zip(batch.kv_lens, batch.q_lens, strict=True)),
        scale=1.0,
        window=shape.window,
        soft_cap=shape.soft_cap,
    ).out


def _prefill(kernel: str) -> Kernel:
    def run(batch: Batch, shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from workbench.kernels.attention.fa3_fwd import fa3_fwd
        from workbench.kernels.attention.fa_fwd import fa_fwd

        attend: Any = fa3_fwd if kernel == "fa3_fwd" and shape.window is None else fa_fwd
        out: Tensor = attend(
            q,
            k,
            v,
            batch.q_lens,
            batch.kv_lens,
            window=shape.window or 0,
            softcap=shape.soft_cap or 0.0,
            scale=1.0,
            table=batch.table,
        ).out
        return out

    return run


def _layout(shape: AttentionShape, dtype: torch.dtype) -> PageLayout:
    return kv_plain.layout(shape.page_size, shape.kv_heads, shape.head_dim, dtype)
