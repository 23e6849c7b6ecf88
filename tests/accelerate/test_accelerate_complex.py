"""Complex parameters under Accelerate: trained beside bf16 ones, clipped, saved and resumed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

from accelerate_bf16 import BF16RecipeKwargs


class Wave(nn.Module):
    """A layer and a product with complex weights, or with pairs of real ones."""

    def __init__(self, real_twin):
        super().__init__()
        torch.manual_seed(0)
        self.before, wave = nn.Linear(8, 8), torch.randn(5, 1, dtype=torch.complex64)
        self.wave = nn.Parameter(torch.view_as_real(wave) if real_twin else wave)

    def forward(self, x):
        wave = self.wave if self.wave.is_complex() else torch.view_as_complex(self.wave)
        return (torch.fft.rfft(self.before(x).float()) @ wave).real


def test_they_are_clipped_stepped_and_resumed_like_pairs_of_real_ones(
    make_accelerator, mode, batches, tmp_path
):
    ends, norms = [], []
    for real_twin in (False, True):
        keep = [BF16RecipeKwargs(keep_fp32=("wave",))] if real_twin else []
        accelerator = make_accelerator(mode, kwargs_handlers=keep)
        model = Wave(real_twin)
        prepared, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        assert model.before.weight.dtype == torch.bfloat16

        def train(number, prepared=prepared, optimizer=optimizer, accelerator=accelerator):
            for x, y in batches[number : number + 4]:
                accelerator.backward(mse_loss(prepared(x), y))
                norms.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()

        train(0)
        accelerator.save_state(tmp_path / str(real_twin))
        train(4)
        first = [p.detach().clone() for p in model.parameters()]
        accelerator.load_state(tmp_path / str(real_twin))
        train(4)
        assert all(map(torch.equal, first, model.parameters()))
        assert not real_twin or model.wave.dtype == torch.float32
        ends.append([torch.view_as_real(p) if p.is_complex() else p for p in first])
    assert all(map(torch.equal, *ends))
    assert norms[:12] == norms[12:]
    assert max(norms) > 0.5
