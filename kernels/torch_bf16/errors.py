"""The exceptions that have no fitting built-in type."""

__all__ = ["BackendUnavailableError", "CheckpointError", "StateMismatchError"]


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot work here; the message says why and what can."""


class CheckpointError(RuntimeError):
    """A checkpoint file is damaged, foreign or of another model, or it could not be written."""


class StateMismatchError(ValueError):
    """A state dict or a live parameter does not fit the optimizer; nothing has been changed."""
