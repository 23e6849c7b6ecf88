"""What an optimizer is given: layouts, gradients, clipping, and weights written from outside."""

from contextlib import nullcontext

import pytest
import torch
from optimizer_cases import (
    assert_same,
    bits,
    differs,
    every_backend,
    every_case,
    every_optimizer,
    every_recipe,
    make_optimizer,
    make_parameters,
    set_gradients,
    snapshot,
    take_steps,
)
from torch import nn

import torch_bf16

exact = pytest.mark.parametrize("recipe", ["master", "mixed"])


def strided(tensor, layout):
    """The same numbers with other strides."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@every_case
@pytest.mark.parametrize("layout", ["transposed", "channels_last", "every_second"])
@pytest.mark.parametrize("which", ["parameter", "gradient"])
def test_strides_do_not_change_a_bit(name, recipe, backend, layout, which):
    tensor = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain, other = nn.Parameter(tensor.clone()), nn.Parameter(tensor.clone())
    if which == "parameter":
        other = nn.Parameter(strided(tensor, layout))
        assert not other.is_contiguous()
    strides = other.stride()
    optimizers = [make_optimizer(name, recipe, backend, [p]) for p in (plain, other)]
    for seed in range(3):
        set_gradients([plain], seed)
        set_gradients([other], seed)
        if which == "gradient":
            other.grad = strided(other.grad, layout)
            assert not other.grad.is_contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert other.stride() == strides
    assert_same(*map(snapshot, optimizers))


@every_case
def test_an_expanded_gradient_is_read_as_the_full_one(name, recipe, backend):
    expanded, full = make_parameters(), make_parameters()
    one, other = (make_optimizer(name, recipe, backend, each.values()) for each in (expanded, full))
    for _ in range(2):
        for key, p in expanded.items():
            # What `p.sum().backward()` hands to hooks, and to `.grad` in some versions of torch.
            p.grad = torch.ones((), dtype=p.dtype).expand(p.shape)
            full[key].grad = torch.ones(p.shape, dtype=p.dtype)
        assert expanded["matrix"].grad.stride() == (0, 0)
        one.step()
        other.step()
    assert_same(snapshot(one), snapshot(other))


@every_case
def test_fp32_and_bf16_parameters_do_not_disturb_each_other(name, recipe, backend):
    together, alone = make_parameters(), make_parameters()
    shared = make_optimizer(name, recipe, backend, together.items())
    separate = {key: make_optimizer(name, recipe, backend, [(key, p)]) for key, p in alone.items()}
    take_steps(shared, range(3))
    for seed in range(3):
        set_gradients(alone.values(), seed)
        for optimizer in separate.values():
            optimizer.step()
    assert_same(snapshot(shared), [snapshot(optimizer)[0] for optimizer in separate.values()])


def give(parameter, gradient, dtype):
    parameter.grad = None
    parameter.grad_dtype = dtype
    parameter.grad = gradient.to(dtype)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="bf16 leaves need Tensor.grad_dtype"
)
@every_backend
@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_fp32_gradients_of_bf16_parameters_count_in_full(recipe, backend):
    fp32, rounded, bf16 = (make_parameters() for _ in range(3))
    optimizers = [
        make_optimizer("adamw", recipe, backend, each.values()) for each in (fp32, rounded, bf16)
    ]
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        for key, p in fp32.items():
            gradient = torch.randn(p.shape, generator=generator)
            give(p, gradient, torch.float32)
            # The dtype of gradients may change from one step to the next.
            give(rounded[key], gradient.to(p.dtype), p.dtype if step == 1 else torch.float32)
            give(bf16[key], gradient, p.dtype)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(snapshot(optimizers[1]), snapshot(optimizers[2]))
    assert differs(snapshot(optimizers[0]), snapshot(optimizers[2]))


@every_case
def test_a_scale_counts_for_the_next_step_alone(name, recipe, backend):
    scaled, multiplied = (
        make_optimizer(name, recipe, backend, make_parameters().items()) for _ in range(2)
    )
    scales = (1.0, 0.5, torch.tensor(0.25), 1.0)  # powers of two: gradients stay exact
    for seed, scale in enumerate(scales):
        for optimizer in (scaled, multiplied):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            set_gradients(parameters, seed)
            before = [bits(p.grad) for p in parameters]
            if optimizer is multiplied:
                for p in parameters:
                    p.grad.mul_(scale)
            elif scale != 1.0:
                optimizer.scale_next_step(scale)
            optimizer.step()
            if optimizer is scaled:
                assert all(map(torch.equal, before, (bits(p.grad) for p in parameters)))
    assert_same(snapshot(scaled), snapshot(multiplied))


@every_optimizer
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_takes_the_scale_back(name, set_to_none):
    one, other = (
        make_optimizer(name, "stochastic", "eager", make_parameters().items()) for _ in range(2)
    )
    one.scale_next_step(0.0)
    one.zero_grad(set_to_none)
    for optimizer in (one, other):
        take_steps(optimizer, [1])
    assert_same(snapshot(one), snapshot(other))


def test_a_step_without_gradients_uses_the_scale_up():
    one, other = (
        make_optimizer("adamw", "master", "cpu", make_parameters().items()) for _ in range(2)
    )
    one.scale_next_step(0.0)
    one.step()
    for optimizer in (one, other):
        take_steps(optimizer, [1])
    assert_same(snapshot(one), snapshot(other))


def test_total_norm_is_exact_where_torchs_own_is_not():
    parameters = list(make_parameters().values())
    set_gradients(parameters, 0)
    parameters.append(nn.Parameter(torch.ones(2)))  # no gradient
    before = [bits(p.grad) for p in parameters[:-1]]
    squares = [p.grad.double().square().sum() for p in parameters[:-1]]
    true = torch.stack(squares).sum().sqrt().item()
    norm = torch_bf16.total_norm(parameters)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    # n = 200 terms, each sum of m terms off by at most m roundings of 2**-24, halved by the root.
    tolerance = 200 * 2.0**-24
    assert abs(norm.item() / true - 1) < tolerance
    assert all(map(torch.equal, before, (bits(p.grad) for p in parameters[:-1])))
    bf16 = [p for p in parameters[:-1] if p.dtype == torch.bfloat16]
    control = torch.nn.utils.get_total_norm([p.grad for p in bf16]).item()
    true = torch.stack([p.grad.double().square().sum() for p in bf16]).sum().sqrt().item()
    assert abs(torch_bf16.total_norm(bf16).item() / true - 1) < tolerance
    assert abs(control / true - 1) > 100 * tolerance, "the control is as good: choose other data"


def test_total_norm_of_one_tensor_of_none_and_of_nothing():
    p = nn.Parameter(torch.tensor([3.0, 4.0]).bfloat16())
    assert torch_bf16.total_norm([p]).item() == 0.0
    p.grad = p.detach().clone()
    assert torch_bf16.total_norm(p).item() == 5.0
    assert torch_bf16.total_norm(q for q in (p, p)).item() == 5.0
    assert torch_bf16.total_norm([]).dtype == torch.float32
    p.grad[0] = torch.nan
    assert torch.isnan(torch_bf16.total_norm([p]))


def write_under_no_grad(module, new):
    with torch.no_grad():
        module.weight.copy_(new)


def write_state_dict(module, new):
    module.load_state_dict({"weight": new})


def write_data(module, new):
    module.weight.data.copy_(new)


def exact_linear(recipe, backend):
    """A cast linear layer after two steps, with lower halves that are not zero."""
    torch.manual_seed(0)
    module = torch_bf16.cast_model(nn.Linear(8, 8, bias=False), "bf16-fp32-master")
    # One number for all gradients and betas of zero: each later step goes by lr, and no more.
    options = {"betas": (0.0, 0.0), "weight_decay": 0.0, "lr": 2.0**-13}
    optimizer = make_optimizer("adamw", recipe, backend, module.parameters(), **options)
    for _ in range(2):
        module.weight.grad = torch.full_like(module.weight, 1.0)
        optimizer.step()
    return module, optimizer


def master_of(module, optimizer):
    state = optimizer.state[module.weight]
    if "master" in state:
        return state["master"].clone()
    return torch_bf16.numerics.rounding.join16(module.weight.detach(), state["remainder16"])


@every_backend
@exact
@pytest.mark.parametrize("write", [write_under_no_grad, write_state_dict, write_data])
def test_a_weight_written_from_outside_is_where_the_next_step_starts(recipe, backend, write):
    module, optimizer = exact_linear(recipe, backend)
    assert not torch.equal(master_of(module, optimizer), module.weight.detach().float())
    new = torch.linspace(1, 1.9, 64).view(8, 8).bfloat16()
    write(module, new)
    module.weight.grad = torch.full_like(module.weight, 1.0)
    # A write that hides itself from autograd has the lower halves dropped, too, and is named.
    hidden = write is write_data and recipe == "master"
    with pytest.warns(UserWarning, match="written through p.data") if hidden else nullcontext():
        optimizer.step()
    # eps is 1e-8 of the gradient, and the subtraction rounds once, at most 2**-24 below 2.
    drift = (master_of(module, optimizer) - (new.float() - 2.0**-13)).abs().max().item()
    assert drift <= 2.0**-23


@every_backend
@exact
def test_what_only_reads_a_weight_or_moves_it_nowhere_keeps_its_master(recipe, backend):
    module, optimizer = exact_linear(recipe, backend)
    other, reference = exact_linear(recipe, backend)
    module.to("cpu").train()
    module(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    module.state_dict()
    for each, its in ((module, optimizer), (other, reference)):
        each.weight.grad = torch.full_like(each.weight, 1.0)
        its.step()
    assert_same(snapshot(optimizer), snapshot(reference))


@every_recipe
@every_backend
def test_a_step_counts_as_a_write_for_autograd(recipe, backend):
    p = nn.Parameter(torch.ones(3, 3).bfloat16())
    optimizer = make_optimizer("adamw", recipe, backend, [p])
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", [torch_bf16.AdamW, torch_bf16.Muon])
def test_a_parameter_appended_to_a_group_with_names_is_known_by_its_place(kind):
    parameters = [nn.Parameter(torch.ones(4, 4).bfloat16()) for _ in range(2)]
    optimizer = kind([("a", parameters[0])], lr=0.1)
    optimizer.param_groups[0]["params"].append(parameters[1])
    for p in parameters:
        p.grad = torch.eye(4).bfloat16()
    optimizer.step()
    assert all((p != 1).any() for p in parameters)
    assert "parameter '#1'" in optimizer.label(0, 1)


def test_a_coefficient_given_to_a_proxy_reaches_the_optimizer():
    """Lightning and Fabric run the methods of an optimizer on wrappers that proxy reads only."""

    class Proxy(torch_bf16.SGD):
        def __init__(self, optimizer):
            self.__dict__.update({"_optimizer": optimizer, "_engine": optimizer._engine})

    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch_bf16.SGD([parameter], lr=0.5)
    Proxy(optimizer).scale_next_step(0.0)
    optimizer.step()
    assert torch.equal(parameter, torch.ones_like(parameter))


def test_a_compiled_training_step_calls_the_optimizer_uncompiled():
    model = torch_bf16.cast_model(nn.Linear(4, 4))
    optimizer = torch_bf16.AdamW(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def train(x):
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2, 4, dtype=torch.bfloat16))
    assert optimizer.state[model.weight]["step"].item() == 3
    assert not torch.equal(before, model.weight)


def test_a_parameter_that_has_no_shape_yet_does_not_stop_the_others():
    model = nn.ModuleList([nn.Linear(4, 4).bfloat16(), nn.LazyLinear(4)])
    optimizer = torch_bf16.AdamW(model.parameters(), recipe="bf16-fp32-master")
    model[0](torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    assert {*optimizer.state} == {*model[0].parameters()}
