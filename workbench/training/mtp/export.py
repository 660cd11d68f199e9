"""A trained model and its modules as a Hugging Face folder, in the layout of DeepSeek-V3's checkpoints.

Module k becomes the layer behind the last, ``num_nextn_predict_layers`` counts them; embedding and head are
not repeated. ``transformers`` opens the folder as a plain Llama and leaves the modules alone. Weights are
rounded to bfloat16; every number of the card is measured on the rounded ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from workbench.models.convert import save_weights
from workbench.training.mtp.model import MTPModel
from workbench.training.tiny.evaluate import TextScore, score
from workbench.training.tiny.tokenizer import END_OF_TEXT, SPECIALS


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
    known = model.main.config
    config: dict[str, Any] = known.to_diff_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "rms_norm_eps": known.rms_norm_eps}
    return config | {"num_nextn_predict_layers": len(model.mtp)}


def write_weights(folder: Path, model: MTPModel, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``model.safetensors`` and ``config.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, tensors_of(model, dtype), config_of(model))


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    """The tokenizer, without a chat template: the model never saw a conversation."""
    end = SPECIALS[END_OF_TEXT]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        unk_token=None,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def rounded(model: MTPModel) -> MTPModel:
    """A copy with the weights that a folder of it holds, in float32."""
    copy = MTPModel(model.main.config, len(model.mtp), 0)
    copy.load_state_dict({n: t.to(torch.bfloat16).float() for n, t in model.state_dict().items()})
    return copy


def code_score(folder: Path, tokenizer: Tokenizer, text: Path) -> TextScore:
    """The folder's model on the held-out modules of ``text``/eval.txt, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    raw = (text / "eval.txt").read_bytes()
    total = TextScore(0.0, 0, 0)
    for part in json.loads((text / "MANIFEST.json").read_text())["parts"]:
        if part["document"].startswith("stdlib/"):
            passage = raw[part["start"] : part["start"] + part["bytes"]].decode()
            total = total + score(model, tokenizer, passage)
    return total
