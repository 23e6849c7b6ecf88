"""Where tensors are, asked for in one call or one by one."""

import pytest
import torch

from torch_bf16.engine import addresses
from torch_bf16.engine.addresses import Addresses


def one_by_one(tensors, numbers, places):
    return all(tensors[place].data_ptr() == numbers[place] for place in places)


@pytest.fixture(params=["torch", "one by one", "in one call"])
def ask(request, monkeypatch):
    """As this build of torch does, as builds for CPUs do, and as those for GPUs do."""
    if request.param != "torch":
        found = one_by_one if request.param == "in one call" else None
        monkeypatch.setattr(addresses, "_all_at", found)


@pytest.mark.usefixtures("ask")
def test_tensors_are_where_they_were_until_one_moves():
    tensors = [torch.ones(4), torch.ones(0), torch.ones(2, 3)]
    known = Addresses.of(tensors)
    assert known.values == [each.data_ptr() for each in tensors]
    assert known.now(tensors) is known
    assert known.now([each.detach() for each in tensors]) is known
    for others in (tensors[::-1], tensors[:2], [*tensors, torch.ones(1)], []):
        now = known.now(others)
        assert now is not known
        assert now.values == [each.data_ptr() for each in others]
    tensors[2].data = torch.ones(2, 3)
    assert known.now(tensors).values[2] == tensors[2].data_ptr() != known.values[2]
    assert Addresses.of([]).now([]).values == []
