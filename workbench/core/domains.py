"""The shipped text by domain: documentation, code, plays, a dictionary of jargon, and chat.

For measuring what a calibration is worth on text of another kind. Documents keep the use they have in
:mod:`workbench.core.texts`: those for evaluation are scored, the others are for calibration only.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from workbench.core.texts import shipped_documents
from workbench.models.datadir import data_dir
from workbench.models.tokenizer import Tokenizer
from workbench.spec.errors import RequestError

CHAT = "chat"


def domains() -> tuple[str, ...]:
    """Their names, in the order of the shipped text."""
    found = dict.fromkeys(_domain(d.name) for d in shipped_documents())
    return (*found, CHAT)


def evaluation_ids(domain: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of what is scored of a domain; raises :class:`RequestError` for one that does not exist."""
    if domain == CHAT:
        return _chat(tokenizer)
    texts = [d.text for d in shipped_documents() if _domain(d.name) == domain and d.use == "evaluation"]
    if not texts:
        raise RequestError(f"There is no domain {domain!r}.", hint=f"Domains: {', '.join(domains())}.")
    return tokenizer.encode("".join(texts))


def ids_without(domain: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Token ids of every shipped document that is not of the domain."""
    return encode("".join(d.text for d in shipped_documents() if _domain(d.name) != domain))


def _domain(name: str) -> str:
    return name.partition("/")[0]


def _chat(tokenizer: Tokenizer) -> list[int]:
    """The shipped questions about documents for evaluation, through the model's chat template, answered."""
    known = {d.name for d in shipped_documents() if d.use == "calibration"}
    path = data_dir() / "prompts" / "chat.jsonl"
    ids: list[int] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if not known.intersection(row["source"]):
                ids += tokenizer.chat(row["messages"]).ids
                ids += tokenizer.encode(row["reference"] + "\n", add_special=False)
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise RequestError(f"The prompts in {path} cannot be read: {err}.", hint="Reinstall.") from None
    return ids
