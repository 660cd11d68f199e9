"""Chat prompts: the model's own template, or a plain fallback that says it is one.

A base model has no template. Rather than refuse the conversation, or imitate another model's
markers, the turns are written as plain text and the result carries a ``ChatFallback`` whose notice
the caller shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.spec.errors import TokenizerError

Message = Mapping[str, str]
ROLES = ("system", "user", "assistant", "tool")

_NAMES = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True)
class ChatFallback:
    """Says that no chat template was there; ``notice`` is the sentence to show."""

    notice: str = (
        "This model has no chat template: the conversation is written as plain 'User:' / 'Assistant:' text. "
        "Answers may ramble, and may go on to write the user's next turn."
    )
    stop: tuple[str, ...] = ("\nUser:",)
    """Texts at which a caller should end the answer."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation ready to be continued: its text, its ids, and the fallback when one was used."""

    text: str
    ids: tuple[int, ...]
    fallback: ChatFallback | None = None


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ``TokenizerError`` unless every message has a known role and text content."""
    if not messages:
        raise TokenizerError("A conversation needs at least one message.", hint="Add a user message.")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise TokenizerError(
                f"Message {i} has role {role!r} and content of type {type(content).__name__}.",
                hint=f"A message is {{'role': one of {', '.join(ROLES)}, 'content': text}}.",
            )


def plain_chat(messages: Sequence[Message]) -> str:
    """The documented fallback: system text, then ``User: ...`` / ``Assistant: ...`` lines, open at the end.

    >>> plain_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    'Be brief.\\n\\nUser: Hi\\nAssistant:'
    """
    parts = []
    for message in messages:
        content = message["content"].strip()
        parts.append(
            f"{content}\n\n" if message["role"] == "system" else f"{_NAMES[message['role']]}: {content}\n"
        )
    return "".join(parts) + "Assistant:"
