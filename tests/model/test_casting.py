"""cast_model: parameters become bf16, and everything else is as it was, to the bit."""

import copy
import pickle
import warnings

import pytest
import torch
import torchmetrics
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import torch_bf16
from torch_bf16 import cast_model, get_recipe, plugin_api
from torch_bf16.model.cast_modules import kept_ids

BF16 = torch.bfloat16


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.equal(b)


def keeping(*keys, recipe="bf16-stochastic"):
    return get_recipe(recipe, keep_fp32=keys)


def dtypes(module):
    return {p.dtype for p in module.parameters()}


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        inverse = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
        self.register_buffer("inv_freq", inverse)
        angles = torch.outer(torch.arange(300.0), inverse)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("positions", torch.arange(300))
        self.register_buffer("passing", torch.tensor(1 / 3), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("nothing", None)


def test_every_buffer_keeps_its_bits_and_its_identity():
    module = Rotary()
    before = dict(module.named_buffers())
    copies = {name: buffer.clone() for name, buffer in before.items()}
    assert cast_model(module) is module
    assert module.weight.dtype == BF16
    for name, buffer in module.named_buffers():
        assert buffer is before[name]
        assert same_bits(buffer, copies[name])


def test_torchs_own_cast_ruins_buffers():
    """The control: what cast_model is there for."""
    module, exact = Rotary(), Rotary()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.to(BF16)
    assert not module.inv_freq.float().equal(exact.inv_freq)
    assert not module.freqs_cis.is_complex() or not module.freqs_cis.equal(exact.freqs_cis)


class Counting(torchmetrics.Metric):
    """A metric with a parameter, a nested module and an fp32 count."""

    def __init__(self):
        super().__init__()
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")
        self.embed = nn.Linear(2, 2)

    def update(self):
        self.count += 1

    def compute(self):
        return self.count


def metered():
    module = nn.Module()
    module.linear = nn.Linear(2, 2)
    module.metric = Counting()
    module.mean = torchmetrics.MeanMetric()
    return module


def count_to_1000(module):
    for _ in range(1000):
        module.metric.update()
        module.mean.update(1.0)
    return float(module.metric.compute()), float(module.mean.weight)


def test_metrics_inside_a_module_count_to_1000():
    module = cast_model(metered())
    assert module.linear.weight.dtype == BF16
    assert dtypes(module.metric) == {torch.float32}
    assert count_to_1000(module) == (1000.0, 1000.0)


def test_a_bf16_count_stops_at_256():
    """The control: torch's cast, made as torchmetrics asks for it."""
    module = metered().to(BF16)
    module.metric.set_dtype(BF16)
    assert count_to_1000(module)[0] == 256.0


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_stay_tied_and_keep_their_identity():
    module = Tied()
    before = dict(module.named_parameters())
    cast_model(module)
    assert module.head.weight is module.embed.weight is before["embed.weight"]
    assert module.head.weight.dtype == BF16
    module.head(module.embed(torch.tensor([1]))).sum().backward()
    assert module.embed.weight.grad.abs().sum() > 0


def test_a_weight_tied_to_an_island_stays_fp32_on_both_sides():
    module = cast_model(Tied(), keeping("head"))
    assert module.head.weight is module.embed.weight
    assert module.head.weight.dtype == torch.float32


def test_gradients_are_recast_and_requires_grad_is_kept():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[1].weight.requires_grad_(False)
    module(torch.randn(2, 3)).sum().backward()
    gradient = module[0].weight.grad.clone()
    cast_model(module)
    assert same_bits(module[0].weight.grad, gradient.to(BF16))
    assert module[1].weight.grad is None
    assert [p.requires_grad for p in module.parameters()] == [True, True, False, True]
    assert dtypes(module) == {BF16}


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules_run_and_learn(kind):
    module = cast_model(kind(3, 4, num_layers=2, bidirectional=True))
    before = [id(p) for p in module.parameters()]
    out, _ = module(torch.randn(5, 2, 3, dtype=BF16))
    out.float().sum().backward()
    assert out.dtype == BF16
    assert [id(w) for layer in module.all_weights for w in layer] == before
    assert all(p.grad.dtype == BF16 for p in module.parameters())


def test_a_module_on_the_meta_device_is_cast_there_and_materialises():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    cast_model(module, "bf16-fp32-master")
    assert {(p.dtype, p.device.type) for p in module.parameters()} == {(BF16, "meta")}
    module.to_empty(device="cpu")
    for p in module.parameters():
        nn.init.ones_(p)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    torch_bf16.AdamW(module.parameters(), lr=0.0, recipe="bf16-fp32-master").step()
    assert all(p.eq(1).all() for p in module.parameters())


def test_weight_norm_computes_and_trains_in_bf16():
    module = cast_model(parametrizations.weight_norm(nn.Linear(3, 3)))
    out = module(torch.randn(2, 3, dtype=BF16))
    out.float().square().sum().backward()
    optimizer = torch_bf16.AdamW(module.parameters(), lr=0.1)
    before = module.weight.detach().clone()
    optimizer.step()
    assert module.weight.dtype == BF16
    assert not module.weight.equal(before)


def test_a_bf16_module_is_left_as_it_is():
    module = cast_model(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "bf16-fp32-master")
    before = {n: (p, p.detach().clone(), p._version) for n, p in module.named_parameters()}
    cast_model(module, "bf16-fp32-master")
    for name, parameter in module.named_parameters():
        kept, value, version = before[name]
        assert parameter is kept
        assert same_bits(parameter, value)
        assert parameter._version == version


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_refused_and_nothing_changes(dtype):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(dtype), nn.Linear(3, 3))
    module[0].weight.grad = torch.ones(3, 3)
    before = {n: (p, p.detach().clone()) for n, p in module.named_parameters()}
    with pytest.raises(ValueError, match=rf"'1.weight' .* is {dtype}; .*model.float\(\) first"):
        cast_model(module, keeping("2"))
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0]
        assert same_bits(parameter, before[name][1])
    assert same_bits(module[0].weight.grad, torch.ones(3, 3))
    assert "forward" not in vars(module[2])


def test_a_lazy_module_is_refused_until_it_has_weights():
    module = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match=r"'0.weight' is not initialised yet .*run the module once"
    ):
        cast_model(module)
    assert module[1].weight.dtype == torch.float32
    module(torch.randn(2, 4))
    assert dtypes(cast_model(module)) == {BF16}


def test_a_module_inside_ddp_is_refused(tmp_path):
    """A change of dtype would cut the hooks that reduce gradients, in silence."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        replica = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        with pytest.raises(ValueError, match=r"inside DistributedDataParallel, .*then wrap it"):
            cast_model(replica)
        assert dtypes(replica) == {torch.float32}
        ready = nn.parallel.DistributedDataParallel(cast_model(nn.Linear(3, 3)))
        assert cast_model(ready) is ready
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_inside_dataparallel_over_several_gpus_is_refused():
    replicated = nn.DataParallel(nn.Linear(3, 3))
    replicated.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"inside DataParallel over 2 GPUs, .*compute in fp16"):
        cast_model(replicated)
    assert dtypes(replicated) == {torch.float32}
    replicated.device_ids = replicated.device_ids[:1]
    assert dtypes(cast_model(replicated)) == {BF16}


def test_only_modules_are_cast():
    with pytest.raises(ValueError, match=r"was given a Tensor and takes a torch.nn.Module"):
        cast_model(torch.ones(3))


def test_a_pattern_that_fits_nothing_names_what_there_is():
    with pytest.raises(ValueError, match=r"keep_fp32='head' matches .*; its parameters are weight"):
        cast_model(nn.Linear(3, 3), torch_bf16.Recipe(keep_fp32=("head",)))


class Quantised(nn.Parameter):
    """Pretends to be fp32 and is not, as quantised weights of other libraries do."""


def test_parameters_that_are_not_plain_floats_are_left_alone():
    module = nn.Linear(3, 3)
    module.quantised = Quantised(torch.full((2,), 1 / 3))
    module.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    module.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    cast_model(module)
    for name in ("quantised", "codes", "wave"):
        assert same_bits(getattr(module, name).detach(), before[name])
    assert module.weight.dtype == BF16


class Spy(nn.Linear):
    """Records what its forward saw."""

    def forward(self, x, scale=None):
        self.seen = (
            x.dtype,
            None if scale is None else scale.dtype,
            torch.is_autocast_enabled("cpu"),
        )
        self.seen += (nn.functional.linear(x, self.weight).dtype,)
        return super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.experts = nn.ModuleList([Spy(4, 4), Spy(4, 4)])
        self.head = Spy(4, 3)

    def forward(self, x):
        x = self.body(x)
        x = sum(expert(x) for expert in self.experts)
        return self.head(x, scale=x)


@pytest.mark.parametrize("key", ["head", "he*", Spy], ids=str)
def test_islands_compute_in_fp32_under_autocast(key):
    module = cast_model(Net(), keeping(key))
    assert dtypes(module.head) == {torch.float32}
    assert dtypes(module.body) == {BF16}
    with torch.autocast("cpu", BF16):
        out = module(torch.randn(2, 4))
    seen = module.head.seen
    assert out.dtype == torch.float32
    assert seen == (torch.float32, torch.float32, False, torch.float32)
    out.sum().backward()
    assert module.head.weight.grad.dtype == torch.float32
    assert module.body.weight.grad.dtype == BF16


def test_without_keep_fp32_the_same_module_computes_in_bf16():
    module = cast_model(Net())
    with torch.autocast("cpu", BF16):
        assert module(torch.randn(2, 4)).dtype == BF16
    assert module.head.seen == (BF16, BF16, True, BF16)


def test_members_of_a_module_list_compute_in_fp32():
    """Nobody calls the list itself."""
    module = cast_model(Net(), keeping("experts"))
    with torch.autocast("cpu", BF16):
        module(torch.randn(2, 4))
    assert all(e.seen == (torch.float32, None, False, torch.float32) for e in module.experts)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_of_a_module_with_islands_has_islands_of_its_own(way):
    module = cast_model(Net(), keeping("head"))
    twin = copy.deepcopy(module) if way == "deepcopy" else pickle.loads(pickle.dumps(module))
    with torch.no_grad():
        twin.head.weight.fill_(2)
        twin.head.bias.zero_()
    x = torch.randn(2, 4)
    with torch.autocast("cpu", BF16):
        out = twin(x)
        expected = 2 * (sum(e(twin.body(x)) for e in twin.experts)).float().sum(1, keepdim=True)
    torch.testing.assert_close(out, expected.expand(2, 3), rtol=1e-5, atol=1e-5)
    assert not hasattr(module.head, "seen")
    assert twin.head.seen[2] is False


def test_an_island_without_parameters_runs():
    module = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1), nn.Linear(3, 3))
    cast_model(module, keeping("1"))
    with torch.autocast("cpu", BF16):
        assert module[:2](torch.randn(2, 3)).dtype == torch.float32


def test_a_pattern_of_parameter_names_keeps_them_and_leaves_their_module_to_autocast():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cast_model(module, keeping("*.weight", "1"))
    assert module[0].weight.dtype == module[1].bias.dtype == torch.float32
    assert module[0].bias.dtype == torch.bfloat16
    assert "forward" not in vars(module[0])
    assert "forward" in vars(module[1])
    kept = kept_ids()
    assert kept >= {id(module[0].weight), *(id(p) for p in module[1].parameters())}
    assert id(module[0].bias) not in kept


def test_wrappers_in_a_name_change_no_match_and_what_stays_is_known_beforehand():
    inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    inner[0] = checkpoint_wrapper(inner[0])
    assert sorted(name for name, _ in inner.named_parameters())[0].startswith("0._checkpoint")
    recipe = keeping("0", "1.bias")
    stay = plugin_api.fp32_parameters(inner, recipe)
    cast_model(inner, recipe)
    found = {name for name, p in inner.named_parameters() if p.dtype == torch.float32}
    assert found == set(stay)
    assert {name.replace("_checkpoint_wrapped_module.", "") for name in found} == {
        *("0.weight", "0.bias", "1.bias"),
        *("2.weight", "2.bias"),
    }


@pytest.mark.parametrize("key", ["haed", nn.GRU], ids=str)
def test_a_key_that_matches_nothing_names_the_modules(key):
    module = Net()
    with pytest.raises(ValueError, match=r"matches no module of Net .* body, experts, experts.0,"):
        cast_model(module, keeping("body", key))
    assert dtypes(module) == {torch.float32}
    assert "forward" not in vars(module.body)
