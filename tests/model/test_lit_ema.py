"""LitEma, whose averages are buffers, follows bf16 weights in fp32, or is named."""

import copy
import gc
import weakref

import pytest
import torch
from averaged_network import LitEma, move, network

from torch_bf16 import cast_model, torch_patches

DECAY = 0.999


def averages(ema: LitEma) -> dict[str, torch.Tensor]:
    return {name: each for name, each in ema.named_buffers() if each.dim() > 0}


def test_an_fp32_average_follows_the_bf16_weights():
    model = torch.nn.ModuleDict({"net": network()})
    model["ema"] = LitEma(model["net"], DECAY)
    cast_model(model)
    fp32 = copy.deepcopy(model["net"]).float()
    expected = LitEma(fp32, DECAY)
    expected.load_state_dict(model["ema"].state_dict())
    for _ in range(3):
        move(model["net"])
        fp32.load_state_dict(model["net"].state_dict())
        model["ema"](model["net"])
        expected(fp32)
    for name, each in averages(expected).items():
        assert torch.equal(averages(model["ema"])[name], each), name


def test_a_class_that_is_defined_after_the_first_cast_follows_from_the_next_cast_on():
    cast_model(network())

    class Later(LitEma):
        def forward(self, model: torch.nn.Module) -> None:
            assert self.m_name2s_name
            super().forward(model)

    model = network()
    ema = Later(model, DECAY)
    before = {name: each.clone() for name, each in averages(ema).items()}
    cast_model(model)
    move(model)
    ema(model)
    moved = {name for name, each in averages(ema).items() if not torch.equal(before[name], each)}
    assert moved >= {"0weight", "3weight"}


def test_a_class_that_a_program_has_dropped_is_freed():
    class Dropped(LitEma):
        def forward(self, model: torch.nn.Module) -> None:
            assert self.m_name2s_name
            super().forward(model)

    stock = Dropped.forward
    for _ in range(2):
        cast_model(network())
        ours = Dropped.forward
        assert ours is not stock
        cast_model(network())
        assert Dropped.forward is ours
        torch_patches.restore()
        assert Dropped.forward is stock
    cast_model(network())
    kept = weakref.ref(Dropped)
    del Dropped, stock, ours
    gc.collect()
    assert kept() is None


class WithOtherArguments(LitEma):
    """Programs change their copies."""

    def forward(self, net, step=0):
        assert self.m_name2s_name
        super().forward(net)
        return step


def test_copies_may_take_other_arguments():
    model = network()
    ema = WithOtherArguments(model, DECAY)
    cast_model(model)
    before = {name: each.clone() for name, each in averages(ema).items()}
    move(model)
    assert ema(model, 1) == ema(net=model, step=1) == 1
    assert not torch.equal(averages(ema)["0weight"], before["0weight"])


def test_a_bf16_average_is_named_once_with_what_works():
    model = cast_model(network())
    ema = LitEma(model, DECAY)
    with pytest.warns(UserWarning, match=r"average of '0.weight' is bfloat16.*LitEma rounds it"):
        ema(model)
    ema(model)  # pytest makes an error of a warning


def test_an_average_of_another_model_is_left_alone():
    cast_model(network())
    model = network()
    ema = LitEma(model.bfloat16(), DECAY)
    ema.float()
    before = {name: each.clone() for name, each in averages(ema).items()}
    move(model)
    ema(model)
    assert all(torch.equal(before[name], each) for name, each in averages(ema).items())
