"""Accelerators that are copied, runs that leave a mode and come back, what is frozen otherwise."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import torch_bf16


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def train(accelerator, model, optimizer, steps):
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator)
        accelerator.backward(mse_loss(model(x), x))
        optimizer.step()
        optimizer.zero_grad()


def prepared(make_accelerator, mode, seed=0):
    accelerator, model = make_accelerator(mode), network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator, *accelerator.prepare(model, optimizer)


def test_a_pickled_accelerator_that_has_prepared_a_model_takes_it_along(make_accelerator, mode):
    accelerator, model, _ = prepared(make_accelerator, mode)
    other = pickle.loads(pickle.dumps(accelerator))
    (its,) = other._bf16_wrapped
    assert its is other._models[0]
    assert its is not model


def test_an_accelerator_keeps_no_model_alive(make_accelerator, mode):
    accelerator, model, optimizer = prepared(make_accelerator, mode)
    reference = weakref.ref(model)
    accelerator.free_memory()
    del model, optimizer
    gc.collect()
    assert reference() is None


@pytest.mark.usefixtures("one_rank")
def test_gradients_are_set_up_on_the_newest_wrapper_of_each_model(
    make_accelerator, mode, monkeypatch
):
    set_up = []
    monkeypatch.setattr(torch_bf16, "setup_gradients", lambda each, *_: set_up.append(each))
    accelerator, model = make_accelerator(mode), network()
    # As among several processes, where ranks that chose differently would wait for one another.
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    living = []
    for number in range(20):
        wrapper, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert isinstance(wrapper, DistributedDataParallel)
        assert set_up[-1] is wrapper
        if number % 3:
            living.append(wrapper)
        if number % 5 == 4:
            accelerator.free_memory()


@pytest.mark.parametrize("other", ["no", "bf16"])
def test_a_run_that_was_continued_in_another_mode_comes_back(
    make_accelerator, mode, other, tmp_path, caplog
):
    runs = []
    for number, each in enumerate((mode, other, mode)):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator, model, optimizer = prepared(make_accelerator, each, seed=number)
        if number:
            accelerator.load_state(str(tmp_path / str(number - 1)))
        runs.append((accelerator.unwrap_model(model), optimizer))
        if number < 2:
            train(accelerator, model, optimizer, 5)
            accelerator.save_state(str(tmp_path / str(number)))
    (_, _), (fp32, _), (model, back) = runs
    assert "weights bf16+16 -> bf16_nearest" not in caplog.text
    exact = torch_bf16.fp32_state_dict(model, back.optimizer)
    for name, parameter in fp32.named_parameters():
        # Masters start from the fp32 weights of the file, also those of vectors.
        has_master = mode == "bf16-fp32-master" or parameter.ndim < 2
        weight = parameter.detach()
        assert torch.equal(exact[name], weight if has_master else weight.bfloat16().float())
    train(accelerator, model, back, 2)


class Counted(nn.Linear):
    """Counts how often its parameters are listed."""

    listed = 0

    def parameters(self, recurse=True):
        self.listed += 1
        return super().parameters(recurse)


def test_a_model_is_looked_at_as_often_beside_many_others_as_beside_few(make_accelerator, mode):
    accelerator, first = make_accelerator(mode), Counted(2, 2)
    counts = []
    for model in (first, *(nn.Linear(2, 2) for _ in range(8))):
        before = first.listed
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        counts.append(first.listed - before)
    assert len({*counts[1:]}) == 1, counts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_of_a_stock_run_that_is_compiled_since_trains_in_the_mode(make_accelerator, mode):
    accelerator, model, optimizer = prepared(make_accelerator, "no")
    train(accelerator, model, optimizer, 1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator, compiled = make_accelerator(mode), torch.compile(model, backend="eager")
    for _ in range(2):
        given = torch.optim.AdamW(model.parameters(), lr=1e-2)
        compiled, optimizer = accelerator.prepare(compiled, given)
        assert model[0].weight.dtype == torch.bfloat16
        before = model[0].weight.clone()
        train(accelerator, compiled, optimizer, 3)
        assert not torch.equal(model[0].weight, before)
        assert compiled(torch.randn(4, 8)).dtype == torch.float32


class Distilled(nn.Module):
    """A student beside a teacher, a statistic and a base in other dtypes."""

    def __init__(self):
        super().__init__()
        self.student = network()
        self.teacher = network(1).half().requires_grad_(False)
        self.mean = nn.Parameter(torch.full((8,), 1 / 3, dtype=torch.float64), requires_grad=False)
        self.base = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x.half()).float() + self.mean + self.base
        return self.student(x) - target.float()


def test_what_is_frozen_in_another_dtype_is_left_alone_also_in_the_optimizer(
    make_accelerator, mode
):
    model = Distilled()
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    accelerator = make_accelerator(mode)
    # As scripts do: all parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer, 3)
    found = dict(model.named_parameters())
    for name, before in frozen.items():
        assert found[name].dtype == before.dtype
        assert torch.equal(found[name], before)
    assert found["student.0.weight"].dtype == torch.bfloat16


class Descent(torch.optim.SGD):
    """Its closure has no default."""

    def step(self, closure):
        loss = closure()
        super().step()
        return loss


def test_a_step_whose_closure_has_no_default_trains(make_accelerator, mode):
    accelerator, model = make_accelerator(mode), network()
    model, optimizer = accelerator.prepare(model, Descent(model.parameters(), lr=0.1))
    x, losses = torch.randn(4, 8), []

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(model(x), x)
        accelerator.backward(loss)
        losses.append(loss.item())
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
