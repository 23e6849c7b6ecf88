"""Plans of released steps: however many there are, a step looks at the whole optimizer once."""

from collections import Counter

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16.engine.states import States


class Counted(list):
    """A list that counts how often somebody walks along it."""

    walks = 0

    def __iter__(self):
        type(self).walks += 1
        return super().__iter__()


def backward(parameters):
    sum((each * each).sum() for each in parameters).backward()


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch_bf16.AdamW, {}),
        (torch_bf16.AdamW, {"cautious": True}),
        (torch_bf16.Adafactor, {}),
        (torch_bf16.Muon, {}),
    ],
    ids=["adamw", "cautious", "adafactor", "muon"],
)
def test_walks_along_all_parameters_do_not_grow_with_their_number(cls, options, monkeypatch):
    walks = Counter()
    plain = States.__iter__
    monkeypatch.setattr(
        States, "__iter__", lambda states: walks.update(["states"]) or plain(states)
    )
    counts = []
    for number in (3, 9):
        model = nn.ParameterList(torch.ones(2, 2) for _ in range(number))
        torch_bf16.cast_model(model, "bf16-fp32-master")
        optimizer = cls(model.parameters(), lr=0.1, recipe="bf16-fp32-master", **options)
        torch_bf16.release_gradients(model, optimizer, max_norm=1.0)
        # No plan is made for several parameters, because each is clipped by its own norm.
        (group,) = optimizer.param_groups
        group["params"] = Counted(group["params"])
        before = Counted.walks, walks["states"]
        backward(model)
        assert all(each.grad is None for each in model)
        optimizer.step()
        counts.append((Counted.walks - before[0], walks["states"] - before[1]))
    assert counts[0] == counts[1]


def test_a_step_sees_at_once_what_has_changed_since_the_last():
    model = nn.ParameterList(torch.ones(2, 2) for _ in range(3))
    torch_bf16.cast_model(model, "bf16-fp32-master")
    optimizer = torch_bf16.AdamW(model.parameters(), lr=0.1, recipe="bf16-fp32-master")
    torch_bf16.release_gradients(model, optimizer, max_norm=1.0)
    backward(model)
    optimizer.step()
    (group,) = optimizer.param_groups
    group["params"][0] = replacing = nn.Parameter(model[0].detach().clone())
    optimizer.step()  # from now on, its gradient is released, too
    with pytest.raises(torch_bf16.StateMismatchError, match="is in no group any more"):
        backward([replacing, *model[1:]])
    group["params"] = [*model]
    optimizer.step()
    model.zero_grad()
    backward(model)
    optimizer.step()
    assert all(each.grad is None for each in model)
