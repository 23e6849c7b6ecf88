"""accelerate.local_sgd averages weights every few steps, by less than a bf16 spacing each time."""

import cProfile
import pstats
from types import SimpleNamespace

import local_sgd_on_ranks as on_ranks
import pytest
import torch
from accelerate.local_sgd import LocalSGD


# Of 2048 weights rounded stochastically the mean scatters by 2 %.
@pytest.mark.parametrize(
    ("mode", "off"), [("no", 0.01), ("bf16-stochastic", 0.08), ("bf16-fp32-master", 0.01)]
)
def test_local_sgd_moves_as_far_as_in_fp32(ranks, mode, off):
    first, second = ranks(2, on_ranks.trained, mode)
    assert first[1] == second[1]
    matrix, vector = first[0]
    assert matrix == pytest.approx(64e-5 * 1.5, rel=off)
    assert vector == pytest.approx(64e-5, rel=0.1)


def test_the_work_of_averaging_grows_as_the_number_of_parameters(make_accelerator):
    def calls(layers):
        accelerator = make_accelerator("bf16-fp32-master")
        model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(layers)])
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        # In one process a LocalSGD does nothing, and has neither of the two.
        local_sgd = SimpleNamespace(accelerator=accelerator, model=model)
        LocalSGD._sync_and_avg_model_params(local_sgd)  # creates the states
        with cProfile.Profile() as profile:
            LocalSGD._sync_and_avg_model_params(local_sgd)
        return pstats.Stats(profile).total_calls

    assert calls(400) < 4.4 * calls(100)
