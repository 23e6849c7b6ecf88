"""The recipes of docs/options.md, which commands and studies go through."""

from __future__ import annotations

from torch_bf16.recipe import Recipe

__all__ = ["BY_BYTES"]

BY_BYTES = {
    "16": Recipe("16", weights="bf16+fp32", exp_avg="fp32", exp_avg_sq="fp32"),
    "14": Recipe("14", weights="bf16+16", exp_avg="fp32", exp_avg_sq="fp32"),
    "12": Recipe("12", weights="bf16+16", exp_avg="fp32"),
    "10": Recipe("10", weights="bf16+16"),
    "9": Recipe("9", weights="bf16+8"),
    "8": Recipe("8"),
    "7.2": Recipe("7.2", weights="bf16+8", exp_avg="int8", exp_avg_sq="int8"),
    "6.2": Recipe("6.2", exp_avg="int8", exp_avg_sq="int8"),
}
"""By AdamW's bytes per parameter, with a bf16 gradient."""
