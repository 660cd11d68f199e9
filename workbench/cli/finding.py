"""One line of the doctor's report: what was found, what follows from it, and the way out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "limited", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe saw on this machine.

    ``found`` names versions and sizes; ``consequence`` says what does not work or works less well, and
    ``remedy`` what to do about it. Both are empty when the status is ``ok``. Without an ``essential`` part
    the workbench cannot run at all.
    """

    name: str
    status: Status
    found: str
    consequence: str = ""
    remedy: str = ""
    essential: bool = False

    def to_dict(self) -> dict[str, str | bool]:
        """JSON form: one flat object."""
        return asdict(self)
