"""torch's AveragedModel of a cast model is right where it is fp32, and says so where it is bf16."""

import copy
import pickle

import pytest
import torch
from averaged_network import move, network
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

from torch_bf16 import EMA, cast_model, ema_multi_avg_fn, torch_patches

HOW = {
    "ema_multi": lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.999)),
    "ema": lambda m: AveragedModel(m, avg_fn=get_ema_avg_fn(0.999), use_buffers=True),
    "swa_multi": lambda m: AveragedModel(m, multi_avg_fn=get_swa_multi_avg_fn()),
    "swa": AveragedModel,
}
every_way = pytest.mark.parametrize("how", HOW)


@every_way
@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["itself", "wrapped"])
def test_an_average_made_before_the_cast_stays_fp32_and_follows_the_bf16_weights(how, wrap):
    model = network()
    average = HOW[how](wrap(model))
    cast_model(model)
    # What torch does with an fp32 model of the same numbers.
    fp32 = copy.deepcopy(model).float()
    expected = HOW[how](wrap(fp32))
    for _ in range(3):
        average.update_parameters(wrap(model))
        expected.update_parameters(wrap(fp32))
        move(model)
        fp32.load_state_dict(model.state_dict())
    for name, each in average.module.state_dict().items():
        assert each.dtype == expected.module.state_dict()[name].dtype
        assert torch.equal(each, expected.module.state_dict()[name]), name


@every_way
def test_an_average_made_after_the_cast_follows_in_fp32_once_it_is_fp32(how):
    model = cast_model(network())
    average = HOW[how](model)
    average.module.float()
    fp32 = copy.deepcopy(model).float()
    expected = HOW[how](fp32)
    for _ in range(3):
        average.update_parameters(model)
        expected.update_parameters(fp32)
        move(model)
        fp32.load_state_dict(model.state_dict())
    for name, each in expected.module.state_dict().items():
        assert torch.equal(average.module.state_dict()[name], each), name


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()


@every_way
@pytest.mark.parametrize(
    "copied",
    [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["part", "copy", "pickle"],
)
def test_an_fp32_average_follows_copies_of_a_cast_model_and_parts_of_one(how, copied):
    holder = Holder()
    average = HOW[how](holder.net)
    followed = copied(cast_model(holder)).net
    average.update_parameters(followed)
    move(followed)
    average.update_parameters(holder.net)
    assert {p.dtype for p in average.parameters()} == {torch.float32}


def test_a_bf16_average_of_a_part_of_a_cast_model_is_named():
    holder = cast_model(Holder())
    with pytest.warns(UserWarning, match=r"average of '0\.weight' is bfloat16"):
        AveragedModel(holder.net).update_parameters(holder.net)


@every_way
def test_a_bf16_average_is_named_once_with_what_works(how):
    average = HOW[how](cast_model(network()))
    model = cast_model(network())
    match = (
        r"average of '0\.weight' is bfloat16, .* AveragedModel rounds .* works: torch_bf16\.EMA\("
    )
    with pytest.warns(UserWarning, match=match) as caught:
        average.update_parameters(model)
    average.update_parameters(model)  # a second warning would be an error
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "make",
    [
        lambda m: EMA(m, 0.999),
        lambda m: AveragedModel(m, multi_avg_fn=ema_multi_avg_fn(0.999)),
        lambda m: AveragedModel(m.requires_grad_(False)),
    ],
    ids=["EMA", "ema_multi_avg_fn", "frozen"],
)
def test_averages_that_lose_nothing_are_not_named(make):
    model = cast_model(network())
    average = make(model)
    for _ in range(2):
        average.update_parameters(model)


def test_models_that_were_not_cast_are_left_alone():
    cast_model(network())
    model = network().bfloat16()
    average = AveragedModel(model, use_buffers=False)
    average.update_parameters(model)
    # torch takes the parameters that there are, and as many buffers as there were.
    average.update_parameters(nn.Sequential(*model[:2]))
    with pytest.raises(ValueError, match=r"zip\(\)"):
        average.update_parameters(nn.Sequential(*model, nn.BatchNorm2d(8)))


def test_the_method_can_be_given_back():
    torch_patches.restore()
    stock = AveragedModel.update_parameters
    cast_model(network())
    assert AveragedModel.update_parameters is not stock
    torch_patches.restore()
    assert AveragedModel.update_parameters is stock
    cast_model(network())
