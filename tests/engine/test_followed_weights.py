"""Weights that a program writes in place at every fifth or tenth step, as wrappers do."""

import pytest
import torch
from torch import nn

import torch_bf16

SIZE = (64, 33)


def make():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(SIZE).bfloat16())
    optimizer = torch_bf16.AdamW([p], lr=1e-3, recipe="bf16-fp32-master")
    take_step(p, optimizer)
    return p, optimizer


def take_step(p, optimizer):
    p.grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    optimizer.step()


def look_ahead(p, optimizer, steps):
    slow = p.detach().clone()
    for step in range(steps):
        take_step(p, optimizer)
        if step % 5 == 0:
            with torch.no_grad():
                slow.copy_(p.lerp_(slow, 0.5))


def test_a_lookahead_in_bf16_is_named_once():
    match = "in place before a step, and before earlier ones: .*exact_weights"
    with pytest.warns(UserWarning, match=match) as caught:
        look_ahead(*make(), steps=64)
    assert len(caught) == 1


@pytest.mark.parametrize("write", ["load", "decay of a row", "clamp", "prune"])
def test_what_is_written_now_and_then_or_in_few_numbers_or_with_zeros_is_not_named(write):
    p, optimizer = make()
    for step in range(128):
        with torch.no_grad():
            if write == "load" and step % 32 == 0:
                p.copy_(torch.randn(SIZE))
            elif write == "decay of a row":
                p[0].mul_(0.9)
            elif write == "clamp":
                p.clamp_(-0.5, 0.5)
            elif write == "prune":
                p[10:].mul_(0)
        take_step(p, optimizer)


def test_one_write_of_all_weights_is_not_taken_for_many_where_they_step_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6))).bfloat16()
    optimizer = torch_bf16.AdamW(
        model.parameters(), recipe="bf16-fp32-master", release={"max_norm": 1.0}
    )
    for step in range(3):
        if step == 1:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn_like(p))
        model(torch.randn(4, 16).bfloat16()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("by_data", [False, True])
def test_numbers_that_a_mask_leaves_keep_their_low_bits_however_few_they_are(by_data):
    p, optimizer = make()
    mask = torch.zeros(SIZE, dtype=torch.bfloat16)
    mask[::8] = 1
    for _ in range(3):
        with torch.no_grad():
            (p.data if by_data else p).mul_(mask)
        take_step(p, optimizer)
    kept = optimizer.exact_weight(p)
    with torch.no_grad():
        (p.data if by_data else p).mul_(mask)
    optimizer.param_groups[0]["lr"] = 0.0
    take_step(p, optimizer)
    assert torch.equal(optimizer.exact_weight(p), kept * mask)
    assert not torch.equal(optimizer.exact_weight(p), p.detach().float())


def test_weights_that_are_moved_and_put_back_at_every_tenth_step_keep_all_low_bits():
    p, optimizer = make()
    with torch.no_grad():
        p.add_(0)
    take_step(p, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    kept = optimizer.exact_weight(p)
    for _ in range(3):
        for _ in range(9):
            take_step(p, optimizer)
            assert torch.equal(optimizer.exact_weight(p), kept)
        before = p.detach().clone()
        with torch.no_grad():
            p.add_(0.5)
            p.copy_(before)


@pytest.mark.parametrize("steps", [1, 2])
def test_one_write_is_expected_again_for_one_step_alone(steps):
    p, optimizer = make()
    p.data.add_(0.5)
    with pytest.warns(UserWarning, match="written through"):
        take_step(p, optimizer)
    for _ in range(steps - 1):
        take_step(p, optimizer)
    assert optimizer.state_dict()["torch_bf16"].get("written", False) == (steps == 1)


def train_replicas():
    """Two of them, averaged after every fiftieth step."""
    replicas = [make() for _ in range(2)]
    for step in range(1, 402):
        for n, (p, optimizer) in enumerate(replicas):
            noise = torch.Generator().manual_seed(2 * step + n)
            p.grad = torch.randn(SIZE, generator=noise).bfloat16()
            optimizer.step()
        if step % 50 == 0:
            with torch.no_grad():
                average = sum(p.float() for p, _ in replicas) / 2
                for p, _ in replicas:
                    p.copy_(average)


def test_averages_of_replicas_are_named_once_however_rare():
    """Local SGD, or DiLoCo: a third of the movement was lost in silence."""
    with pytest.warns(UserWarning, match="in place before a step, and before ear") as caught:
        train_replicas()
    assert len(caught) == 2


@pytest.mark.parametrize("write", ["load", "put back", "clamp", "mask", "shrink"])
def test_what_is_loaded_clamped_or_put_back_after_every_fortieth_step_is_not_named(write):
    p, optimizer = make()
    for step in range(1, 400):
        take_step(p, optimizer)
        if step % 40 == 0:
            before = p.detach().clone()
            with torch.no_grad():
                if write in ("mask", "shrink"):
                    p.mul_(torch.rand(SIZE) > 0.1 if write == "mask" else 0.8)
                    continue
                p.copy_(torch.randn(SIZE) if write == "load" else before + 0.01)
                if write == "put back":
                    p.copy_(before)
                elif write == "clamp":
                    p.copy_(before.clamp(-0.5, 0.5))
