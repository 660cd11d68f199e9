"""Errors of the training programs.

They are the user's to act on: a missing package, a budget of zero, a checkpoint that
belongs to another shape of model.
"""

from __future__ import annotations

from workbench.spec.errors import WorkbenchError


class TrainingError(WorkbenchError):
    """Base of everything that stops a training run before or during its work."""

    exit_code = 5


class MissingSource(TrainingError):
    """A text package is not in the sources folder and could not be fetched."""


class CheckpointMismatch(TrainingError):
    """A checkpoint was written by a run with another shape, seed or corpus."""
