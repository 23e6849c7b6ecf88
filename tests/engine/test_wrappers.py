"""Our optimizers inside of others are found at any depth, and never one of several."""

import pytest
import torch
from optimizer_wrappers import Wrapper
from torch import nn

import torch_bf16
from torch_bf16.engine.wrappers import held_optimizers, optimizer_for


class Base(torch.optim.Optimizer):
    """Has the parameters of what it holds, as SAM does."""

    def __init__(self, *bases):
        super().__init__([p for b in bases for g in b.param_groups for p in g["params"]], {})
        self.first, *others = bases
        for number, each in enumerate(others):
            setattr(self, f"other{number}", each)


def made(*layers):
    return [torch_bf16.AdamW(each.named_parameters(), lr=0.1) for each in layers]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda o: o,
        Wrapper,
        Base,
        lambda o: Wrapper(Wrapper(o)),
        lambda o: Wrapper(Base(Base(o))),
        lambda o: Wrapper((o,)),
        lambda o: Wrapper({"body": Base(o)}),
    ],
    ids=["itself", "host", "sam", "host-twice", "host-around-two", "in-a-tuple", "in-a-dict"],
)
def test_the_one_inside_is_found(wrap):
    (ours,) = made(torch_bf16.cast_model(nn.Linear(2, 2)))
    assert optimizer_for("f", wrap(ours)) is ours


def test_others_hold_none():
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for each in (plain, Wrapper(plain), None, "adamw"):
        with pytest.raises(ValueError, match=r"f was given .* which does not store its numbers"):
            optimizer_for("f", each)


def test_several_and_one_of_other_parameters_are_refused():
    layers = [torch_bf16.cast_model(nn.Linear(2, 2)) for _ in range(2)]
    both = made(*layers)
    assert held_optimizers(Base(*both)) == both
    with pytest.raises(ValueError, match=r"this Base holds 2 optimizers of torch_bf16 .*AdamW, A"):
        optimizer_for("f", Base(*both))
    partial = Base(both[0], torch.optim.SGD(layers[1].parameters()))
    with pytest.raises(ValueError, match="this Base has 2 parameters that the AdamW in it does"):
        optimizer_for("f", partial)


@pytest.mark.parametrize("wrap", [Wrapper, Base])
def test_gradients_of_one_inside_are_summed_and_released(wrap):
    model = torch_bf16.cast_model(nn.Linear(2, 2))
    (ours,) = made(model)
    torch_bf16.accumulate_gradients(model, wrap(ours), "bf16_stochastic")
    torch_bf16.release_gradients(model, wrap(ours))
    torch_bf16.reduce_gradients(model, wrap(ours))
    before = model.weight.detach().clone()
    for _ in range(2):
        model(torch.ones(1, 2).bfloat16()).sum().backward()
        ours.step()
    assert model.weight.grad is None
    assert not torch.equal(model.weight, before)
