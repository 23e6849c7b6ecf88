"""Contracts on bits: how numbers are rounded, and where the noise comes from."""
