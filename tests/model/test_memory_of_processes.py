"""Weights and states that processes share are shared after the cast, too."""

import multiprocessing

import pytest
import torch
from own_process import printed_by
from torch import nn

import torch_bf16
from torch_bf16 import errors

MODES = ["bf16-stochastic", "bf16-fp32-master"]


class SharedAdam(torch.optim.Adam):
    """As programs of A3C write it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.ones(()).share_memory_(),
                    "exp_avg": torch.zeros_like(p.data).share_memory_(),
                    "exp_avg_sq": torch.zeros_like(p.data).share_memory_(),
                }


def fill(weight):
    weight.fill_(3.0)


@pytest.mark.parametrize("mode", MODES)
def test_another_process_writes_the_weights_of_a_model_that_was_shared_before_the_cast(mode):
    model = nn.Linear(8, 8)
    model.share_memory()
    torch_bf16.cast_model(model, mode)
    # As Hogwild does; only a fill, because threads of this process do not live on in the other.
    process = multiprocessing.get_context("fork").Process(target=fill, args=[model.weight.data])
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (model.weight == 3.0).all()
    assert model.bias.is_shared()


@pytest.mark.parametrize("mode", MODES)
def test_states_that_a_program_has_shared_stay_shared(mode):
    model = nn.Linear(8, 8)
    model.share_memory()
    optimizer = SharedAdam(model.parameters())
    torch_bf16.prepare(model, optimizer, mode)
    state = optimizer.state[model.weight]
    assert all(state[key].is_shared() for key in ("step", "exp_avg", "exp_avg_sq"))


def test_weights_in_private_memory_and_those_of_a_file_stay_out_of_shared_memory(tmp_path):
    model = nn.Linear(8, 8)
    file = tmp_path / "weight"
    model.weight.data = torch.from_file(str(file), shared=True, size=64).view(8, 8)
    assert model.weight.is_shared()
    torch_bf16.cast_model(model)
    assert not any(p.is_shared() for p in model.parameters())


@pytest.mark.parametrize("replica", [False, True])
def test_what_was_sent_to_another_process_is_cast_for_that_process_alone(
    replica, monkeypatch, recwarn
):
    model = nn.Linear(8, 8)
    model.share_memory()
    # Launchers send models so, to processes which then train replicas.
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    monkeypatch.setattr(errors, "_said", set())
    if replica:
        monkeypatch.setenv("RANK", "1")
    torch_bf16.cast_model(model)
    assert not any(p.is_shared() for p in model.parameters())
    told = [each for each in recwarn if "no other process sees them" in str(each.message)]
    assert len(told) == (not replica)


def test_a_process_that_was_forked_after_a_cast_can_multiply():
    """A process that has used several threads leaves torch waiting for them in its children."""
    program = """
        import faulthandler, multiprocessing, torch, torch_bf16

        def multiply():
            faulthandler.dump_traceback_later(60, exit=True)
            (torch.ones(600, 600) @ torch.ones(600, 600)).sum()

        torch.set_num_threads(2)
        model = torch.nn.Linear(8, 8)
        torch_bf16.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-stochastic")
        child = multiprocessing.get_context("fork").Process(target=multiply)
        child.start()
        child.join(90)
        print(child.exitcode)
    """
    assert printed_by(program)[-1] == "0"
