"""A trained model as a Hugging Face folder: an ordinary Llama, rounded to bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workbench.models.convert import save_weights
from workbench.training.layerskip.model import ExitModel


def write_weights(folder: Path, model: ExitModel) -> None:
    """Write ``model.safetensors`` and ``config.json`` into ``folder``; a tied head is left out."""
    known = model.main.config
    found = dict(model.main.state_dict())
    if known.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    config: dict[str, Any] = known.to_diff_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "rms_norm_eps": known.rms_norm_eps}
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, {n: t.detach().to(torch.bfloat16) for n, t in found.items()}, config)


def rounded(model: ExitModel) -> ExitModel:
    """A copy with the weights that a folder of it holds, in float32."""
    copy = ExitModel(model.main.config, 0)
    copy.load_state_dict({n: t.to(torch.bfloat16).float() for n, t in model.state_dict().items()})
    return copy
