"""Random tiny models of each family, and engines on them: shapes, not meaning.

Imported by conftest fixtures only (tests never import one another).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workbench.core import catalog
from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.scheduler import Batch
from workbench.engine.seams import LogitsMask
from workbench.engine.sequence import Request
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.source import DictSource
from workbench.spec.events import RequestEvent, StepEvent
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

VOCAB = 61
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10000.0},
    "qwen2": {"model_type": "qwen2", "rope_theta": 10000.0, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "rope_theta": 10000.0, "attention_bias": False},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
}


@cache
def random_source(family: str = "llama", seed: int = 0, vocab: int = VOCAB) -> DictSource:
    """A checkpoint with random weights, scaled so that its greedy output varies."""
    hf = {**BASE, **FAMILIES[family], "vocab_size": vocab}
    config = ModelConfig.from_hf(hf)
    gen = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size

    def matrix(*shape: int, scale: float = 0.15) -> torch.Tensor:
        return torch.randn(*shape, generator=gen) * scale

    tensors = {
        "model.embed_tokens.weight": matrix(vocab, hidden, scale=0.5),
        "model.norm.weight": _gain(hidden, gen),
    }
    for i in range(config.num_layers):
        base = f"model.layers.{i}"
        for name, rows in (("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)):
            tensors[f"{base}.self_attn.{name}.weight"] = matrix(rows, hidden)
            if config.qkv_bias:
                tensors[f"{base}.self_attn.{name}.bias"] = matrix(rows)
        tensors[f"{base}.self_attn.o_proj.weight"] = matrix(hidden, config.q_size)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{base}.mlp.{name}.weight"] = matrix(inner, hidden)
        tensors[f"{base}.mlp.down_proj.weight"] = matrix(hidden, inner)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config.sandwich_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            tensors[f"{base}.{name}.weight"] = _gain(hidden, gen)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                tensors[f"{base}.self_attn.{name}.weight"] = _gain(config.head_dim, gen)
    return DictSource(config, tensors)


def write_folder(folder: Path, family: str, tokenizer_from: Path) -> Path:
    """A random checkpoint as a folder: configuration, safetensors, and the tokenizer of another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in tokenizer_from.glob("tokenizer*"):
        shutil.copy(path, folder)
    known = json.loads((tokenizer_from / "config.json").read_text())
    source = random_source(family, 0, known["vocab_size"])
    ids = {name: known[name] for name in ("bos_token_id", "eos_token_id") if name in known}
    config = {**BASE, **FAMILIES[family], **ids, "vocab_size": known["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: source.tensor(n).contiguous() for n in source.names()}, folder / "model.safetensors")
    return folder


def _gain(n: int, gen: torch.Generator) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(n, generator=gen)


@cache
def _decoder(family: str, dtype: str, numerics: str, weights: Recipe, device: str) -> Decoder:
    source = random_source(family)
    made = require(plan(weights, _facts(family), dtype=dtype, numerics=numerics, device=device))  # type: ignore[arg-type]
    return Decoder(source.config, build_weights(made, source))


def _facts(family: str) -> ModelFacts:
    source = random_source(family)
    return ModelFacts(f"random-{family}", source.config, source.fingerprint)


ACTING = {"quest": "quest:budget=128,dense_layers=0"}
"""Options under which a technique has something to do in models and prompts as small as these."""


def acting(recipe: Recipe) -> list[str]:
    """The uses of a recipe, as text, where they would do nothing by default with options that do."""
    return [u.to_text() if u.options else ACTING.get(u.id, u.to_text()) for u in recipe]


def make_engine(
    *uses: str,
    family: str = "llama",
    dtype: str = "float64",
    numerics: str = "pinned",
    pool: int = 1024,
    context: int = 256,
    sequences: int = 64,
    budget: int = 0,
    page_size: int = 0,
    make_stream: Callable[[], Any] | None = None,
    eos_ids: tuple[int, ...] = (),
    device: str = "cpu",
) -> Engine:
    """An engine of a random model with a recipe."""
    recipe = Recipe.of(*uses)
    made = require(
        plan(
            recipe,
            _facts(family),
            dtype=dtype,  # type: ignore[arg-type]
            numerics=numerics,  # type: ignore[arg-type]
            limits=EngineLimits(pool, budget, sequences, context),
            device=device,
        )
    )
    if page_size:  # smaller than a user may choose
        made = replace(made, page_size=page_size)
    weights = Recipe(tuple(u for u in recipe if catalog.get(u.id).spec.seam in ("weights", "kernels")))
    decoder = _decoder(family, dtype, numerics, weights, device)
    with torch.inference_mode():
        kv = build_kv(made, decoder)
        return build_engine(made, decoder, kv, make_stream, eos_ids)


class Ran:
    """What an engine did: ids, texts, sources, finish reasons by request id and sample; steps in order."""

    def __init__(self) -> None:
        self.steps: list[StepEvent] = []
        self.events: list[RequestEvent] = []
        self.logits: dict[tuple[str, int], list[torch.Tensor]] = {}

    def ids(self, request_id: str = "r0", sample: int = 0) -> list[int]:
        """Output ids of one sample."""
        return [t.id for e in self._of(request_id, sample) for t in e.tokens]

    def text(self, request_id: str = "r0", sample: int = 0) -> str:
        """Delivered text of one sample."""
        return "".join(e.text for e in self._of(request_id, sample))

    def finish(self, request_id: str = "r0", sample: int = 0) -> str | None:
        """Why it ended."""
        return next((e.finish for e in self._of(request_id, sample) if e.finish), None)

    def cached(self, request_id: str = "r0", sample: int = 0) -> int | None:
        """Prompt tokens found in the prefix cache."""
        return next(
            (e.cached_tokens for e in self._of(request_id, sample) if e.cached_tokens is not None), None
        )

    def logprobs(self, request_id: str = "r0", sample: int = 0) -> list[float | None]:
        """Log-probability of each output token."""
        return [t.logprob for e in self._of(request_id, sample) for t in e.tokens]

    def _of(self, request_id: str, sample: int) -> list[RequestEvent]:
        return [e for e in self.events if e.request_id == request_id and e.sample == sample]


def run_engine(
    engine: Engine,
    prompts: Sequence[Sequence[int]] = (),
    *,
    max_steps: int = 2000,
    mask: LogitsMask | None = None,
    salt: str = "",
    prefix: str = "r",
    params: Sequence[SamplingParams] | None = None,
    **sampling: Any,
) -> Ran:
    """Add prompts and step until idle; requests are named ``r0``, ``r1`` …"""
    ran = Ran()
    for i, prompt in enumerate(prompts):
        p = params[i] if params is not None else SamplingParams(**sampling)
        engine.add(Request(f"{prefix}{i}", tuple(prompt), p, mask, salt))
    with torch.inference_mode():
        for _ in range(max_steps):
            if not engine.has_work:
                break
            step, events = engine.step()
            ran.steps.append(step)
            ran.events.extend(events)
    if engine.has_work:
        raise RuntimeError(f"the engine still has work after {max_steps} steps")
    return ran


def record_logits(engine: Engine, sink: list[tuple[int, int, torch.Tensor]]) -> None:
    """Collect (sequence id, absolute position, logits row) of every row the engine asks for."""
    forward = engine.executor.forward
    prepare = engine.executor.prepare
    plans: list[Any] = []

    def spy_prepare(plan: Any) -> Any:
        plans.append(plan)
        return prepare(plan)

    def spy_forward(step: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(step, *args, **kwargs)
        for span, offset in zip(plans[-1].spans, out.offsets, strict=True):
            for j in range(span.logits):
                position = span.positions[span.n_new - span.logits + j]
                sink.append((span.seq, position, out.logits[offset + j].clone()))
        return out

    engine.executor.prepare = spy_prepare  # type: ignore[method-assign]
    engine.executor.forward = spy_forward  # type: ignore[method-assign]


def preempt_at(engine: Engine, when: Callable[[int], bool]) -> None:
    """From now on the newest running sequence is preempted ahead of each step ``when`` says, by steps done.

    ``engine.forced`` counts how often.
    """
    step = engine.step
    engine.forced = 0  # type: ignore[attr-defined]

    def stepping() -> Any:
        if engine.scheduler.running and when(engine.steps):
            victim = engine.scheduler.running[-1]
            engine.scheduler.preempt(victim, Batch())
            engine.drafting.forget(victim)
            engine.forced += 1  # type: ignore[attr-defined]
        return step()

    engine.step = stepping  # type: ignore[method-assign]


def prompts_of(n: int, seed: int = 0, low: int = 3, high: int = 70) -> list[list[int]]:
    """Random prompts of ragged lengths; each repeats a piece of itself so that lookup drafts happen."""
    gen = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        length = int(torch.randint(low, high, (1,), generator=gen))
        ids = torch.randint(0, VOCAB, (length,), generator=gen).tolist()
        out.append((ids + ids[: length // 2])[:length] if length > 8 else ids)
    return out
