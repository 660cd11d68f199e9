"""Typed errors of the workbench.

Every message says what was refused, where, and the way out. ``hint`` is the way out on
its own, so that a panel can show it beside the failure and a CLI can print it on its
own line. ``code`` is a stable name for JSON output.
"""

from __future__ import annotations

from workbench.spec.install import install_line


class WorkbenchError(Exception):
    """Base of all errors a user can cause or must act on."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip() if hint else message)
        self.message = message
        self.hint = hint

    @property
    def code(self) -> str:
        """Stable name of the error kind, e.g. ``RecipeError``."""
        return type(self).__name__

    def to_dict(self) -> dict[str, str]:
        """JSON form: kind, what happened, the way out."""
        return {"error": self.code, "message": self.message, "hint": self.hint}


# -- recipes and plans --------------------------------------------------------------------


class RecipeError(WorkbenchError):
    """A recipe that cannot be read: malformed JSON, duplicate or wrongly typed entries."""

    exit_code = 2


class UnknownTechnique(RecipeError):
    """A recipe names a technique the catalogue does not have."""


class OptionError(RecipeError):
    """An option is unknown, of the wrong type, or out of its range."""


class PlanError(WorkbenchError):
    """Techniques that do not fit together, the model, or the device.

    ``conflicts`` holds one plain record per conflict (``workbench.spec.plan.Conflict``).
    """

    exit_code = 2

    def __init__(self, message: str, *, conflicts: tuple[object, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.conflicts = conflicts

    def to_dict(self) -> dict[str, str]:
        """As every error's, with the ways out of the conflicts where no other is named."""
        remedies = dict.fromkeys(str(getattr(c, "remedy", "")) for c in self.conflicts)
        return {**super().to_dict(), "hint": self.hint or " ".join(filter(None, remedies))}


class MissingExtra(WorkbenchError):
    """An optional dependency is not installed; ``hint`` is the install line."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed.",
            hint=f"Install it with: {install_line(extra)}",
        )
        self.package = package
        self.extra = extra


# -- models -------------------------------------------------------------------------------


class ModelError(WorkbenchError):
    """Base of everything that can be wrong with a model on disk."""

    exit_code = 3


class ModelNotFound(ModelError):
    """No model of that name, or a folder without one."""


class MissingTensor(ModelError):
    """A tensor or shard that the checkpoint should hold is not there."""


class WrongShape(ModelError):
    """A tensor's shape or dtype does not match the configuration."""


class UnsupportedModel(ModelError):
    """An architecture, RoPE kind or quantization scheme that is not implemented."""


class UnsafeFile(ModelError):
    """A file refused for safety: pickles, remote code, links out of the root, absurd headers."""


class DownloadRefused(ModelError):
    """A download is not allowed here or its source cannot be reached."""


class TokenizerError(ModelError):
    """A tokenizer that is missing, broken, or lacks what was asked of it."""


class MissingHead(ModelError):
    """A trained draft head that is not there; ``hint`` is the command that trains it."""


class HeadMismatch(ModelError):
    """A draft head that was trained for other weights, or a file that is no head."""


# -- requests and running -----------------------------------------------------------------


class RequestError(WorkbenchError):
    """A single request that cannot be served; other requests are not affected."""

    exit_code = 4


class EmptyPrompt(RequestError):
    """A prompt without tokens."""


class UnknownToken(RequestError):
    """A prompt given as token ids holds one that the model's vocabulary lacks."""


class PromptTooLong(RequestError):
    """A prompt that leaves no room in the model's context."""


class CapacityError(RequestError):
    """A request that could never fit the KV pool, however long it waited."""


class DuplicateRequest(RequestError):
    """A request id that is still alive was used again."""


class SamplingError(RequestError):
    """A sampling setting out of its range."""


class MaskError(RequestError):
    """A logits mask that allows no token at all, or names tokens the model lacks."""


class Cancelled(WorkbenchError):
    """Work stopped because its cancel token was set; partial results are kept."""

    exit_code = 130


class SessionClosed(WorkbenchError):
    """The session was closed; open a new one."""


class JobFailed(WorkbenchError):
    """A job ended with an unexpected exception; ``kind`` is its type's name."""

    def __init__(self, kind: str, message: str, *, hint: str = "", traceback_text: str = "") -> None:
        super().__init__(f"{kind}: {message}", hint=hint)
        self.kind = kind
        self.traceback_text = traceback_text


# -- kernels ------------------------------------------------------------------------------


class KernelError(WorkbenchError):
    """Base of what can keep a kernel from running."""

    exit_code = 6


class UnsupportedInput(KernelError):
    """Tensors a kernel does not take: dtype, layout, alignment, size; ``hint`` is what it takes."""


class CompilerError(KernelError):
    """A compiler that is missing or too old, or that could not compile a kernel; the message quotes it."""


# -- stored KV ----------------------------------------------------------------------------


class PayloadError(WorkbenchError):
    """Stored KV that is truncated, damaged, or of another format, model or calibration."""

    exit_code = 5


# -- internal contracts -------------------------------------------------------------------


class InvariantError(WorkbenchError):
    """The books do not balance (page counts, references, lengths): a bug, reported loudly."""


# -- records ------------------------------------------------------------------------------


class RecordError(WorkbenchError):
    """The run store or an imported run file cannot be read or written."""

    exit_code = 5


class StorageError(WorkbenchError):
    """Output that cannot be written: a full disk, a quota, a place that is read-only or broken."""

    exit_code = 5
