"""The peers ``transformers`` and ``transformers_cb``: the same weights in the same type as ours.

``transformers``: ``generate`` as it comes (eager, DynamicCache). ``transformers_cb``: its continuous
batching.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from workbench.core.benchmark_engine import random_prompts
from workbench.core.benchmark_peers import PeerSetup
from workbench.core.benchmark_timing import Contestant, Turn
from workbench.core.peers import Measure
from workbench.models.registry import resolve
from workbench.spec.errors import UnsupportedModel

_CB_PAGE = 32


@dataclass
class Transformers:
    """The ``transformers`` model that both peers share."""

    model: Any
    batching: bool = False  # a batching manager lives

    def contestant(self, which: str, measure: Measure, sizes: Mapping[str, Any]) -> Contestant:
        """``generate`` or its continuous batching, in one cell."""
        if which == "transformers_cb":
            self.batching = True
            return ContinuousBatching(self.model, **sizes)
        return Generate(self.model, measure, **sizes)

    def release(self) -> None:
        """End the thread and the cache of the batching manager: the next cell needs another size."""
        if self.batching:
            self.model.destroy_cached_continuous_batching_manager()
            self.batching = False


def load(setup: PeerSetup) -> Transformers:
    """The model of a registry name or folder, from disk only.

    Raises :class:`UnsupportedModel`, and the errors of :func:`workbench.models.registry.resolve`.
    """
    folder = resolve(setup.model)
    try:
        made = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, setup.dtype), local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError) as err:
        raise UnsupportedModel(f"transformers cannot load {folder}: {err}") from None
    torch.nn.Module.to(made, setup.device)
    return Transformers(torch.nn.Module.eval(made))


@dataclass
class _Stamps(transformers.LogitsProcessor):
    """Notes when the logits of each token are there."""

    at: list[float] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Record the moment; logits are left as they are."""
        if scores.device.type == "cuda":
            torch.cuda.synchronize(scores.device)
        self.at.append(perf_counter())
        return scores


@dataclass
class Generate:
    """``generate`` on a batch of equally long prompts.

    ``measure``: *decode* (between the first and the last token), *prefill* (to the first), *whole*, *first*.
    """

    model: Any
    measure: Measure
    batch: int = 1
    context: int = 512
    tokens: int = 16
    suffix: int = 0
    name: str = "transformers"
    note: str = ""

    def turn(self, seed: int) -> Turn:
        """One call of ``generate`` on prompts that our engine gets too."""
        vocab = self.model.config.vocab_size
        prompts = random_prompts(vocab, self.batch, self.context, seed)
        if self.suffix:
            shared = random_prompts(vocab, 1, self.context, 1_000_003)[0]
            prompts = [shared + random_prompts(vocab, 1, self.suffix, seed)[0]]
        ids = torch.tensor(prompts, device=self.model.device)
        stamps = _Stamps()
        new = 1 if self.measure in ("prefill", "first") else self.tokens + (self.measure == "decode")
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = perf_counter()
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                logits_processor=transformers.LogitsProcessorList([stamps]),
            )
            end = perf_counter()
        if self.measure == "decode":
            return Turn(stamps.at[-1] - stamps.at[0], self.batch * (len(stamps.at) - 1))
        if self.measure == "first":
            return Turn(stamps.at[0] - start, 1)
        if self.measure == "prefill":
            return Turn(stamps.at[0] - start, ids.numel())
        return Turn(end - start, self.batch * (out.shape[1] - ids.shape[1]))


@dataclass
class ContinuousBatching:
    """``generate_batch``: from the first request's start to the last one's end, its set-up excluded."""

    model: Any
    batch: int = 8
    context: int = 128
    tokens: int = 32
    name: str = "transformers_cb"
    note: str = ""

    def turn(self, seed: int) -> Turn:
        """One batch through the continuous-batching manager, which stays alive between turns."""
        prompts = random_prompts(self.model.config.vocab_size, self.batch, self.context, seed)
        config = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=self.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        # Left to itself it takes most of the machine's memory for its cache.
        pages = self.batch * -(-(self.context + self.tokens) // _CB_PAGE) + 1
        limits = ContinuousBatchingConfig(
            page_size=_CB_PAGE, num_blocks=pages, max_batch_tokens=max(self.batch * self.context, 256)
        )
        outputs = self.model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=limits,
            progress_bar=False,
            persistent_manager=True,
        )
        spans = [o.lifespan for o in outputs.values()]
        made = sum(len(o.generated_tokens) for o in outputs.values())
        return Turn(max(end for _, end in spans) - min(start for start, _ in spans), made)
