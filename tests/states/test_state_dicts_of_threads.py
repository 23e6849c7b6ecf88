"""State dicts that several threads make at once, as savers in the background do."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

import torch_bf16

INT8 = torch_bf16.Recipe("int8", exp_avg="int8", exp_avg_sq="int8")


@pytest.mark.parametrize("recipe", [INT8, "bf16-fp32-master"], ids=["int8", "master"])
def test_each_thread_gets_a_state_dict_that_loads(recipe):
    parameters = [nn.Parameter(torch.ones(8, 8).bfloat16())]
    optimizer = torch_bf16.AdamW(parameters, recipe=recipe)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    both, calls = Barrier(2), []

    def meet(_):
        """Let both threads be between our hooks, if they can."""
        calls.append(None)
        try:
            both.wait(timeout=0.2)
        except RuntimeError:  # the other one waits for this one, as it should
            both.reset()

    optimizer.register_state_dict_pre_hook(meet)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: optimizer.state_dict(), range(2))
    assert len(calls) == 2
    expected = optimizer.state[parameters[0]]
    for each in (first, second):
        fresh = torch_bf16.AdamW([nn.Parameter(parameters[0].detach().clone())], recipe=recipe)
        fresh.load_state_dict(each)
        (state,) = fresh.state.values()
        assert state.keys() == expected.keys()
        for key, number in state.items():
            assert torch.equal(torch.as_tensor(number), torch.as_tensor(expected[key])), key
