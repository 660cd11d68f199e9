"""A trained model and its modules as a Hugging Face folder, in the layout of DeepSeek-V3's checkpoints.

Module k becomes the layer behind the last, ``num_nextn_predict_layers`` counts them; embedding and head are
not repeated. ``transformers`` opens the folder as a plain Llama and leaves the modules alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.models.convert import save_weights
from workbench.training.mtp.model import MTPModel


def tensors_of(model: MTPModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Canonical name -> tensor, rounded to ``dtype``; a tied head is left out."""
    config = model.main.config
    found = dict(model.main.state_dict())
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    for k, module in enumerate(model.mtp):
        base = f"model.layers.{config.num_hidden_layers + k}"
        found |= {f"{base}.{name}": tensor for name, tensor in module.state_dict().items()}
    return {name: tensor.detach().to(dtype) for name, tensor in found.items()}


def config_of(model: MTPModel) -> dict[str, Any]:
    """``config.json``."""
    config: dict[str, Any] = model.main.config.to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    return config | {"num_nextn_predict_layers": len(model.mtp)}


def write_weights(folder: Path, model: MTPModel, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``model.safetensors`` and ``config.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, tensors_of(model, dtype), config_of(model))
