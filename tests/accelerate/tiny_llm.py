"""A language model and data small enough for tests, as transformers and TRL want them."""

from __future__ import annotations

import torch
from byte_llama import byte_tokenizer, make_llama

__all__ = ["llama", "sequences", "tokenizer"]

tokenizer = byte_tokenizer


def llama():
    torch.manual_seed(0)
    return make_llama(width=32, layers=2, context=64)


def sequences():
    """Sixty-four sequences that repeat themselves, so that they can be learned."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(64, (64, 1), generator=generator)
    rows = ((starts + 3 * torch.arange(16)) % 64).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]
