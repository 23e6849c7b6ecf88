"""What a bf16 model computes in: fp32 over bf16 weights."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_bf16
from torch_bf16 import errors, torch_patches
from torch_bf16.model import arithmetic, slow_products

IDS = torch.randint(0, 32, (3, 4), generator=torch.Generator().manual_seed(5))


class Net(nn.Module):
    """Embeddings of two kinds, a norm, and layers that can be computed again."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(32, 8), nn.Embedding(4, 8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Parameter(torch.randn(8, 32))
        self.again: dict[str, Any] | None = None

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(4))
        x = x + (self.body(x) if not self.again else checkpoint(self.body, x, **self.again))
        return x @ self.head

    def body(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def prepared(recipe="bf16-stochastic", **options) -> Any:
    net = Net()
    recipe = torch_bf16.get_recipe(recipe, **{"compute": "fp32", **options})
    return torch_bf16.prepare(net, torch.optim.AdamW(net.parameters()), recipe)


def gradients(net, outputs) -> list[torch.Tensor]:
    net.zero_grad()
    outputs.square().mean().backward()
    return [p.grad for p in net.parameters()]


def fp32_twin(net) -> Net:
    twin = Net()
    twin.load_state_dict({name: t.float() for name, t in net.state_dict().items()})
    return twin


def test_it_computes_what_fp32_weights_of_the_same_values_compute():
    net, _ = prepared()
    twin = fp32_twin(net)
    assert torch.equal(net(IDS), twin(IDS))
    pairs = zip(gradients(net, net(IDS)), gradients(twin, twin(IDS)), strict=True)
    for ours, exact in pairs:
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, exact.bfloat16())
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}


def test_parts_and_copies_compute_in_fp32_too_also_after_float():
    net, _ = prepared()
    x = torch.randn(2, 8)
    expected = nn.functional.linear(x, net.up.weight.float(), net.up.bias.float())
    assert torch.equal(net.up(x), expected)
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(again(IDS), net(IDS))
        twin = fp32_twin(net)
        assert torch.equal(again.float()(IDS), twin(IDS))


def test_autocast_of_a_loop_does_not_turn_it_into_bf16():
    net, _ = prepared()
    with torch.autocast("cpu", torch.bfloat16):
        inside = net(IDS)
    assert torch.equal(inside, net(IDS))


OF_WEIGHTS = {
    "exp": torch.exp,
    "softplus": nn.functional.softplus,
    "sigmoid": torch.sigmoid,
    "mean": lambda w: w.mean(0),
    "normalize": nn.functional.normalize,
    "softmax": lambda w: w.softmax(-1),
    "pow": lambda w: w**2,
    "cosine": lambda w: nn.functional.cosine_similarity(w, w.flip(0)),
}


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_what_is_computed_from_weights_alone_is_fp32_there_and_nowhere_else(name):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8).bfloat16())
    function, exact = OF_WEIGHTS[name], weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        before = function(weight)
    with torch_bf16.arithmetic("cpu", "fp32"):
        found, expected = function(weight), function(exact)
    assert torch.equal(found, expected)
    (ours,) = torch.autograd.grad(found.square().sum(), weight)
    (theirs,) = torch.autograd.grad(expected.square().sum(), exact)
    assert torch.allclose(ours.float(), theirs, rtol=0.01, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(function(weight), before)
        assert before.dtype == torch.bfloat16


def test_other_models_of_the_process_still_compute_in_bf16():
    before = torch_bf16.carry_autocast(torch_bf16.cast_model(Net()))
    expected = before(IDS)
    prepared()[0](IDS)
    assert torch.equal(before(IDS), expected)
    assert not torch.equal(expected, fp32_twin(before)(IDS))
    with torch.autocast("cpu", torch.bfloat16):
        assert before.tokens(IDS).dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_pass_computes_again_is_fp32_too(reentrant):
    net, _ = prepared()
    expected = gradients(net, net(IDS))
    net.again = {"use_reentrant": reentrant}
    for one, other in zip(gradients(net, net(IDS)), expected, strict=True):
        assert torch.equal(one, other)


def test_no_fp32_copy_of_a_weight_waits_for_the_backward_pass():
    net = torch_bf16.cast_model(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    kept = []
    pack = arithmetic._pack
    saved = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(pack(t)) or kept[-1], arithmetic._unpack
    )
    with torch_bf16.arithmetic("cpu", "fp32"), saved:
        y = net(torch.randn(2, 64))
    in_fp32 = [each for each in kept if isinstance(each, torch.Tensor)]
    assert len(kept) - len(in_fp32) == 3  # the first layer's input needs no gradient
    assert all(each.numel() == 2 * 64 for each in in_fp32)
    y.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_weight_that_changes_before_the_backward_pass_is_noticed():
    net, optimizer = prepared()
    outputs = net(IDS)
    gradients(net, net(IDS))
    optimizer.step()
    with pytest.raises(RuntimeError, match="was modified by an inplace operation"):
        outputs.sum().backward()


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.11 hides its own
def test_a_compiled_model_computes_in_fp32_in_one_graph():
    net, _ = prepared()
    expected = net(IDS)
    compiled = torch.compile(net, backend="aot_eager")
    assert torch.equal(compiled(IDS), expected)
    for one, other in zip(gradients(net, compiled(IDS)), gradients(net, net(IDS)), strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-6)


def test_training_learns_and_stores_what_the_recipe_says():
    net, optimizer = prepared("bf16-fp32-master")
    losses = []
    for _ in range(30):
        loss = net(IDS).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]
    assert optimizer.state[net.up.weight]["exp_avg"].dtype == torch.float32
    assert "computes in fp32" in str(torch_bf16.describe(net, optimizer))


def test_it_is_no_part_of_what_is_stored():
    net, optimizer = prepared()
    same = torch_bf16.get_recipe("bf16-stochastic")
    assert optimizer.recipe == same
    assert optimizer.recipe.compute == "fp32"
    assert "compute" not in optimizer.state_dict()["torch_bf16"]
    torch_bf16.prepare(net, optimizer, same)


def test_what_is_no_way_to_compute_is_refused():
    for ask in (
        lambda: torch_bf16.get_recipe("bf16-stochastic", compute="fp64"),
        lambda: torch_bf16.arithmetic("cpu", "fp64"),
    ):
        with pytest.raises(ValueError, match="compute='fp64' is unknown; use one of autocast, fp3"):
            ask()


def test_torchs_autocast_refuses_fp32_outside_of_a_backward_pass_as_before():
    prepared()[0](IDS)
    with pytest.warns(UserWarning, match="target dtype is not supported"):
        assert not torch.autocast("cpu", dtype=torch.float32)._enabled
    torch_patches.restore()
    assert torch.autocast.__init__.__module__ == "torch.amp.autocast_mode"


@pytest.fixture
def ratio(monkeypatch):
    def pretend(value):
        monkeypatch.setattr(slow_products, "bf16_product_ratio", lambda: value)
        monkeypatch.setattr(errors, "_said", set())

    return pretend


def test_slow_products_are_named_once_with_the_way_out(ratio):
    ratio(9.6)
    frozen = Net().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared()
        torch_bf16.cast_model(frozen)
        torch_bf16.cast_model(nn.LayerNorm(4))
    with pytest.warns(UserWarning, match=r"takes 9\.6 times as long.*compute='fp32'"):
        torch_bf16.cast_model(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_bf16.cast_model(Net())


def test_fast_products_are_not_mentioned(ratio):
    ratio(0.3)
    torch_bf16.cast_model(Net())


def test_products_are_timed():
    assert 0.05 < slow_products.bf16_product_ratio.__wrapped__() < 200


@pytest.mark.parametrize(
    "normalize", [torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.weight_norm]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_weight_normalisation_is_computed_in_fp32(normalize):
    """It was computed in bf16, which rounded the weight once more, and the gradient of ``v``."""

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(normalize(torch.nn.Linear(8, 64)))

    recipe = torch_bf16.get_recipe("bf16-stochastic", compute="fp32")
    model, reference = torch_bf16.cast_model(make(), recipe), make()
    with torch.no_grad():
        for mine, exact in zip(model.parameters(), reference.parameters(), strict=True):
            exact.copy_(mine)
    x = torch.randn(4, 8)
    y, expected = model(x), reference(x)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, exact in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert exact.grad is not None
        assert torch.equal(mine.grad, exact.grad.bfloat16())


def as_complex(weight, x):
    return (torch.view_as_complex(weight.float()) * x).abs()


def as_imaginary(weight, x):
    return torch.view_as_complex(weight.float()).conj().imag * x


def as_written(weight, x):
    copy = weight.float()
    with torch.no_grad():
        copy.mul_(2)
    return copy[:, 0] * x


@pytest.mark.parametrize("function", [as_complex, as_imaginary, as_written])
def test_what_is_made_of_a_copy_of_a_weight_is_saved_as_it_is(function):
    """Its numbers are not those of the weight, although they lie in the copy's memory."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 2).bfloat16())
    inputs = [torch.randn(8, requires_grad=True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    with arithmetic.arithmetic("cpu", "fp32"):
        function(weight, inputs[0]).square().sum().backward()
    function(weight, inputs[1]).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
