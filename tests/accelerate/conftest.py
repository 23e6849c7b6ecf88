"""A fresh Accelerate for every test, and a model small enough to train in milliseconds."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from forkserver import IMPORTS
from launching import environment
from small_model import Model
from torch.nn.functional import mse_loss
from unhooked import Unhooked

IMPORTS += [
    "accelerate",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
]


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="session")
def run_unhooked():
    """``run_unhooked(script, *arguments, folder=..., **variables)``, with a user's environment.

    As in a fresh interpreter that has imported torch and nothing of ours.
    """
    imports = ["datasets", "scipy.optimize", "sklearn.metrics"]
    processes = Unhooked(imports, ["accelerate", "transformers", "peft"])

    def run_script(script, *arguments, folder, **variables):
        return processes.run(script, *arguments, folder=folder, **environment(**variables))

    yield run_script
    processes.close()


@pytest.fixture
def make_accelerator():
    """Makes an Accelerator on the CPU, whatever the machine has."""

    def make(mixed_precision=None, **options):
        return Accelerator(mixed_precision=mixed_precision, cpu=True, **options)

    return make


@pytest.fixture(params=["bf16-stochastic", "bf16-fp32-master"])
def mode(request):
    """Each of the two modes."""
    return request.param


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def batches():
    """Inputs and targets that a small network can learn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, 8, generator=generator)
    return list(zip(x, (x[..., :1] - x[..., 1:2]).tanh(), strict=True))


@pytest.fixture
def train():
    """The loop of Accelerate's documentation; returns the losses."""
    return _train


def _train(accelerator, model, optimizer, batches, scheduler=None):
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
