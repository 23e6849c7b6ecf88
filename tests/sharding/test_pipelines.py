"""The stages of a pipeline train to the bits of one process, and resume in another pipeline."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

import torch_bf16

LAYERS, WIDTH, MICRO_BATCHES, STEPS = 4, 16, 4, 6
# Where a schedule starts by sending from each stage to the next, gloo fails in a V: one rank can
# have both.
IN_A_V = not hasattr(PipelineStage, "_get_init_p2p_neighbors_ops")
ZERO_BUBBLE = "ZBVZeroBubble" if IN_A_V else "InterleavedZeroBubble"
over_gloo = pytest.mark.skipif(
    torch.__version__ < "2.8", reason="in torch 2.7 the stages wait forever for each other on gloo"
)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """Of a part of a model, only some layers are there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        ]
        self.layers = nn.ModuleDict({str(n): block for n, block in enumerate(blocks)})

    def part(self, stage, stages):
        own = {str(n) for n in torch.arange(LAYERS).chunk(stages)[stage].tolist()}
        for number in {*self.layers} - own:
            del self.layers[number]
        return self

    def forward(self, x):
        for block in self.layers.values():
            x = x + nn.functional.gelu(block(x))
        return x


def loss_of(output, target):
    return nn.functional.mse_loss(output.float(), target) / MICRO_BATCHES


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 2 * MICRO_BATCHES, WIDTH, generator=generator).unbind()


class Run:
    """Some stages of a model, an optimizer for each, and a schedule; without one, all at once."""

    def __init__(self, recipe, schedule=None, accumulate="bf16_nearest", release=False):
        recipe = torch_bf16.get_recipe(recipe, accumulate=accumulate)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if schedule else (0, 1)
        two_each = schedule == ZERO_BUBBLE
        count = 2 * ranks if two_each else ranks
        second = count - 1 - rank if IN_A_V else rank + ranks
        numbers = [rank, second] if two_each else [rank]
        self.parts = [torch_bf16.cast_model(Net().part(n, count), recipe) for n in numbers]
        self.optimizers = [
            torch_bf16.AdamW([*part.named_parameters()], lr=0.01, recipe=recipe)
            for part in self.parts
        ]
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            if release:
                torch_bf16.release_gradients(part, optimizer, accumulation_steps=MICRO_BATCHES)
        self.is_first, self.is_last, self.schedule = 0 in numbers, count - 1 in numbers, None
        if schedule:
            stages = [
                PipelineStage(part, n, count, torch.device("cpu"))
                for part, n in zip(self.parts, numbers, strict=True)
            ]
            self.schedule = get_schedule_class(schedule)(
                stages if two_each else stages[0], MICRO_BATCHES, loss_of, scale_grads=False
            )

    def train(self, steps):
        for step in steps:
            x, target = batch(step)
            with torch.autocast("cpu", torch.bfloat16):
                if self.schedule:
                    targets = {"target": target} if self.is_last else {}
                    self.schedule.step(*[x] * self.is_first, **targets)
                else:
                    micro_batches = [each.chunk(MICRO_BATCHES) for each in (x, target)]
                    for one, its_target in zip(*micro_batches, strict=True):
                        loss_of(self.parts[0](one), its_target).backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return self

    def bits(self):
        """Exact weights and states, by name."""
        return {
            name: (
                optimizer.exact_weight(parameter).detach(),
                {key: each for key, each in optimizer.state[parameter].items() if each is not None},
            )
            for part, optimizer in zip(self.parts, self.optimizers, strict=True)
            for name, parameter in part.named_parameters()
        }

    def state_dicts(self):
        model, states = {}, {}
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            model |= get_model_state_dict(part)
            states |= get_optimizer_state_dict(part, optimizer, options=FLAT)
        return {"model": model, "optimizer": states}

    def save(self, folder):
        dcp.save(self.state_dicts(), checkpoint_id=folder)

    def load(self, folder):
        found = self.state_dicts()
        dcp.load(found, checkpoint_id=folder)
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            names = {*part.state_dict()}
            set_model_state_dict(part, {k: v for k, v in found["model"].items() if k in names})
            set_optimizer_state_dict(part, optimizer, found["optimizer"], options=FLAT)
        return self


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def trained(*arguments):
    return Run(*arguments).train(range(STEPS)).bits()


def of_all(parts):
    return {name: each for part in parts for name, each in part.items()}


@over_gloo
@pytest.mark.parametrize(
    ("recipe", "schedule", "accumulate", "release"),
    [
        ("bf16-stochastic", "1F1B", "bf16_stochastic", False),
        ("bf16-stochastic", "1F1B", "fp32", True),
        ("bf16-stochastic", ZERO_BUBBLE, "fp32", False),
        ("bf16-fp32-master", ZERO_BUBBLE, "bf16_nearest", False),
    ],
)
def test_stages_have_the_bits_of_one_process(ranks, recipe, schedule, accumulate, release):
    found = of_all(ranks(2, trained, recipe, schedule, accumulate, release))
    assert_same(found, trained(recipe, None, accumulate))


def replicated(accumulate, release):
    """Two stages, each under DDP on two ranks, which see different batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "replicas"))
    stage, replica = mesh.get_coordinate()
    recipe = torch_bf16.get_recipe("bf16-stochastic", accumulate=accumulate)
    part = torch_bf16.cast_model(Net().part(stage, 2), recipe)
    wrapped = DistributedDataParallel(part, process_group=mesh["replicas"].get_group())
    optimizer = torch_bf16.SGD([*part.named_parameters()], lr=0.1, recipe=recipe)
    torch_bf16.setup_gradients(wrapped, optimizer)
    if release:
        torch_bf16.release_gradients(wrapped, optimizer, accumulation_steps=MICRO_BATCHES)
    group = mesh["stages"].get_group()
    schedule = get_schedule_class("1F1B")(
        PipelineStage(wrapped, stage, 2, torch.device("cpu"), group=group),
        MICRO_BATCHES,
        loss_of,
        scale_grads=False,
    )
    for step in range(2):
        x, target = batch(10 * step + replica)
        with torch.autocast("cpu", torch.bfloat16):
            schedule.step(*[x] * (stage == 0), **({"target": target} if stage else {}))
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in part.named_parameters()}


@over_gloo
@pytest.mark.parametrize("accumulate", ["bf16_stochastic", "fp32"])
def test_replicas_of_stages_have_the_same_bits(ranks, accumulate):
    # The pipeline calls forward passes in no_sync, and then lets DDP reduce the last one.
    first, second, *last = ranks(4, replicated, accumulate, False)
    assert_same(second, first)
    assert_same(last[1], last[0])
    assert_same(ranks(4, replicated, accumulate, True), [first, second, *last])


def trained_and_saved(recipe, schedule, folder):
    Run(recipe, schedule).train(range(STEPS // 2)).save(folder)


def loaded_and_trained(recipe, schedule, folder):
    return Run(recipe, schedule).load(folder).train(range(STEPS // 2, STEPS)).bits()


@over_gloo
@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_a_run_resumes_in_other_stages_and_in_one_process(ranks, recipe, tmp_path):
    ranks(2, trained_and_saved, recipe, "1F1B", tmp_path)
    expected = trained(recipe)
    assert_same(*ranks(1, loaded_and_trained, recipe, None, tmp_path), expected)
    assert_same(of_all(ranks(2, loaded_and_trained, recipe, ZERO_BUBBLE, tmp_path)), expected)


def warned(schedule, accumulate):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Run("bf16-stochastic", schedule, accumulate).train(range(1))
    return [str(each.message) for each in caught if "zero-bubble" in str(each.message)]


@over_gloo
def test_sums_that_a_schedule_makes_itself_are_warned_of(ranks):
    assert ranks(2, warned, "1F1B", "bf16_stochastic") == [[], []]
    assert ranks(2, warned, ZERO_BUBBLE, "fp32") == [[], []]
    for messages in ranks(2, warned, ZERO_BUBBLE, "bf16_stochastic"):
        (message,) = messages
        assert "Accumulate in 'fp32'" in message


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_a_model_is_split_after_the_cast():
    net = torch_bf16.cast_model(Net(), "bf16-stochastic")
    x = torch.randn(2, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
        split = pipeline(net, (x,), split_spec={"layers.2": SplitPoint.BEGINNING})
        first, last = (split.get_stage_module(n) for n in range(2))
        assert torch.equal(last(first(x)), expected)
    names = [name for part in (first, last) for name, _ in part.named_parameters()]
    assert names == [name for name, _ in net.named_parameters()]
    for part in (first, last):  # not net before: torch cannot split what enters autocast itself
        torch_bf16.carry_autocast(part)
    out = last(first(x))
    assert out.dtype == torch.float32
    assert torch.equal(out, expected.float())
