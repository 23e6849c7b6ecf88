"""Every library of the benchmark that is installed here takes its steps, as the table describes."""

import pytest
import torch

from torch_bf16.tools.bench.peers import PEERS
from torch_bf16.tools.bench.rounds import measure

SHAPES = [(64, 512), (512,)]
CPU = torch.device("cpu")
ALL = [each for peer in PEERS.values() for each in peer.entries]


def installed(each):
    return next(peer for peer in PEERS.values() if each in peer.entries).installed


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name.replace(" ", "-"))
def test_a_library_steps_with_no_more_memory_than_estimated(each):
    if not installed(each) or not each.installed:
        pytest.skip("not installed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if each.only_on not in (None, device.type):
        pytest.skip(f"needs {each.only_on}")
    measured = measure([PEERS["torch"].entries[0], each], SHAPES, device, 1)
    assert measured.failures == {}
    result = measured.results[-1]
    numel = 64 * 512 + 512
    # Lookup tables of 8-bit formats are large beside so small a tensor.
    assert result.held <= each.estimate * numel + 4096
    assert result.moved > 3 * numel


def test_muon_steps_matrices_of_few_rows_and_refuses_embeddings_alone():
    """As of --model random with few --parameters; and with many of them in few --tensors."""
    ours = PEERS["muon"].entries[-1]
    results = measure([PEERS["torch"].entries[0], ours], [(16, 768), (768,)], CPU, 1)
    assert results.failures == {}
    found = measure([PEERS["torch"].entries[0], ours], [(900, 100), (100,)], CPU, 1)
    assert "more --tensors" in found.failures[ours.name]


def test_ours_are_known_as_ours():
    assert all(each.is_ours == each.stores.startswith("ours") for each in ALL)


def test_names_are_unique():
    assert len({each.name for each in ALL}) == len(ALL)
