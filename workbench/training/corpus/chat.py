"""Chat samples made from the documents, so that the chat template is in distribution.

No model wrote them: every answer is text of the source. Kinds: questions of the Python
FAQ, "what does this function do", definitions of the Jargon File, "repeat" and "replace"
tasks (which teach copying, and give prompt lookup something to find), continuations, and
functions asked for by their docstring.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from workbench.training.corpus.sources import Document

MAX_ANSWER = 900
"""Longest answer, in characters."""

SHARE = {"rename": 0.25, "write": 0.4, "term": 0.5}
"""Kinds that would crowd out the others: the share of them that is kept."""

_FAQ = re.compile(r"^([^\n]+)\n-{4,}\n\n(.+?)(?=\n\n\n|\n\n\.\. _|\Z)", re.M | re.S)
_FUNCTION = re.compile(r"^\.\. (?:function|class|method):: ([^\n]+)\n\n((?:   [^\n]+\n)+)", re.M)
_MODULE = re.compile(r"^:mod:`!?([\w.]+)` --- ([^\n]+)\n=+\n")
_TERM = re.compile(r"^   :([^:\n]+):[^\n]*\n\n((?:   [^\n]+\n)+)", re.M)


@dataclass(frozen=True)
class Exchange:
    """One question and its answer; ``kind`` names the template, ``source`` the document."""

    kind: str
    source: str
    user: str
    assistant: str


def exchanges(document: Document, rng: random.Random) -> Iterator[Exchange]:
    """All samples of one document; the random passages are drawn from ``rng``."""
    makers = {"docs": _docs, "stdlib": _code, "jargon": _terms, "plays": _no_questions}
    pairs = [*makers[document.source](document), *_passages(document, rng)]
    for kind, user, assistant in pairs:
        if 0 < len(assistant) <= MAX_ANSWER and len(user) <= 1200:
            yield Exchange(kind, document.name, user, assistant)


def chatml(turns: list[tuple[str, str]]) -> str:
    """ChatML text of (role, content) turns, as the tokenizer's chat template writes it."""
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def chat_texts(documents: list[Document], seed: int) -> Iterator[str]:
    """ChatML texts of one to three exchanges each, in a shuffled order."""
    rng = random.Random(seed)
    every = (exchange for document in documents for exchange in exchanges(document, rng))
    pool = [exchange for exchange in every if rng.random() < SHARE.get(exchange.kind, 1.0)]
    rng.shuffle(pool)
    while pool:
        turns: list[tuple[str, str]] = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if pool:
                exchange = pool.pop()
                turns += [("user", exchange.user), ("assistant", exchange.assistant)]
        yield chatml(turns)


def _docs(document: Document) -> Iterator[tuple[str, str, str]]:
    if "/faq/" in document.name:
        for title, body in _FAQ.findall(document.text):
            yield "faq", title.strip(), body.strip()
    module = _MODULE.search(document.text)
    if module:
        yield "module", f"What is the module {module[1]} for?", module[2].strip().rstrip(".") + "."
    for signature, body in _FUNCTION.findall(document.text):
        yield "function", f"What does {signature.strip()} do?", _flow(body)


def _terms(document: Document) -> Iterator[tuple[str, str, str]]:
    for term, body in _TERM.findall(document.text):
        yield "term", f'What does "{term.strip()}" mean?', _flow(body)


def _no_questions(document: Document) -> Iterator[tuple[str, str, str]]:
    return iter(())


def _code(document: Document) -> Iterator[tuple[str, str, str]]:
    for node, code in functions(document.text):
        summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        if summary:
            yield "write", f"Write the Python function {node.name}: {summary}", f"```python\n{code}\n```"
        names = [a.arg for a in node.args.args if len(a.arg) > 2 and a.arg != "self"]
        if names and len(code) < 600:
            new = names[0] + "_2"
            renamed = re.sub(rf"\b{re.escape(names[0])}\b", new, code)
            user = f"Rename {names[0]} to {new} in this code:\n\n```python\n{code}\n```"
            yield "rename", user, f"```python\n{renamed}\n```"


def functions(text: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Functions and methods of a module, each with its dedented source (80 to 800 characters)."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = lines[node.lineno - 1 : node.end_lineno]
            code = "\n".join(line[node.col_offset :] for line in body)
            if 80 <= len(code) <= 800:
                yield node, code


def _passages(document: Document, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    for passage, following in cut_passages(document.text, rng, every=6000):
        draw = rng.random()
        if draw < 0.4:
            yield "repeat", f"Repeat this passage exactly:\n\n{passage}", passage
        elif draw < 0.7:
            words = re.findall(r"\b[A-Za-z]{4,}\b", passage)
            if words:
                old, new = rng.choice(words), rng.choice(words)
                user = f'Replace "{old}" with "{new}" in this text:\n\n{passage}'
                yield "replace", user, re.sub(rf"\b{re.escape(old)}\b", new, passage)
        else:
            yield "continue", f"Continue this text:\n\n{passage}", following


def cut_passages(text: str, rng: random.Random, every: int) -> Iterator[tuple[str, str]]:
    """Pairs (passage, what follows it) of 120 to 700 characters, one per ``every`` characters."""
    paragraphs = [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    blocks = [pair for pair in pairwise(paragraphs) if all(120 <= len(part) <= 700 for part in pair)]
    yield from rng.sample(blocks, min(len(blocks), 1 + len(text) // every))


def _flow(body: str) -> str:
    """An indented reStructuredText paragraph as flowing text, without the markup of roles."""
    text = " ".join(line.strip() for line in body.strip().splitlines())
    return re.sub(r":\w+:`[~!]?([^`<]+?)(?: <[^`]*>)?`", r"\1", text).replace("``", "`")
