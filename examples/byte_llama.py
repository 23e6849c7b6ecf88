"""A small Llama over bytes and its tokenizer, for examples that need no download."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 258
PAD, EOS = 256, 257


def make_llama(*, width: int, layers: int, context: int) -> LlamaForCausalLM:
    """Return the model with fresh weights, drawn from torch's generator."""
    return LlamaForCausalLM(LlamaConfig(**llama_sizes(width, layers, context)))


def llama_sizes(width: int, layers: int, context: int) -> dict:
    """Return the arguments of a transformers configuration of the Llama family."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
    }


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which token ``b`` is byte ``b``; ``<pad>`` and ``<eos>`` follow."""
    # A byte-level tokenizer writes bytes as characters: printable ones as their Latin-1 character,
    # all others, in order, from 256 on (GPT-2's encoder.py).
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    names = {chr(b if b in printable else next(others)): b for b in range(256)}
    vocabulary = {**names, "<pad>": PAD, "<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
