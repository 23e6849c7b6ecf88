"""Proofs, made on the user's machine, that a backend computes the bits that it must."""

from .certificate import fault_of

__all__ = ["fault_of"]
