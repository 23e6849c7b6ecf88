"""Operations in which an fp32 tensor meets a weight: beside bf16 weights as beside fp32 ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_bf16 import cast_model, get_recipe, torch_patches
from torch_bf16.model import autocast, foreign_averages

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")

BF16 = torch.bfloat16
SOME = torch.tensor([0, 2])
FIRST = torch.zeros(2, 3, dtype=torch.long)
MASK = torch.tensor([True, False, True, False])


def x(*shape):
    return torch.linspace(0.1, 2, torch.Size(shape).numel()).view(shape)


def setitem(key):
    def call(p):
        y = x(4, 3)
        y[key] = p
        return y

    return call


# What is called, and the shape of its weight; each is refused by torch beside bf16 weights.
OPERATIONS = {
    "x[mask] = token": (setitem(MASK), (3,)),
    "x[index] = rows": (setitem(SOME), (2, 3)),
    "index_put": (lambda p: x(4, 3).index_put((SOME,), p), (3,)),
    "index_add": (lambda p: x(4, 3).index_add(0, SOME, p), (2, 3)),
    "index_add_": (lambda p: x(4, 3).index_add_(0, SOME, p), (2, 3)),
    "index_copy_": (lambda p: x(4, 3).index_copy_(0, SOME, p), (2, 3)),
    "index_reduce": (lambda p: x(4, 3).index_reduce(0, SOME, p, "amax"), (2, 3)),
    "scatter": (lambda p: x(4, 3).scatter(0, FIRST, p), (2, 3)),
    "scatter_": (lambda p: x(4, 3).scatter_(0, FIRST, p), (2, 3)),
    "scatter_add": (lambda p: x(4, 3).scatter_add(0, FIRST, p), (2, 3)),
    "scatter_add_": (lambda p: x(4, 3).scatter_add_(0, FIRST, p), (2, 3)),
    "scatter_reduce": (lambda p: x(4, 3).scatter_reduce(0, FIRST, p, "sum"), (2, 3)),
    "masked_scatter": (lambda p: x(4, 3).masked_scatter(MASK[:, None], p), (2, 3)),
    "masked_scatter_": (lambda p: x(4, 3).masked_scatter_(MASK[:, None], p), (2, 3)),
    "put_": (lambda p: x(4, 3).put_(SOME, p), (2,)),
    "lerp from": (lambda p: torch.lerp(p, x(3), 0.3), (3,)),
    "lerp to": (lambda p: torch.lerp(x(3), p, 0.3), (3,)),
    "lerp by": (lambda p: torch.lerp(x(3), x(3) * 2, p), (3,)),
    "lerp_": (lambda p: x(3).lerp_(p, 0.3), (3,)),
    "inner": (lambda p: torch.inner(x(4, 3), p), (2, 3)),
    "tensordot": (lambda p: torch.tensordot(x(4, 3), p, 1), (3, 2)),
    "multi_dot": (lambda p: torch.linalg.multi_dot([x(4, 3), p, x(2, 3)]), (3, 2)),
    "cross": (lambda p: torch.cross(x(4, 3), p, dim=-1), (4, 3)),
    "linalg.cross": (lambda p: torch.linalg.cross(x(4, 3), p), (4, 3)),
    "complex": (lambda p: torch.complex(x(3), p), (3,)),
    "complex of bf16": (lambda p: torch.complex(p, p), (3,)),
    "solve_triangular": (lambda p: torch.linalg.solve_triangular(p, x(3, 1), upper=True), (3, 3)),
    "addmm_": (lambda p: x(4, 2).addmm_(x(4, 3), p), (3, 2)),
    "addmv_": (lambda p: x(4).addmv_(x(4, 3), p), (3,)),
    "addbmm_": (lambda p: x(4, 2).addbmm_(x(5, 4, 3), p), (5, 3, 2)),
    "baddbmm_": (lambda p: x(5, 4, 2).baddbmm_(x(5, 4, 3), p), (5, 3, 2)),
    "sparse.mm": (lambda p: torch.sparse.mm(x(4, 3).to_sparse(), p), (3, 2)),
    "sparse.addmm": (lambda p: torch.sparse.addmm(x(4, 2), x(4, 3).to_sparse(), p), (3, 2)),
    "batch_norm": (lambda p: F.batch_norm(x(4, 3), None, None, p, training=True), (3,)),
    "batch_norm with statistics": (
        lambda p: F.batch_norm(x(4, 3), torch.zeros(3), torch.ones(3), p, training=True),
        (3,),
    ),
    "batch_norm of bf16": (
        lambda p: F.batch_norm(x(4, 3).to(BF16), torch.zeros(3), torch.ones(3), p, training=True),
        (3,),
    ),
    **{
        f"antialiased {mode}": (
            lambda p, mode=mode: F.interpolate(p, size=(3, 3), mode=mode, antialias=True),
            (1, 2, 5, 5),
        )
        for mode in ("bicubic", "bilinear")
    },
    "embedding_bag": (
        lambda p: F.embedding_bag(SOME.view(1, 2), p, per_sample_weights=x(1, 2), mode="sum"),
        (4, 3),
    ),
}


def compute(function, weight):
    with torch.autocast("cpu", BF16):
        y = function(weight)
    (y.abs() if y.is_complex() else y).float().sum().backward()
    return y.detach(), weight.grad


def weights(shape):
    module = nn.Module()
    size = torch.Size(shape)
    module.p = nn.Parameter(torch.linspace(0.5, 2, size.numel()).to(BF16).float().view(size))
    widened = nn.Parameter(module.p.detach().clone())
    return cast_model(module).p, widened


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_gives_what_fp32_weights_of_the_same_numbers_give(name):
    function, shape = OPERATIONS[name]
    weight, widened = weights(shape)
    y, gradient = compute(function, weight)
    expected, other = compute(function, widened)
    assert weight.dtype == BF16
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    assert torch.equal(gradient, other.to(BF16))


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_this_package_torch_refuses_it(name):
    function, shape = OPERATIONS[name]
    weight, _ = weights(shape)
    torch_patches.restore()
    try:
        with pytest.raises(RuntimeError, match=r"(?i)type|not implemented|both inputs"):
            compute(function, weight)
    finally:
        autocast.fill_gaps()
        foreign_averages.watch_averages()


def test_what_is_written_in_place_keeps_its_dtype():
    weight, _ = weights((4, 3))
    with torch.autocast("cpu", BF16):
        y = weight.clone()
        y[MASK] = x(2, 3)
        y.index_add_(0, SOME, x(2, 3))
    assert y.dtype == BF16


def test_integers_and_doubles_are_left_to_torch():
    weight, _ = weights((3,))
    with torch.autocast("cpu", BF16):
        assert setitem(MASK)(1.5).dtype == torch.float32
        assert torch.lerp(x(3).double(), x(3).double(), 0.5).dtype == torch.float64
        with pytest.raises(RuntimeError, match="destination dtypes match"):
            torch.zeros(4, 3, dtype=torch.int64)[MASK] = weight


LOWEST = torch.finfo(torch.float32).min
FILLS = {
    "masked_fill": lambda y: y.masked_fill(MASK, LOWEST),
    "masked_fill_": lambda y: y.clone().masked_fill_(MASK, LOWEST),
    "where other": lambda y: torch.where(~MASK, y, LOWEST),
    "where self": lambda y: torch.where(MASK, LOWEST, y),
    "index_fill": lambda y: y.index_fill(0, SOME, LOWEST),
    "index_fill_": lambda y: y.clone().index_fill_(0, SOME, LOWEST),
    "fill_diagonal_": lambda y: y.repeat(4, 1).fill_diagonal_(LOWEST)[0],
}


@pytest.mark.parametrize("name", FILLS)
def test_the_lowest_number_of_fp32_fills_a_bf16_mask_with_that_of_bf16(name):
    weight, widened = weights((4,))
    with torch.autocast("cpu", BF16):
        y = FILLS[name](weight)
        assert torch.equal(FILLS[name](widened).isfinite(), torch.ones_like(y, dtype=torch.bool))
    assert y.dtype == BF16
    assert y[0] == torch.finfo(BF16).min


def test_numbers_that_fp32_cannot_hold_either_are_left_to_torch():
    weight, widened = weights((4,))
    with torch.autocast("cpu", BF16):
        assert weight.masked_fill(MASK, -torch.inf)[0] == -torch.inf
        assert widened.masked_fill(MASK, LOWEST)[0] == LOWEST
        with pytest.raises(RuntimeError, match="overflow"):
            weight.masked_fill(MASK, 1e39)


class Masked(nn.Module):
    """A masked autoencoder's first layers."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.linspace(0, 1, 8))
        self.position = nn.Parameter(torch.linspace(0, 1, 32).view(1, 4, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, y):
        y = torch.where(MASK[:, None], self.token, y)
        y = torch.lerp(self.norm(y), y, 0.1).index_add(0, torch.tensor([0]), self.position)
        return y.scatter_add(0, torch.zeros(1, 4, 8, dtype=torch.long), self.position)


def test_a_compiled_model_does_the_same_in_one_graph():
    model = cast_model(Masked())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for each in (model, compiled):
        model.zero_grad()
        with torch.autocast("cpu", BF16):
            y = each(x(2, 4, 8))
        y.sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *results))


class Head(nn.Module):
    def __init__(self, raw=False):
        super().__init__()
        self.raw = raw
        self.proj = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8, 8))

    def forward(self, y):
        with torch.autocast("cpu", enabled=False):
            return y.float() @ self.gain if self.raw else self.proj(y.float())


@pytest.mark.parametrize(("raw", "name"), [(False, "head.proj"), (True, "head")])
def test_where_autocast_is_off_the_error_names_the_weight_and_the_way_out(raw, name):
    model = nn.Sequential()
    model.body, model.head = nn.Linear(8, 8), Head(raw)
    cast_model(model)
    weight = "gain" if raw else "proj.weight"
    match = rf"'head.{weight}' of \w+ is a bfloat16 weight .*keep_fp32=\['{name}'\] \(BF16_KEEP"
    with (
        pytest.raises(RuntimeError, match=f"same dtype.*{match}") as caught,
        torch.autocast("cpu", BF16),
    ):
        model(x(2, 8))
    assert str(caught.value).count("keep_fp32") == 1

    fp32 = nn.Sequential()
    fp32.body, fp32.head = nn.Linear(8, 8), Head(raw)
    cast_model(fp32, get_recipe("bf16-stochastic", keep_fp32=(name,)))
    with torch.autocast("cpu", BF16):
        assert fp32(x(2, 8)).dtype == torch.float32


class Whole(nn.Module):
    """Computes a part of itself where autocast is off."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.encoder(x)


@pytest.mark.parametrize("first", ["part", "whole"])
def test_a_weight_is_named_as_the_outermost_model_that_was_cast_names_it(first):
    model = Whole()
    both = [model.encoder, model] if first == "part" else [model, model.encoder]
    for each in both:
        cast_model(each)
    with (
        pytest.raises(RuntimeError, match=r"keep_fp32=\['encoder.0'\]"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(torch.ones(1, 4))


def test_other_errors_and_other_models_are_left_alone():
    cast_model(nn.Linear(2, 2))
    plain = nn.Linear(8, 8)
    with (
        pytest.raises(RuntimeError, match="same dtype") as caught,
        torch.autocast("cpu", BF16),
        torch.autocast("cpu", enabled=False),
    ):
        plain(x(2, 8).to(BF16))
    assert "keep_fp32" not in str(caught.value)
    with pytest.raises(RuntimeError, match=r"^my own$"), torch.autocast("cpu", BF16):
        raise RuntimeError("my own")


def test_where_no_autocast_is_on_the_error_says_to_turn_it_on():
    """As in scripts with ``autocast(enabled=args.amp)`` that are run without ``--amp``."""
    model = cast_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    match = (
        r"'0\.weight' of Linear is a bfloat16 weight and met .* is off: the only one around this "
        r"call has enabled=False\. Call the model under torch\.autocast\('cpu', torch\.bfloat16\)"
    )
    with (
        pytest.raises(RuntimeError, match=match) as caught,
        torch.autocast("cpu", enabled=False),
        torch.autocast("cpu", BF16, enabled=False),
    ):
        model(x(2, 8))
    assert "keep_fp32" not in str(caught.value)
    assert str(caught.value).count("is off") == 1


def test_under_autocast_to_fp16_the_error_says_to_name_bf16():
    """On CPUs torch's norms refuse fp16 inputs; as torch.autocast("cuda") is without a dtype."""
    model = cast_model(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    match = (
        r"'1\.weight' of LayerNorm is a bfloat16 weight and met .* this autocast is to float16, .* "
        r"Name bfloat16: torch\.autocast\('cpu', torch\.bfloat16\), and leave out the GradScaler"
    )
    with (
        pytest.raises(RuntimeError, match=match) as caught,
        torch.autocast("cpu", BF16),
        torch.autocast("cpu", torch.float16),
    ):
        model(x(2, 8))
    assert "keep_fp32" not in str(caught.value)


@pytest.mark.parametrize("times", [1, 2])
def test_under_the_modes_own_autocast_the_part_that_switches_it_off_is_to_be_mended(times):
    call = cast_model(nn.Linear(8, 8)).forward
    for _ in range(times):
        call = torch.autocast("cpu", enabled=False)(call)
    with pytest.raises(RuntimeError, match="keep_fp32") as caught, torch.autocast("cpu", BF16):
        call(x(2, 8))
    assert "is off" not in str(caught.value)


def test_the_context_can_be_given_back():
    torch_patches.restore()
    stock = torch.autocast.__exit__
    cast_model(nn.Linear(2, 2))
    assert torch.autocast.__exit__ is not stock
    torch_patches.restore()
    assert torch.autocast.__exit__ is stock
    cast_model(nn.Linear(2, 2))


def test_a_function_without_a_bf16_kernel_is_not_said_to_mix_dtypes():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.concentration = nn.Parameter(torch.ones(2, 3))

        def forward(self):
            return torch.distributions.Dirichlet(self.concentration).sample()

    model = cast_model(Draws())
    match = r"not implemented for 'BFloat16'. torch has no bfloat16 kernel .*: x\.float\(\)"
    with pytest.raises(RuntimeError, match=match), torch.autocast("cpu", BF16):
        model()
