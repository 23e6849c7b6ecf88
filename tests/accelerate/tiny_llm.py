"""A language model and data small enough for tests, as transformers and TRL want them."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def llama():
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=256,
        bos_token_id=None,
        eos_token_id=257,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def sequences():
    """Sixty-four sequences that repeat themselves, so that they can be learned."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(64, (64, 1), generator=generator)
    rows = ((starts + 3 * torch.arange(16)) % 64).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def tokenizer():
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {each: number for number, each in enumerate([*alphabet, "<pad>", "<eos>"])}
    bytewise = Tokenizer(models.BPE(vocab=names, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>")
