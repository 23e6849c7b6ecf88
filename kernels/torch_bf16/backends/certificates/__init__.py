"""Proofs, made on the user's machine, that a backend computes the bits that it must."""

from .certificate import fault_of, fault_of_squares
from .verdicts import file_of, folder, kept

__all__ = ["fault_of", "fault_of_squares", "file_of", "folder", "kept"]
