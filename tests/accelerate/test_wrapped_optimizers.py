"""An optimizer around another, which was converted before, goes through prepare as it is."""

import pytest
import torch

import torch_bf16


class Around(torch.optim.Optimizer):
    """Has the groups of what it wraps, as SAM and Lookahead do."""

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.base_optimizer, self.param_groups = base, base.param_groups

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


class Apart(Around):
    """Has groups of its own, as any wrapper has once it has loaded a state dict."""

    def __init__(self, base):
        super().__init__(base)
        self.param_groups = [{**each} for each in base.param_groups]


@pytest.mark.parametrize("kind", [Around, Apart])
def test_a_wrapper_around_a_converted_optimizer_is_prepared(
    make_accelerator, train, mode, model, batches, kind
):
    accelerator = make_accelerator(mode)
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch_bf16.convert(base, mode, model=model)
    wrapper = kind(base)
    before = model.up.weight.detach().clone()
    prepared, wrapped = accelerator.prepare(model, wrapper)
    train(accelerator, prepared, wrapped, batches[:3])
    assert wrapped.optimizer is wrapper
    assert model.up.weight.dtype == torch.bfloat16
    assert base.state[model.up.weight]["step"] == 3
    assert not torch.equal(model.up.weight.float(), before)
