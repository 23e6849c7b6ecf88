"""Optimizers that step by their own code on fp32 copies, and the conversion of others."""
