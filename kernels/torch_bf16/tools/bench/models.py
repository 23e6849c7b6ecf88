"""Parameter shapes of the models that a benchmark steps; it needs no weights of theirs."""

from __future__ import annotations

__all__ = ["MODELS", "Shapes", "gpt2", "llama", "random_shapes", "shard"]

Shapes = list[tuple[int, ...]]


def gpt2(
    layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024
) -> Shapes:
    """GPT-2 (Radford et al., 2019) in the layout of Hugging Face: tied embeddings, biases."""
    block = [
        *((width,), (width,)),
        *((width, 3 * width), (3 * width,)),
        *((width, width), (width,)),
        *((width,), (width,)),
        *((width, 4 * width), (4 * width,)),
        *((4 * width, width), (width,)),
    ]
    return [(vocabulary, width), (context, width), *(block * layers), (width,), (width,)]


def llama(
    layers: int, width: int, hidden: int, key_value: int, vocabulary: int = 128256, *, tied: bool
) -> Shapes:
    """Llama 3 (Dubey et al., 2024): grouped-query attention, a gated MLP, RMS norms, no biases.

    Args:
        layers: number of blocks.
        width: width of the residual stream.
        hidden: width of the MLP.
        key_value: heads times head dimension of keys and of values.
        vocabulary: rows of the embedding.
        tied: whether the output layer is the embedding.
    """
    block = [
        *((width, width), (key_value, width), (key_value, width), (width, width)),
        *((hidden, width), (hidden, width), (width, hidden)),
        *((width,), (width,)),
    ]
    head = [] if tied else [(vocabulary, width)]
    return [(vocabulary, width), *(block * layers), (width,), *head]


def shard(shapes: Shapes, ranks: int) -> Shapes:
    """The shapes on rank 0 of ``ranks`` if FSDP2 shards every parameter on its first dimension."""
    return [(-(-rows // ranks), *rest) for rows, *rest in shapes]


def random_shapes(parameters: int, tensors: int) -> Shapes:
    """Shapes like a transformer's: one tensor in three is a vector, the rest are matrices.

    Args:
        parameters: elements in all, met to within one row per matrix.
        tensors: number of tensors.

    Raises:
        ValueError: so many tensors have more elements, if each matrix has a row.
    """
    width = 768
    if parameters < tensors * width:
        raise ValueError(
            f"{parameters:,} parameters are too few for {tensors:,} tensors with rows of {width}: "
            f"give --parameters {tensors * width:,} or more, or fewer --tensors"
        )
    matrices = tensors - tensors // 3
    rows = round((parameters - (tensors - matrices) * width) / matrices / width)
    return [(width,) if i % 3 == 2 else (rows, width) for i in range(tensors)]


MODELS: dict[str, Shapes] = {
    "gpt2-124m": gpt2(),
    # Llama-3.2-1B; 32 heads of 64, 8 of them for keys and values.
    "llama-1b": llama(16, 2048, 8192, 512, tied=True),
    # Llama-3.1-8B over 8 ranks; 32 heads of 128, 8 of them for keys and values.
    "llama-8b-shard": shard(llama(32, 4096, 14336, 1024, tied=False), 8),
}
"""Shapes by the name on the command line."""
