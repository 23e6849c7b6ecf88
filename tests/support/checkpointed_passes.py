"""fp32 sums under DDP where backward passes lie in one another, or fail; see
test_gradients_ranks.py."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from gradients_replica import MICRO_BATCHES, Model, gradient_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torch_bf16


class Checkpointed(Model):
    """A model that computes its first product again, by a backward pass within the backward pass.

    Args:
        reentrant: whether it does.
        ties: whether a parameter of the inner pass also gets a gradient in the outer one.
    """

    def __init__(self, reentrant, ties):
        super().__init__()
        self.reentrant, self.ties, self.fails = reentrant, ties, False

    def forward(self, x):
        product = functools.partial(torch.mul, self.a)
        inner = checkpoint(product, x, use_reentrant=self.reentrant)
        if self.fails and inner.requires_grad:
            inner.register_hook(lambda _: 1 / 0)
        loss = (inner.sum() * self.bb).sum()
        return loss + self.a.sum() if self.ties else loss


def run_nested_passes():
    """Reentrant checkpointing changes no sum, nor what DDP makes of it."""
    # DDP itself takes no parameter of both passes where it reduces.
    for sync, ties in ((True, False), (False, False), (False, True)):
        found = []
        for reentrant in (False, True):
            bare = Checkpointed(reentrant, ties)
            optimizer = torch_bf16.SGD(list(bare.named_parameters()), lr=0.1)
            model = DistributedDataParallel(bare)
            torch_bf16.accumulate_gradients(model, optimizer, "fp32")
            for number in range(MICRO_BATCHES):
                with nullcontext() if sync else model.no_sync():
                    x = gradient_of(dist.get_rank(), 0, number, "x", (8, 4)).requires_grad_()
                    model(x).backward()
            found.append([p.grad for p in bare.parameters()])
        for one, other in zip(*found, strict=True):
            assert one.dtype == torch.float32
            assert one.ne(0).any()
            # Within one pass, torch adds the two gradients of a parameter in bf16.
            torch.testing.assert_close(other, one, rtol=0, atol=2**-3 if ties else 0)


def run_failed_pass():
    """What a pass has brought before it failed stays in the sum, as it does in torch."""
    found = {}
    for format in ("bf16_nearest", "fp32"):
        bare = Checkpointed(reentrant=False, ties=False)
        optimizer = torch_bf16.SGD(list(bare.named_parameters()), lr=0.1)
        model = DistributedDataParallel(bare)
        torch_bf16.accumulate_gradients(model, optimizer, format)
        with model.no_sync():
            model(torch.ones(8, 4)).backward()
            bare.fails = True
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(8, 4)).backward()
        found[format] = [p.grad.float() for p in bare.parameters()]
    assert all(map(torch.equal, *found.values()))
    assert found["fp32"][1].eq(64).all()  # of bb, which comes first
