"""Text to ids and back, for the model of a folder.

A thin wrapper over ``transformers``' tokenizer of that folder. ``decode`` is the backend's own: the
optional "clean up spaces" step is never applied, because it would make text depend on tokens
that come later. ``transformers`` is imported when the first tokenizer is loaded, not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from workbench.models.chat import ChatFallback, ChatPrompt, Message, check_messages, plain_chat
from workbench.models.folder import MAX_INDEX_BYTES, inside, read_json
from workbench.models.gguf_source import GGUFSource
from workbench.models.registry import resolve
from workbench.models.stream import StreamDecoder
from workbench.spec.errors import RequestError, TokenizerError, UnsafeFile

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # tokenizer.json as it stands
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")


class Tokenizer:
    """The tokenizer of one model.

    ``eos_ids``: every id that ends a text (configuration, generation configuration and tokenizer
    together); ``vocab_size``: rows of the model's embedding, the bound on ids that ``encode`` checks.
    """

    def __init__(self, hf: Any, eos_ids: Iterable[int] = (), vocab_size: int | None = None) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TokenizerError(
                f"{type(hf).__name__} has no fast tokenizer behind it.",
                hint="Use a checkpoint with a tokenizer.json.",
            )
        self._hf, self._backend = hf, backend
        # Prompts are ragged here; padding or cutting set in the file would change them in silence.
        backend.no_padding()
        backend.no_truncation()
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_ids, *own)))
        self.vocab_size = backend.get_vocab_size() if vocab_size is None else vocab_size

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The ``tokenizers`` object, for libraries that take one."""
        return self._backend

    @property
    def bos_id(self) -> int | None:
        """Id that starts a text, if the model has one."""
        return None if self._hf.bos_token_id is None else int(self._hf.bos_token_id)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template (Jinja), if it has one."""
        return self._hf.chat_template or None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of ``text``; ``add_special`` adds what the model puts around a text (e.g. BOS).

        Raises ``RequestError`` for half a character, ``TokenizerError`` for ids without an embedding.
        """
        check_text(text)
        return self._checked(self._backend.encode(text, add_special_tokens=add_special).ids)

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """Ids of each text, ragged: nothing is padded, so no mask has to be guessed from ids."""
        for text in texts:
            check_text(text)
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special)
        return [self._checked(e.ids) for e in encoded]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of all ``ids`` together."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder for one growing sequence, whose pieces join to ``decode`` of all its ids."""
        return StreamDecoder(self._backend, skip_special)

    def token(self, token_id: int) -> str:
        """One token as the vocabulary spells it. Raises ``TokenizerError`` for an unknown id."""
        text = self._backend.id_to_token(int(token_id))
        if text is None:
            raise TokenizerError(
                f"There is no token {token_id}.", hint=f"Ids are 0 to {self.vocab_size - 1}."
            )
        return str(text)

    def chat(self, messages: Sequence[Message]) -> ChatPrompt:
        """The prompt that lets the model answer ``messages``: by its template, else the plain fallback.

        Raises ``TokenizerError`` when messages are malformed or the template refuses them.
        """
        check_messages(messages)
        if self.chat_template is None:
            text = plain_chat(messages)
            return ChatPrompt(text, tuple(self.encode(text)), ChatFallback())
        from jinja2 import TemplateError

        try:
            text = self._hf.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise TokenizerError(
                f"The chat template refused the conversation: {error}", hint="Check the order of roles."
            ) from error
        # The template writes BOS itself where the model wants one.
        return ChatPrompt(text, tuple(self.encode(text, add_special=False)))

    def _checked(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self.vocab_size:
            raise TokenizerError(
                f"The text holds {self.token(max(ids))!r} (id {max(ids)}), "
                f"but the model has {self.vocab_size} embeddings.",
                hint="Remove that token from the text; it belongs to another variant of the model.",
            )
        return ids


def check_text(text: str, what: str = "The prompt") -> None:
    """Raises :class:`RequestError` for lone surrogates: what bytes that are no UTF-8 become in arguments."""
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise RequestError(
            f"{what} holds half a character at position {err.start} (a lone surrogate).",
            hint="Decode the text as UTF-8, or remove the character.",
        ) from None


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer of a registry name, folder or ``.gguf`` file; never downloads.

    Raises ``ModelNotFound``, ``TokenizerError``, or ``UnsafeFile`` for tokenizers that bring code.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path)
    folder = resolve(name_or_path)
    _check_folder(folder)
    try:
        hf = _loader(folder).from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise TokenizerError(
            f"The tokenizer of {folder} cannot be loaded: {error}",
            hint="Fetch the checkpoint again, with its tokenizer.json.",
        ) from error
    config = read_json(folder, "config.json")
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    generation = read_json(folder, "generation_config.json") if (folder / _CONFIGS[2]).is_file() else {}
    vocab = (text or config).get("vocab_size", config.get("vocab_size"))
    return Tokenizer(hf, _eos_ids(config, text or {}, generation), vocab)


def _loader(folder: Path) -> Any:
    """The ``transformers`` class that reads the folder's tokenizer.

    ``AutoTokenizer`` imports model code before it looks, most of a second; a folder whose tokenizer is its
    ``tokenizer.json`` and nothing else needs none of it, and is read by the class it names.
    """
    config = folder / "tokenizer_config.json"
    named = read_json(folder, config.name).get("tokenizer_class") if config.is_file() else None
    if named in _PLAIN_CLASSES and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _from_gguf(path: Path) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    from workbench.models.gguf_tokenizer import build_tokenizer

    source = GGUFSource(path)
    backend, config = build_tokenizer(source.metadata)
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "model_max_length")
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, **{k: config[k] for k in names if k in config}
    )
    return Tokenizer(hf, source.config.eos_ids, source.config.vocab_size)


def _eos_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        found += [] if value is None else [int(v) for v in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(found))


def _check_folder(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _FILES):
        raise TokenizerError(f"{folder} holds no tokenizer.", hint="Put the model's tokenizer.json into it.")
    for name in (*_FILES, *_CONFIGS):
        path = inside(folder, name)
        if path.is_file() and path.stat().st_size > 4 * MAX_INDEX_BYTES:
            raise UnsafeFile(f"{folder.name}/{name} is absurdly large.", hint="Check its origin.")
    for name in ("tokenizer_config.json", "config.json"):
        if (folder / name).is_file() and "auto_map" in read_json(folder, name, MAX_INDEX_BYTES):
            raise UnsafeFile(
                f"{folder.name}/{name} asks to run code from the checkpoint (auto_map).",
                hint="The workbench never runs it; use a checkpoint with a plain tokenizer.json.",
            )
