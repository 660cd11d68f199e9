"""What went wrong, as plain data a panel can show: what, where, the way out, and details to copy.

The exception's frames are cleared once its text is taken. A traceback that is kept holds every local of every
frame, among them the tensors that ran the device out of memory.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from workbench.spec.errors import JobFailed, WorkbenchError

_MAX_DETAILS = 8000  # characters


@dataclass(frozen=True)
class Problem:
    """A failure on screen; ``where``: what was being done, ``hint``: the way out, ``details``: to copy."""

    kind: str
    message: str
    where: str = ""
    hint: str = ""
    details: str = ""

    def to_dict(self) -> dict[str, str]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def of(cls, error: BaseException, where: str = "") -> Problem:
        """Describe an exception and let go of everything its traceback holds."""
        kind = error.kind if isinstance(error, JobFailed) else type(error).__name__
        message = error.message if isinstance(error, WorkbenchError) else str(error)
        hint = error.hint if isinstance(error, WorkbenchError) else ""
        text = error.traceback_text if isinstance(error, JobFailed) else ""
        text = text or "".join(traceback.format_exception(error))
        release(error)
        return cls(kind, message or kind, where, hint, text[-_MAX_DETAILS:])

    @classmethod
    def from_event(cls, record: Mapping[str, str], where: str = "") -> Problem:
        """The problem behind ``JobEvent.error`` or ``Run.error`` (``WorkbenchError.to_dict``)."""
        kind, message, hint = (record.get(k, "") for k in ("error", "message", "hint"))
        return cls(kind, message, where, hint, f"{kind}: {message} {hint}".strip())


def release(error: BaseException) -> None:
    """Clear the frames of an exception, its cause and its context, so that no tensor stays alive."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        # A frame that still runs keeps its locals and is left alone; finished ones are emptied.
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        current = current.__cause__ or current.__context__
