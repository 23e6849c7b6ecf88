"""Proofs, made on the user's machine, that a backend computes the right bits."""

from .certificate import facts_of, fault_of, fault_of_squares, is_lost
from .verdicts import all_verdicts, file_of, folder

__all__ = [
    "all_verdicts",
    "facts_of",
    "fault_of",
    "fault_of_squares",
    "file_of",
    "folder",
    "is_lost",
]
