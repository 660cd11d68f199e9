"""Source lines of a kernel, each with the machine code it became, as a page that needs no script.

A line shows how many instructions it became and the telling ones among them; opened, it lists them in the
order of the code. Only lines that became code, and the functions they stand in, are shown. Colours are those
of the notebook, with fallbacks; every mark also has its word, and a page that drops the style sheet, as a
notebook that is not trusted does, keeps its lines.
"""

from __future__ import annotations

import ast
import html
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.kernels.listing import Instruction

_LONGEST = 60  # instructions listed below a line; the others are counted
_TELLING = {
    "product": "#2f7fd1", "product 16-bit": "#2f7fd1", "copy": "#8a63c9", "exponential": "#12908e",
    "spill": "#c8443c", "wait": "#7c8796",
}  # fmt: skip
_STYLE = """<style>
.wb-code{font:12px/1.5 var(--jp-code-font-family,ui-monospace,monospace);max-height:520px;overflow:auto;
 border:1px solid var(--jp-border-color2,rgba(128,134,142,.4));padding:4px 8px}
.wb-code .file>summary{font:600 12px/2 var(--jp-ui-font-family,system-ui,sans-serif)}
.wb-code .row{display:inline-grid;grid-template-columns:minmax(0,1fr) minmax(0,22em);gap:12px;
 width:calc(100% - 2em);vertical-align:top}
.wb-code summary{cursor:pointer}.wb-code summary:hover{background:rgba(128,134,142,.14)}
.wb-code samp{white-space:nowrap;overflow:hidden;text-overflow:ellipsis;
 font:inherit}
.wb-code .plain{padding-left:1.1em;opacity:.62}
.wb-code .asm{margin:0 0 4px 3em;padding:2px 8px;border-left:2px solid rgba(128,134,142,.4);overflow-x:auto}
.wb-code .asm div{white-space:pre}
.wb-code b{font-weight:600}.wb-code i{opacity:.7}
</style>"""


@dataclass(frozen=True)
class SourceView:
    """``code`` of the build ``name``; sources lie below ``root``."""

    name: str
    code: Sequence[Instruction]
    root: Path

    def by_line(self) -> dict[str, dict[int, list[Instruction]]]:
        """Instructions by file and line, in the order of the code."""
        found: dict[str, dict[int, list[Instruction]]] = defaultdict(lambda: defaultdict(list))
        for one in self.code:
            found[one.file][one.line].append(one)
        return {file: dict(lines) for file, lines in found.items()}

    def to_html(self) -> str:
        """The page: one block per file, the one with most matrix products and exponentials first and open."""
        files = sorted(self.by_line().items(), key=lambda item: _work(item[1]), reverse=True)
        blocks = "".join(self._file(file, lines, not i) for i, (file, lines) in enumerate(files))
        # JupyterLab would take the keys that open a line.
        keys = f'data-lm-suppress-shortcuts="true" tabindex="0" aria-label="{html.escape(self.name)}"'
        return f'{_STYLE}<div class="wb-code" role="region" {keys}>{blocks}</div>'

    def to_text(self) -> str:
        """Per file, the lines that became most instructions."""
        parts = [self.name]
        for file, lines in self.by_line().items():
            parts.append(f"{file or 'no line'}: {sum(map(len, lines.values()))} instructions")
            most = sorted(lines.items(), key=lambda item: -len(item[1]))[:5]
            parts += [f"  line {n}: {len(i)} ({_told(i, plain=True)})" for n, i in most]
        return "\n".join(parts)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": self.to_text(), "text/html": self.to_html()}

    def _file(self, file: str, lines: dict[int, list[Instruction]], first: bool) -> str:
        every = [one for found in lines.values() for one in found]
        name = html.escape(file or "no source line")
        path = self.root / file
        if not file or not path.is_file():
            body = _details("the compiler's own library", every, None)
        else:
            body = _body(path.read_text(encoding="utf-8").splitlines(), lines)
        head = f"<summary>{name} <i>{len(every)} instructions</i></summary>"
        return f'<details class="file"{" open" if first else ""}>{head}{body}</details>'


def _work(lines: dict[int, list[Instruction]]) -> tuple[int, int]:
    """Products and exponentials, then instructions of any kind."""
    every = [one.kind for found in lines.values() for one in found]
    return sum(kind in ("product", "product 16-bit", "exponential") for kind in every), len(every)


def _body(source: Sequence[str], lines: dict[int, list[Instruction]]) -> str:
    """The lines of the functions that became code."""
    rows = []
    for n in sorted({n for span in _functions("\n".join(source), lines) for n in span}):
        text = source[n - 1]
        if n in lines:
            rows.append(_details(text, lines[n], n))
        elif text.strip():
            rows.append(f'<div class="plain"><samp>{_source(text, n)}</samp></div>')
    return "".join(rows)


def _functions(source: str, lines: Iterable[int]) -> list[range]:
    """Line ranges of the functions that hold any of ``lines``, without their signatures and docstrings."""
    spans = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
            span = range(body[0].lineno, (node.end_lineno or node.lineno) + 1)
            if any(n in span for n in lines):
                spans.append(range(node.lineno, node.lineno + 1))
                spans.append(span)
    return spans


def _details(text: str, found: list[Instruction], n: int | None) -> str:
    shown = _chosen(found)
    listed = "".join(f"<div>{_line(one)}</div>" for one in shown)
    more = f"<div><i>and {len(found) - len(shown)} others</i></div>" if len(found) > len(shown) else ""
    row = f'<span class="row"><samp>{_source(text, n)}</samp> <span>{_told(found)}</span></span>'
    return f'<details><summary>{row}</summary><div class="asm">{listed}{more}</div></details>'


def _chosen(found: list[Instruction]) -> list[Instruction]:
    """At most ``_LONGEST``, in the order of the code; the telling ones are the last to be left out."""
    by_worth = sorted(range(len(found)), key=lambda i: found[i].kind not in _TELLING)
    return [found[i] for i in sorted(by_worth[:_LONGEST])]


def _source(text: str, n: int | None) -> str:
    """A source line with its number; its indentation survives without a style sheet."""
    indent = "&nbsp;" * (len(text) - len(text.lstrip()))
    number = "" if n is None else f"<i>{str(n).rjust(4).replace(' ', '&nbsp;')}</i>&nbsp;"
    return number + indent + html.escape(text.strip())


def _line(one: Instruction) -> str:
    colour = _TELLING.get(one.kind, "")
    text = html.escape(f"{one.address:05x}  {one.text}")
    word = " <i>under a product</i>" if one.under and one.kind == "exponential" else ""
    return f'<b style="color:{colour}">{text}</b>{word}' if colour else text + word


def _told(found: Sequence[Instruction], plain: bool = False) -> str:
    """``70 · 8 HGMMA · 32 MUFU.EX2 under a product``: how many, and the telling ones."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in found:
        if one.kind in _TELLING:
            name = "MUFU.EX2" if one.kind == "exponential" else one.base
            counts[
                name + (" under a product" if one.kind == "exponential" and one.under else ""), one.kind
            ] += 1
    marks = [f"{n} {name}" for (name, _), n in counts.items()]
    if plain:
        return ", ".join(marks)
    coloured = [f'<b style="color:{_TELLING[kind]}">{n} {name}</b>' for (name, kind), n in counts.items()]
    return " · ".join([f"<i>{len(found)}</i>", *coloured])
