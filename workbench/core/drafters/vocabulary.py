"""How much of what a model says is among the tokens that a head drafts from (FR-Spec, arXiv 2502.14856).

A head keeps its own list: the tokens that the model said most often in the text it was trained on. What is
not on it can never be drafted, so coverage on other answers bounds what is accepted; a shorter list makes the
head's output matrix, most of its work, smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.core import catalog
from workbench.models.heads import HeadFile
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric

LISTS = (4096, 8192, 16384)
JUDGED, WANTED = 8192, 0.97
"""Share of the answers that so many tokens should cover."""


@dataclass(frozen=True)
class Covered:
    """The first ``size`` tokens of a head's list cover ``coverage`` of the answers in ``cell``.

    ``tau`` and ``draft_ms`` are those of the contestant ``drafter`` that drafts from so many; it is empty
    where none does.
    """

    cell: str
    head: str
    size: int
    coverage: float
    drafter: str = ""
    tau: float | None = None
    draft_ms: float | None = None

    @property
    def enough(self) -> bool | None:
        """Whether a list of 8192 covers as much as it should; None of another size."""
        return self.coverage >= WANTED if self.size == JUDGED else None

    def metric(self) -> Metric:
        """The coverage."""
        name = f"{self.cell}:{self.head}:coverage_{self.size}"
        return Metric(name, self.coverage, "", better="higher", note="of tokens of plain decoding's answers")

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def coverage(ids: Sequence[int], answers: Iterable[Sequence[int]], sizes: Sequence[int]) -> list[float]:
    """Share of all answers' tokens that are among the first n ``ids``, for each n of ``sizes``; 0 of none."""
    place = {token: at for at, token in enumerate(ids)}
    found = [place.get(token, len(ids)) for answer in answers for token in answer]
    return [sum(at < min(n, len(ids)) for at in found) / max(1, len(found)) for n in sizes]


def list_of(head: HeadFile) -> list[int]:
    """A head's list, the most frequent token first; empty where it has none."""
    found = head.tensors().get("ids")
    return [] if found is None else [int(i) for i in found.tolist()]


def drafted_size(recipe: Recipe, listed: int) -> int | None:
    """How many of ``listed`` tokens a recipe's head drafts from; None: of all that the model has."""
    for use in recipe:
        technique = catalog.get(use.id)
        size = getattr(technique.configure(dict(use.options)), "vocab", None)
        if technique.spec.seam == "drafter" and isinstance(size, int):
            return min(size, listed) if size else None
    return None
