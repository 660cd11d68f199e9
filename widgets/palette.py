"""Colours and names that mean the same thing in every chart; readable without telling colours apart.

Order of the memory categories is fixed, and each is also labelled in words. The front end has the same values
in ``static/live.css``.
"""

from __future__ import annotations

from typing import Literal

Theme = Literal["auto", "light", "dark"]

# (key, name, colour), in drawing order
MEMORY: tuple[tuple[str, str, str], ...] = (
    ("weights", "weights", "#7c8796"),
    ("kv_payload", "KV payload", "#2f7fd1"),
    ("kv_meta", "KV metadata", "#8a63c9"),
    ("fragmentation", "fragmentation", "#d9822b"),
    ("draft", "draft", "#12908e"),
    ("workspace", "workspace", "#a08448"),
    ("kv_cached", "KV cached", "#9cc3ea"),
    ("kv_cold", "KV cold", "#5b7fa6"),
    ("kv_free", "KV reserved, free", "#c3cad3"),
)
PHASES: tuple[tuple[str, str, str], ...] = (
    ("schedule", "schedule", "#9aa3ad"),
    ("draft", "draft", "#12908e"),
    ("prepare", "prepare", "#b9a7dd"),
    ("forward", "forward", "#2f7fd1"),
    ("verify", "verify", "#d9822b"),
    ("sample", "sample", "#8a63c9"),
    ("commit", "commit", "#a08448"),
    ("emit", "emit", "#c3cad3"),
)
SOURCES: dict[str, str] = {
    "plain": "#7c8796", "accepted": "#12908e", "bonus": "#12908e", "corrected": "#d9822b",
}  # fmt: skip
A, B = "#7c8796", "#2f7fd1"  # the pinned run and the current one

INKS: dict[str, dict[str, str]] = {
    "auto": {"text": "#767b85", "grid": "rgba(128,134,142,0.22)", "axis": "rgba(128,134,142,0.6)",
             "page": "rgba(0,0,0,0)"},
    "light": {"text": "#24292f", "grid": "#e6e8eb", "axis": "#8c939c", "page": "#ffffff"},
    "dark": {"text": "#dfe3e8", "grid": "#33383f", "axis": "#6b737d", "page": "#15181c"},
}  # fmt: skip
