"""Scalars, steps and skips on the device: what `prepare` does, in Triton's interpreter.

The steps run in a child process: see the fixture ``interpreted``. CPU tensors stand for the
device's; that nothing of them is read on the host is what a mode of torch watches over.
"""

import itertools

import numpy as np
import pytest
import torch
from bucket_cases import HYPER
from every_rule import RULES
from optimizer_cases import (
    assert_same,
    make_optimizer,
    make_parameters,
    parameters_of,
    set_gradients,
    snapshot,
    take_steps,
)
from recorded_graphs import Graph
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bf16
from torch_bf16.rules import ADAFACTOR, ADAFACTOR_VECTOR, arithmetic

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")


# One of Adafactor's scalars is a literal that stands alone.
WITH_ADAFACTOR = RULES | {each.name: each for each in (ADAFACTOR, ADAFACTOR_VECTOR)}


class NothingIsRead(TorchDispatchMode):
    """Raises where a tensor becomes a number of the host, which on a device would wait for it."""

    READS = ("_local_scalar_dense", "is_nonzero", "equal.default", "nonzero", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.READS):
            raise AssertionError(f"{func} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


def scalars_agree(name):
    from torch_bf16.backends import StepInputs, choose

    rule, cpu = WITH_ADAFACTOR[name], torch.device("cpu")
    counts = [0.0, 1.0, 2.0, 6.0, 999.0, 12345.0, 2.0**24 - 1]
    groups = [{**HYPER, "maximize": False}, {**HYPER, "lr": torch.tensor(0.1), "maximize": True}]
    told = StepInputs(torch.tensor(0.3), torch.tensor(3.0), None)
    tensors = list(itertools.product(range(len(groups)), counts))
    sizes = (5, 0, len(tensors) - 5)
    found = []
    for backend in ("eager", "triton"):
        steps = [torch.tensor(count) for _, count in tensors]
        numbers = [group for group, _ in tensors]
        source = choose(cpu, backend).scalars(rule, cpu, sizes, numbers, steps)
        scalars = source.set(groups, told)
        source.count()
        assert tuple(len(each.rows) for each in scalars) == sizes
        found.append(np.concatenate([np.asarray(each.table)[each.rows] for each in scalars]))
        assert [float(step) for step in source.steps] == [count + 1 for _, count in tensors]
    host, device = found
    np.testing.assert_array_equal(device[:, :-2].view(np.int32), host.view(np.int32))
    assert device[:, -2].tolist() == [count + 1 for _, count in tensors]
    assert not device[:, -1].any()


@pytest.mark.parametrize("name", WITH_ADAFACTOR)
def test_the_device_computes_the_hosts_scalars_bit_for_bit(interpreted, name):
    interpreted(scalars_agree, name)


def arithmetic_agrees():
    import triton
    import triton.language as tl

    from torch_bf16.backends.triton.arithmetic import _exp, _log, _power

    @triton.jit
    def kernel(x_ptr, out_ptr, EXP: tl.constexpr, LOG: tl.constexpr, POWER: tl.constexpr):
        x = tl.load(x_ptr + tl.program_id(0))
        out = out_ptr + 3 * tl.program_id(0)
        tl.store(out, EXP(x))
        tl.store(out + 1, LOG(tl.abs(x)))
        tl.store(out + 2, POWER(x, 12345))

    rng = np.random.default_rng(0)
    x = [0.0, 1.0, -1.0, 709.5, -709.0, 0.999, 1e300, 1e-300, *rng.uniform(-9, 9, 60).tolist()]
    out = torch.empty(len(x), 3, dtype=torch.float64)
    kernel[(len(x),)](torch.tensor(x, dtype=torch.float64), out, _exp, _log, _power)
    with np.errstate(all="ignore"):
        expected = [
            [arithmetic.exp(v), arithmetic.log(abs(v)), arithmetic.power(v, 12345)] for v in x
        ]
    np.testing.assert_array_equal(out.numpy().view(np.int64), np.array(expected).view(np.int64))


@pytest.mark.filterwarnings("ignore")
def test_powers_exp_and_log_have_the_hosts_bits(interpreted):
    interpreted(arithmetic_agrees)


def steps_of(name, recipe, backend, watched):
    """Steps with all that may live on a device, and a step that is skipped there."""
    lr, found = torch.tensor(0.01), torch.zeros(())
    optimizer = make_optimizer(name, recipe, backend, make_parameters().items(), lr=lr)
    parameters = parameters_of(optimizer)
    coefficient = torch.tensor(0.3)
    grad_scale = torch.tensor(2.0)
    for seed in range(4):
        set_gradients(parameters, seed)
        lr.mul_(0.5)
        optimizer.scale_next_step(coefficient)
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found.fill_(seed == 2)
        if watched and seed:
            with NothingIsRead():
                optimizer.step()
        else:
            optimizer.step()
    assert optimizer.skipped_steps == 1
    assert {int(optimizer.state[p]["step"]) for p in parameters} == {3}
    return snapshot(optimizer)


def a_step_reads_nothing(name, recipe):
    assert_same(
        steps_of(name, recipe, "triton", watched=True), steps_of(name, recipe, "eager", False)
    )


@pytest.mark.parametrize(("name", "recipe"), [("adamw", "stochastic"), ("momentum", "master")])
def test_a_step_reads_nothing_on_the_host_and_equals_eager(interpreted, name, recipe):
    interpreted(a_step_reads_nothing, name, recipe)


def the_watch_sees_a_read():
    with NothingIsRead(), pytest.raises(AssertionError, match="reads a tensor"):
        float(torch.ones(()))
    optimizer = make_optimizer("adamw", "stochastic", "eager", make_parameters().items())
    take_steps(optimizer, [0])
    optimizer.scale_next_step(torch.tensor(0.5))
    with NothingIsRead(), pytest.raises(AssertionError, match="reads a tensor"):
        optimizer.step()


def test_the_watch_sees_what_the_eager_backend_reads(interpreted):
    interpreted(the_watch_sees_a_read)


def replays_are_steps(recipe):
    lr = [torch.tensor(0.01) for _ in range(2)]
    made = make_parameters()
    graphed, plain = (
        make_optimizer(
            "adamw", recipe, "triton", {n: torch.nn.Parameter(p.detach().clone())
            for n, p in made.items()}.items(), lr=each, capturable=True,
        )
        for each in lr
    )  # fmt: skip
    for optimizer in (graphed, plain):
        take_steps(optimizer, [0])
    for parameter in parameters_of(graphed):
        parameter.grad = torch.zeros_like(parameter)  # as backward leaves it in a graph's pool
    before = snapshot(graphed)
    with pytest.MonkeyPatch.context() as patch:
        graph = Graph(patch)
        graphed.step()
    assert len(graph.launches) >= 3
    assert_same(snapshot(graphed), before)
    for seed in (1, 2, 3):
        for optimizer, rate in zip((graphed, plain), lr, strict=True):
            rate.mul_(0.5)
            held = [p.grad for p in parameters_of(optimizer)]
            set_gradients(parameters_of(optimizer), seed)
            for p, gradient in zip(parameters_of(optimizer), held, strict=True):
                p.grad = gradient.copy_(p.grad)
        graph.replay()
        plain.step()
        assert_same(snapshot(graphed), snapshot(plain))
    # An ordinary step goes on from there, with gradients elsewhere; so does a later replay.
    for optimizer in (graphed, plain):
        held = [p.grad for p in parameters_of(optimizer)]
        take_steps(optimizer, [4])
        for p, gradient in zip(parameters_of(optimizer), held, strict=True):
            p.grad = gradient
    graph.replay()
    plain.step()
    assert_same(snapshot(graphed), snapshot(plain))


@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_replaying_the_launches_of_a_step_takes_further_steps(interpreted, recipe):
    interpreted(replays_are_steps, recipe)


def copies_in_a_graph():
    parameter = torch.nn.Parameter(torch.ones(4, 64, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer("cautious", "stochastic", "triton", [parameter], capturable=True)
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        Graph(patch)
        optimizer.step()
    (launch,) = optimizer._engine.plan._launches
    assert len(launch.batch._kernel._gradients._captured) == 1


def test_a_graph_copies_each_table_once_though_a_statistic_comes_first(interpreted):
    interpreted(copies_in_a_graph)


def what_cannot_be_captured():

    strided = torch.nn.Parameter(torch.ones(3, 2, 4).permute(2, 1, 0))
    strided.grad = torch.ones_like(strided)
    optimizer = make_optimizer("sgd", "master", "triton", [strided])
    optimizer.step()
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    written = make_optimizer("sgd", "master", "triton", [weight])
    written.step()
    with torch.no_grad():
        weight.fill_(2.0)
    from torch_bf16.backends import cuda_graphs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "capturing", lambda devices: True)
        with pytest.raises(RuntimeError, match=r"shape \(4, 2, 3\) and strides .* is not"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="was written since the last step"):
            written.step()
    written.step()
    assert weight[0, 0] < 2.0


def test_a_step_whose_replays_would_not_be_steps_is_refused(interpreted):
    interpreted(what_cannot_be_captured)


def with_a_grad_scaler():
    scaled, plain = (
        make_optimizer("adamw", "stochastic", "triton", make_parameters().items()) for _ in range(2)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for seed in range(3):
        set_gradients(parameters_of(scaled), seed)
        with torch.no_grad():
            for p in parameters_of(scaled):
                p.grad.mul_(scaler.scale(torch.ones(())))
        if seed == 1:
            parameters_of(scaled)[1].grad[0] = torch.nan
        scaler.step(scaled)
        scaler.update()
        if seed != 1:
            take_steps(plain, [seed])
    assert scaled.skipped_steps == 1
    assert scaler.get_scale() == 256.0
    assert_same(snapshot(scaled), snapshot(plain))
    # What was multiplied by 0 cannot be divided by it.
    scaled.grad_scale, scaled.found_inf = torch.tensor(0.0), torch.tensor(0.0)
    take_steps(scaled, [3])
    assert_same(snapshot(scaled), snapshot(plain))


def test_a_grad_scaler_changes_no_bit_and_skips_on_the_device(interpreted):
    interpreted(with_a_grad_scaler)


def groups_take_turns(backend):
    parameters = [torch.nn.Parameter(torch.ones(3, 4).bfloat16()) for _ in range(2)]
    groups = [{"params": [each]} for each in parameters]
    optimizer = make_optimizer("adamw", "stochastic", backend, groups)
    for seed, turn in enumerate((parameters, parameters[:1], parameters[1:], parameters[:1])):
        optimizer.zero_grad()
        set_gradients(turn, seed)
        optimizer.step()
    return snapshot(optimizer)


def taking_turns_equals_eager():
    assert_same(groups_take_turns("triton"), groups_take_turns("eager"))


def test_groups_with_the_same_options_can_take_turns(interpreted):
    interpreted(taking_turns_equals_eager)


def a_bad_option_raises():
    optimizer = make_optimizer("adamw", "stochastic", "triton", make_parameters().items())
    take_steps(optimizer, [0])
    before = snapshot(optimizer)
    for bad in ({"lr": None}, {"betas": (1.0, 0.999)}, {"lr": torch.ones(2)}):
        group = optimizer.param_groups[0]
        kept = {key: group[key] for key in bad}
        group.update(bad)
        with pytest.raises(ValueError, match="no step can be computed from the options of group 0"):
            take_steps(optimizer, [1])
        group.update(kept)
        assert_same(snapshot(optimizer), before)


def test_a_bad_option_raises_before_anything_is_launched(interpreted):
    interpreted(a_bad_option_raises)


def a_number_out_of_range_raises(backend):
    parameter = torch.nn.Parameter(torch.ones(4, 4).bfloat16())
    optimizer = torch_bf16.SGDScheduleFree([parameter], lr=0.01, r=4000.0, backend=backend)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(ValueError, match="no step can be computed from the options of group 0"):
        optimizer.step()


def test_a_number_out_of_range_raises_what_it_does_on_the_host(interpreted):
    a_number_out_of_range_raises("eager")
    interpreted(a_number_out_of_range_raises, "triton")


def numbers_go_up_when_they_change():
    from torch_bf16.backends.triton import tables

    copies, copy = [], torch.Tensor.copy_
    optimizer = make_optimizer("adamw", "stochastic", "triton", make_parameters().items())
    take_steps(optimizer, [0])
    with pytest.MonkeyPatch.context() as patch:

        def counted(self, *arguments, **options):
            copies.append(self.shape)
            return copy(self, *arguments, **options)

        patch.setattr(tables.torch.Tensor, "copy_", counted)
        optimizer.step()
        assert copies == []
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        assert len(copies) == 1
        optimizer.param_groups[0]["lr"] = rate = np.array(0.5)
        optimizer.step()
        assert len(copies) == 1
        rate *= 0.5
        optimizer.step()
        assert len(copies) == 2


def test_a_table_goes_up_only_when_it_has_changed(interpreted):
    interpreted(numbers_go_up_when_they_change)


def test_an_optimizer_goes_from_the_device_to_the_host_and_back(interpreted):
    interpreted(changing_backends)


def changing_backends():
    changing, eager = (
        make_optimizer("adamw", "master", "eager", make_parameters().items()) for _ in range(2)
    )
    for seed, backend in enumerate(("eager", "triton", "eager", "triton")):
        changing.backend = backend
        if seed == 2:
            changing.load_state_dict(changing.state_dict())
        for each in (changing, eager):
            take_steps(each, [seed])
    assert_same(snapshot(changing), snapshot(eager))
    assert torch_bf16.total_norm(parameters_of(changing)) > 0
