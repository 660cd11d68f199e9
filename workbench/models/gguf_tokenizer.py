"""A ``tokenizer.json`` from the tokenizer inside a GGUF file.

llama.cpp keeps vocabulary, merges and the *name* of the pre-tokenizer, not its rules; those are
restored here from the name. A name that is not known is refused: splitting text another way than
the merges were learned changes token ids without any error.

Known: byte-level BPE ("gpt2": SmolLM2, Llama 3, Qwen2/3) and Gemma's SentencePiece BPE ("llama").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from workbench.spec.errors import TokenizerError

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_tokenizer(meta: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """``(tokenizer, tokenizer_config.json content)`` from GGUF metadata. Raises ``TokenizerError``."""
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError(
            "The GGUF file holds no tokenizer.", hint="Put the model's tokenizer.json into a folder with it."
        )
    kind = meta.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(meta, tokens)
    elif kind == "llama" and str(meta.get("general.architecture", "")).startswith("gemma"):
        tokenizer = _gemma(tokens)
    else:
        raise TokenizerError(
            f"The GGUF tokenizer kind {kind!r} cannot be restored exactly.",
            hint="Use a safetensors checkpoint with its own tokenizer.json.",
        )
    types = meta.get("tokenizer.ggml.token_type") or ()
    vocab = tokenizer.get_vocab()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        # Gemma's runs of spaces are respelled below and reached by merging; adding them would make new ids.
        marked = [t for t, found in zip(tokens, types, strict=False) if found == wanted and t in vocab]
        added = [AddedToken(t, normalized=False, special=special) for t in marked]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    config = _config(meta, tokens)
    _add_bos(tokenizer, config, meta)
    return tokenizer, config


def _byte_level(meta: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = str(meta.get("tokenizer.ggml.pre", "default"))
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges") or ()]
    vocab = {token: i for i, token in enumerate(tokens)}
    whole = pre in (
        "llama-bpe",
        "llama3",
        "llama-v3",
    )  # tiktoken's rule: a word in the vocabulary is not merged
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _pre_tokenizer(name: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in ("smollm", "starcoder", "refact", "command-r"):  # every digit is a token of its own
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if name in ("gpt-2", "gpt2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2}.get(name)
    if split is None:
        raise TokenizerError(
            f"The GGUF pre-tokenizer {name!r} is not known, so its token ids could not be trusted.",
            hint="Use a safetensors checkpoint with its own tokenizer.json.",
        )
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level])


def _gemma(tokens: Sequence[str]) -> Tokenizer:
    # Runs of spaces are stored as spaces; the merges know them in SentencePiece's spelling.
    spelled = ["\u2581" * len(t) if " " in t and not t.strip() else t for t in tokens]
    vocab = {token: i for i, token in enumerate(spelled)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_from_order(vocab),
            unk_token="<unk>",  # noqa: S106
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def merges_from_order(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The BPE merges a vocabulary implies when its ids follow the order of the merges (Gemma).

    Each token is the result of joining two others; of several ways to cut it, the one whose parts
    come first wins.
    """
    merges: list[tuple[str, str]] = []
    for token in sorted(vocab, key=vocab.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
        merges += sorted(known, key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
    return merges


def _config(meta: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    architecture = meta.get("general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta.get(f"{architecture}.context_length", 2048)),
        "add_prefix_space": False,
    }
    for name, key in _SPECIAL.items():
        index = meta.get(f"tokenizer.ggml.{key}")
        if index is not None and 0 <= int(index) < len(tokens):
            config[name] = tokens[int(index)]
    template = meta.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def _add_bos(tokenizer: Tokenizer, config: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Encode a leading BOS when the file asks for it; SentencePiece ones do unless they say otherwise."""
    default = meta.get("tokenizer.ggml.model") == "llama"
    bos = config.get("bos_token")
    if bos is None or not meta.get("tokenizer.ggml.add_bos_token", default):
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
