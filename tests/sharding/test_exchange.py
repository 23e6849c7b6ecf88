"""Messages between ranks: tensors of any size and dtype, to any ranks."""

import torch
import torch.distributed as dist

from torch_bf16.sharding import exchange

DTYPES = [torch.int8, torch.float32, torch.bfloat16, torch.float64, torch.int16]


def sent(source, to):
    """What one rank sends another: odd numbers of elements, none among them, strided and not."""
    found = []
    for number, dtype in enumerate(DTYPES):
        size = 3 * (source + to + number) if number != 2 else 0
        whole = torch.arange(source, source + 2 * size + 1).to(dtype)
        found.append(whole[::2] if number % 2 else whole)
    return found


def exchanged():
    """With all others but one, which gets nothing from rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b and (a, b) != (0, 1)]
    outgoing = {b: sent(a, b) for a, b in pairs if a == rank}
    likes = {a: [(each.numel(), each.dtype) for each in sent(a, b)] for a, b in pairs if b == rank}
    found = exchange(outgoing, likes, dist.group.WORLD, torch.device("cpu"))
    assert found.keys() == likes.keys()
    for source, tensors in found.items():
        for got, want in zip(tensors, sent(source, rank), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


def test_each_rank_gets_what_others_sent_it(ranks):
    ranks(3, exchanged)
