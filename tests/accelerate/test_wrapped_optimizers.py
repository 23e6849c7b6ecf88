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


class Both(torch.optim.Optimizer):
    """Takes the steps of two."""

    def __init__(self, *both):
        groups = [group for each in both for group in each.param_groups]
        super().__init__([p for group in groups for p in group["params"]], {})
        self.both, self.param_groups = both, groups

    def step(self, closure=None):
        for each in self.both:
            each.step()

    def zero_grad(self, set_to_none=True):
        for each in self.both:
            each.zero_grad(set_to_none)

    def train(self):
        for each in self.both:
            each.train()


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


def test_what_is_saved_of_two_optimizers_in_one_is_the_average_of_both(
    make_accelerator, train, model, batches
):
    accelerator = make_accelerator("bf16-stochastic")
    parameters = [*model.parameters()]
    halves = parameters[:1], parameters[1:]
    both = Both(*(torch_bf16.AdamWScheduleFree(half, lr=0.05) for half in halves))
    prepared, wrapped = accelerator.prepare(model, both)
    both.train()
    train(accelerator, prepared, wrapped, batches[:3])
    trained = {name: each.clone() for name, each in model.state_dict().items()}
    saved = accelerator.get_state_dict(prepared)
    assert not any(torch.equal(saved[name], trained[name]) for name, _ in model.named_parameters())


def test_a_wrapper_after_what_it_wraps_leaves_the_steps_to_it(make_accelerator, mode):
    model = torch.nn.Linear(4, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = make_accelerator(mode)
    accelerator.prepare(model, base, Around(base))
    assert isinstance(base, torch_bf16.SGD)
    assert model.weight.dtype == torch.bfloat16
