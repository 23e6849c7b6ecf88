"""What state dicts show of exact masters: the same bits under names that say what they are."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_state_dicts import everything, snapshot, through_file, train
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import torch_bf16

RECIPES = {
    "remainder16": "bf16-fp32-master",
    "remainder8": torch_bf16.Recipe("9", weights="bf16+8"),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
every_remainder = pytest.mark.parametrize("key", RECIPES)


def with_every_pattern():
    """A module and an optimizer whose lower halves are all that 16 bits can be."""
    module = torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    optimizer = torch_bf16.AdamW(module.parameters(), recipe="bf16-fp32-master")
    get_optimizer_state_dict(module, optimizer)
    patterns = torch.arange(65536).to(torch.int16).view(256, 256)
    optimizer.state[module.weight]["remainder16"].copy_(patterns)
    return module, optimizer, patterns


def test_a_state_dict_shows_lower_halves_as_bf16_in_the_same_memory():
    module, optimizer, patterns = with_every_pattern()
    own = optimizer.state[module.weight]["remainder16"]
    shown = optimizer.state_dict()["state"][0]["remainder16"]
    assert (own.dtype, shown.dtype) == (torch.int16, torch.bfloat16)
    assert shown.data_ptr() == own.data_ptr()
    assert torch.equal(shown.view(torch.int16), patterns)


def test_every_pattern_survives_a_file_and_a_load(tmp_path):
    _, optimizer, patterns = with_every_pattern()
    saved = through_file(optimizer.state_dict(), tmp_path)
    _, other, _ = with_every_pattern()
    for state in other.state.values():
        state["remainder16"].zero_()
    other.load_state_dict(saved)
    (state,) = other.state.values()
    assert torch.equal(state["remainder16"], patterns)


def test_every_pattern_survives_a_program_that_saves_all_bf16_as_fp32():
    """fairseq's move_to_cpu casts whatever has 16 bits."""
    _, optimizer, patterns = with_every_pattern()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["remainder16"] = state["remainder16"].float()
    _, other, _ = with_every_pattern()
    for state in other.state.values():
        state["remainder16"].zero_()
    other.load_state_dict(saved)
    (state,) = other.state.values()
    assert torch.equal(state["remainder16"], patterns)


def test_every_pattern_survives_a_distributed_checkpoint_in_place(tmp_path):
    module, optimizer, patterns = with_every_pattern()
    dcp.save({"o": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=tmp_path)
    own = optimizer.state[module.weight]["remainder16"]
    own.zero_()
    states = get_optimizer_state_dict(module, optimizer)
    dcp.load({"o": states}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(module, optimizer, states)
    assert torch.equal(own, patterns)
    assert optimizer.state[module.weight]["remainder16"] is own, "nothing was copied"


def trained(recipe):
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 8, bias=False)
    torch_bf16.cast_model(module, recipe)
    optimizer = torch_bf16.AdamW(module.parameters(), recipe=recipe)
    return module, train(optimizer, 0, 2)


def test_a_distributed_checkpoint_of_other_bits_is_refused_and_not_converted(tmp_path):
    """It copies into what is there; integers would become the nearest bf16 numbers, in silence."""
    module, optimizer = trained(RECIPES["remainder8"])
    states = get_optimizer_state_dict(module, optimizer)
    dcp.save({"o": states}, checkpoint_id=tmp_path)
    module, optimizer = trained(RECIPES["remainder16"])
    before = everything(optimizer)
    states = get_optimizer_state_dict(module, optimizer)
    with pytest.raises(CheckpointException, match=r"Missing key .*o\.state\.weight\.remainder16"):
        dcp.load({"o": states}, checkpoint_id=tmp_path)
    assert everything(optimizer) == before


def test_codes_of_moments_are_refused_where_bf16_moments_are_and_load_into_codes(tmp_path):
    """They share a key; -127 to 127 would become moments, in silence."""
    int8 = torch_bf16.Recipe("int8", weights="bf16+8", exp_avg="int8", exp_avg_sq="int8")

    def made(recipe):
        torch.manual_seed(0)
        module = torch.nn.Linear(64, 4, bias=False, dtype=torch.bfloat16)
        return module, train(torch_bf16.AdamW(module.parameters(), recipe=recipe), 0, 2)

    module, optimizer = made(int8)
    expected = snapshot(optimizer.state_dict())
    dcp.save({"o": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=tmp_path)
    train(optimizer, 5, 6)
    states = get_optimizer_state_dict(module, optimizer)
    dcp.load({"o": states}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(module, optimizer, states)
    assert snapshot(optimizer.state_dict()) == expected
    assert optimizer.state[module.weight]["exp_avg"].shape == module.weight.shape

    bf16 = torch_bf16.Recipe("bf16", weights="bf16+8")
    module, optimizer = made(bf16)
    before = everything(optimizer)
    states = get_optimizer_state_dict(module, optimizer)
    with pytest.raises(CheckpointException, match=r"[Ss]ize mismatch .*exp_avg"):
        dcp.load({"o": states}, checkpoint_id=tmp_path)
    assert everything(optimizer) == before
