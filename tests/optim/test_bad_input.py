"""Bad recipes, parameters and options: an error that says what to do, and nothing changed."""

import pytest
import torch
from bad_input_cases import (
    BF16,
    OURS,
    assert_equal,
    assert_step_refused,
    assert_steps,
    begun,
    every_class,
    parameter,
    params,
)
from torch import nn

import torch_bf16
from torch_bf16 import Recipe, get_recipe
from torch_bf16.formats import FP32, ROLES


@every_class
@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ("bf16", "unknown recipe 'bf16'; known recipes: bf16-stochastic, bf16-fp32"),
        ("", "unknown recipe ''; known recipes"),
        (None, "must be a name or a torch_bf16.Recipe, not NoneType; known recipes"),
        (16, "must be a name or a torch_bf16.Recipe, not int; known recipes"),
        (Recipe, "must be a name or a torch_bf16.Recipe, not type; known recipes"),
    ],
)
def test_an_unknown_recipe_lists_the_known_ones(ours, recipe, match):
    p = parameter()
    with pytest.raises(ValueError, match=match):
        ours([p], lr=0.1, recipe=recipe)
    theirs = ours.torch_class([p], lr=0.1)
    with pytest.raises(ValueError, match=match):
        torch_bf16.convert(theirs, recipe)
    assert type(theirs) is ours.torch_class
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=match):
        torch_bf16.cast_model(module, recipe)
    assert module.weight.dtype == torch.float32
    assert_steps(ours([p], lr=0.1))


def test_a_format_for_one_kind_of_moments_is_refused_for_the_other_by_that_name(monkeypatch):
    monkeypatch.setitem(ROLES["exp_avg_sq"], "exponent8", FP32)
    with pytest.raises(ValueError, match="exp_avg='exponent8' is a format for second moments; use"):
        Recipe(exp_avg="exponent8")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sead": 1}, "unknown recipe option sead; known options: accumulate, backend, compute"),
        ({"weights": "fp32"}, "weights='fp32' does not store bf16 weights; use one of bf16_near"),
        (
            {"weights": "int8"},
            "weights='int8' does not store bf16 weights; use one of bf16_nearest",
        ),
        ({"weights": "fp4"}, "weights='fp4' is unknown; use one of bf16_nearest, bf16_stochastic"),
        ({"weights": None}, "weights=None is unknown; use one of bf16_nearest"),
        ({"weights": ["fp32"]}, r"weights=\['fp32'\] is unknown; use one of"),
        ({"exp_avg_sq": "uint8"}, "exp_avg_sq='uint8' is unknown; use one of fp32, bf16_nearest"),
        ({"exp_avg": "bf16+16"}, "exp_avg='bf16[+]16' is a format for weights; use one of"),
        (
            {"exp_avg_sq": "bf16+fp32"},
            "exp_avg_sq='bf16[+]fp32' is a format for weights; use",
        ),
        ({"seed": 1.5}, "seed=1.5 must be an int"),
        ({"seed": "1"}, "seed='1' must be an int"),
        ({"seed": None}, "seed=None must be an int"),
        ({"seed": True}, "seed=True must be an int"),
        ({"keep_fp32": "head"}, r"must be a tuple .*: keep_fp32=\('head',\)"),
        ({"keep_fp32": nn.Linear}, "must be a tuple of module name patterns or module classes"),
        ({"keep_fp32": None}, r"keep_fp32=None must be a tuple of module name patterns \(str\)"),
        ({"keep_fp32": 5}, "keep_fp32=5 must be a tuple of module name patterns"),
        ({"keep_fp32": ("head", 5)}, r"keep_fp32=\('head', 5\) must be a tuple of module name"),
        ({"keep_fp32": (nn.Linear(1, 1),)}, "keep_fp32=.* must be a tuple of module name pattern"),
    ],
)
def test_invalid_options_of_a_recipe_say_what_is_valid(options, match):
    with pytest.raises(ValueError, match=match):
        get_recipe("bf16-stochastic", **options)


@pytest.mark.parametrize("seed", [-1, 0, 2**64 - 1, 2**70])
def test_any_integer_is_a_seed(seed):
    assert_steps(begun(recipe=get_recipe("bf16-stochastic", seed=seed)))


def test_keep_fp32_may_be_any_iterable():
    recipe = get_recipe("bf16-stochastic", keep_fp32=(key for key in ["a", nn.Linear]))
    assert recipe.keep_fp32 == ("a", nn.Linear)


def test_a_recipe_set_later_takes_the_next_step_and_a_wrong_one_is_refused():
    optimizer = begun(recipe="bf16-stochastic")
    optimizer.recipe = "bf16-nonsense"
    assert_step_refused(optimizer, ValueError, "unknown recipe 'bf16-nonsense'; known recipes")
    optimizer.recipe = get_recipe("bf16-fp32-master")
    assert_steps(optimizer)
    assert optimizer.state[params(optimizer)[0]]["remainder16"].dtype == torch.int16
    assert optimizer.state[params(optimizer)[0]]["exp_avg"].dtype == torch.float32
    assert optimizer.state_dict()["torch_bf16"]["recipe"]["weights"] == "bf16+16"


WRONG = {
    "fp16": (torch.float16, r"is torch.float16; .* Call model.float\(\) before the model is cast"),
    "fp64": (torch.float64, r"is torch.float64; .* Call model.float\(\) before the model is cast"),
    "complex": (torch.complex128, r"is torch.complex128; .*Make it complex64: torch.nn.Parameter"),
}


@every_class
@pytest.mark.parametrize("kind", WRONG)
def test_parameters_of_other_dtypes_are_refused_at_every_door(ours, kind):
    dtype, match = WRONG[kind]
    good, bad = parameter(), parameter(2, 3, dtype=dtype)
    match = r"parameter number 1 of group 0, shape \(2, 3\), " + match
    with pytest.raises(ValueError, match=match):
        ours([good, bad], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 'b', number 1 of group 0"):
        ours([("a", good), ("b", bad)], lr=0.1)
    theirs = ours.torch_class([good, bad], lr=0.1)
    with pytest.raises(ValueError, match=match):
        torch_bf16.convert(theirs)
    assert type(theirs) is ours.torch_class

    optimizer = begun(ours)
    with pytest.raises(ValueError, match=match.replace("group 0", "group 3")):
        optimizer.add_param_group({"params": [good, bad]})
    assert len(optimizer.param_groups) == 3
    assert_steps(optimizer)
    optimizer.add_param_group({"params": [good]})
    assert_steps(optimizer)


@every_class
def test_parameters_without_a_place_for_each_element_are_refused(ours):
    sparse = nn.Parameter(torch.eye(3, dtype=BF16).to_sparse())
    expanded = nn.Parameter(torch.ones(3, 1, dtype=BF16).expand(3, 4))
    negated = nn.Parameter(torch._neg_view(torch.ones(3, 4, dtype=BF16)))
    with torch.inference_mode():
        inference = nn.Parameter(torch.ones(3, 4, dtype=BF16), requires_grad=False)
    kinds = {
        "torch.sparse_coo": sparse,
        "an expanded view": expanded,
        "a view that is negated": negated,
        "an inference tensor": inference,
    }
    for kind, bad in kinds.items():
        with pytest.raises(
            ValueError, match=f"number 0 of group 0, .* is {kind}.*; .*Make it dense"
        ):
            ours([bad], lr=0.1)
    assert_steps(ours([nn.Parameter(expanded.detach().clone())], lr=0.1))


@every_class
def test_two_parameters_over_the_same_memory_are_refused(ours):
    one = torch.randn(4, 4, dtype=BF16)
    tied = [nn.Parameter(one), nn.Parameter(one), nn.Parameter(torch.zeros(0, 4, dtype=BF16))]
    optimizer = ours(tied, lr=0.1)
    for each in tied:
        each.grad = torch.ones_like(each)
    assert_step_refused(
        optimizer, ValueError, "number 1 of group 0.* and .*number 0 of group 0.*same memory"
    )


def test_parameters_that_overlap_are_refused_and_those_side_by_side_are_not():
    flat, columns = torch.randn(24, dtype=BF16), torch.randn(4, 6, dtype=BF16)
    apart = [nn.Parameter(flat[:8]), nn.Parameter(flat[8:])]
    apart += [nn.Parameter(columns[:, :2]), nn.Parameter(columns[:, 2:])]
    optimizer = torch_bf16.AdamW(apart, lr=0.1)
    over = torch_bf16.AdamW([nn.Parameter(flat[4:16]), nn.Parameter(flat[:8])], lr=0.1)
    for each in (*params(optimizer), *params(over)):
        each.grad = torch.ones_like(each)
    optimizer.step()
    assert_step_refused(
        over, ValueError, "number 0 of group 0.* and .*number 1 of group 0.*same memory"
    )
    rows = torch.randn(26, dtype=BF16).as_strided((10, 8), (2, 1))
    with pytest.raises(ValueError, match="is an expanded view"):
        torch_bf16.AdamW([nn.Parameter(rows)], lr=0.1)


@every_class
def test_a_parameter_given_twice_is_refused(ours):
    p = parameter()
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(
            ValueError, match=r"group 0 holds a parameter twice, .*give each parameter onc"
        ),
    ):
        ours([p, p], lr=0.1)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        ours([{"params": [p]}, {"params": [p]}], lr=0.1)
    optimizer = begun(ours)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": params(optimizer)[:1]})
    assert_steps(optimizer)


@every_class
def test_no_parameters_and_no_list_of_them_are_refused_by_torch(ours):
    with pytest.raises(ValueError, match="empty parameter list"):
        ours([], lr=0.1)
    with pytest.raises(TypeError, match="should be an iterable of Tensors"):
        ours(parameter(), lr=0.1)
    with pytest.raises(TypeError, match="optimizer can only optimize Tensors"):
        ours([1.0], lr=0.1)
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        ours([parameter() * 2], lr=0.1)


@pytest.mark.parametrize(
    ("ours", "options", "error", "match"),
    [
        ("adamw", {"lr": -1.0}, ValueError, "Invalid learning rate"),
        ("adamw", {"lr": "0.1"}, TypeError, "not supported between instances of 'float' and 'str'"),
        ("adamw", {"eps": -1.0}, ValueError, "Invalid epsilon"),
        ("adam", {"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter at index 0"),
        ("adam", {"betas": (0.9, -0.1)}, ValueError, "Invalid beta parameter at index 1"),
        ("adam", {"weight_decay": -1.0}, ValueError, "Invalid weight_decay"),
        ("sgd", {"momentum": -1.0}, ValueError, "Invalid momentum"),
        ("sgd", {"nesterov": True}, ValueError, "Nesterov momentum requires a momentum"),
        ("adamw", {"differentiable": True}, NotImplementedError, "differentiable=True .* to False"),
        ("sgd", {"differentiable": True}, NotImplementedError, "differentiable=True .* to False"),
    ],
)
def test_invalid_options_are_refused(ours, options, error, match):
    p = parameter()
    with pytest.raises(error, match=match):
        OURS[ours]([p], **{"lr": 0.1, **options})
    assert_steps(OURS[ours]([p], lr=0.1))


@pytest.mark.parametrize(
    ("ours", "option", "value", "error", "match"),
    [
        ("adamw", "lr", None, ValueError, "options of group 2: lr=None must be a number"),
        ("adamw", "lr", torch.ones(2), ValueError, r"of group 2: lr=tensor\(\[1., 1.\]\) must be"),
        (
            "adamw",
            "betas",
            (1.0, 0.9),
            ValueError,
            r"group 2: betas=\(1.0, 0.9\) must be .*ZeroDiv",
        ),
        ("adamw", "betas", 0.9, ValueError, "options of group 2: betas=0.9 must be two numbers"),
        ("adam", "eps", "tiny", ValueError, "options of group 2: eps='tiny' must be a number"),
        ("sgd", "weight_decay", None, ValueError, "of group 2: weight_decay=None must be a numb"),
        ("sgd", "differentiable", True, NotImplementedError, "differentiable=True in parameter g"),
    ],
)
@pytest.mark.parametrize("steps", [0, 2], ids=["at first", "later"])
def test_options_made_invalid_later_are_refused_before_any_group_is_updated(
    ours, option, value, error, match, steps
):
    optimizer = begun(OURS[ours], steps)
    group = optimizer.param_groups[2]
    kept, group[option] = group[option], value
    before = [p.detach().clone() for p in params(optimizer)]
    with pytest.raises(error, match=match):
        optimizer.step()
    assert_equal([p.detach() for p in params(optimizer)], before)
    assert {float(s["step"]) for s in optimizer.state.values()} <= {float(steps)}
    group[option] = kept
    assert_steps(optimizer)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            torch.optim.LBFGS,
            NotImplementedError,
            "LBFGS cannot be converted: it evaluates the clos",
        ),
        (lambda p: None, ValueError, "takes a torch.optim optimizer, not NoneType; known: torch.o"),
        (lambda p: torch.optim.AdamW, ValueError, "takes a torch.optim optimizer, not type; known"),
    ],
    ids=["lbfgs", "none", "class"],
)
def test_what_cannot_be_converted_says_why_and_goes_on(make, error, match):
    p = parameter()
    optimizer = make([p])
    with pytest.raises(error, match=match):
        torch_bf16.convert(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        assert type(optimizer) is make
        optimizer.step(lambda: (p.float() ** 2).sum().requires_grad_())


@pytest.mark.parametrize("step", [-5.0, float("nan"), float("inf")])
def test_a_damaged_step_number_is_named(step):
    optimizer = begun(torch_bf16.AdamW)
    optimizer.state[params(optimizer)[0]]["step"].fill_(step)
    before = [p.detach().clone() for p in params(optimizer)]
    with pytest.raises(ValueError, match=f"step of a parameter of group 0 is {step} and must be"):
        optimizer.step()
    assert_equal([p.detach() for p in params(optimizer)], before)


def test_foreach_and_fused_are_ignored():
    """torch refuses both at once, and foreach with a tensor as learning rate."""
    groups = [{"params": [parameter()]}, {"params": [parameter()], "fused": False}]
    options = {"lr": torch.tensor(0.1), "foreach": True, "fused": True}
    optimizer = torch_bf16.AdamW(groups, **options)
    assert options.items() <= optimizer.defaults.items()
    assert [(each["foreach"], each["fused"]) for each in optimizer.param_groups] == [
        (True, True),
        (True, False),
    ]
    assert_steps(optimizer)


def test_a_second_convert_is_refused():
    optimizer = torch_bf16.convert(torch.optim.AdamW([parameter()], lr=0.1), "bf16-stochastic")
    assert_steps(optimizer)
    for each in (optimizer, begun()):
        with pytest.raises(
            ValueError, match="AdamW already stores its numbers by recipe 'bf16-stochastic'"
        ):
            torch_bf16.convert(each, "bf16-fp32-master")
    assert optimizer.recipe.name == "bf16-stochastic"
    assert_steps(optimizer)


def test_wrong_arguments_of_convert_leave_the_optimizer_torchs():
    optimizer = torch.optim.AdamW([parameter()], lr=0.1)
    with pytest.raises(ValueError, match="unknown backend 'cuda'; known backends: cpu, eager"):
        torch_bf16.convert(optimizer, backend="cuda")
    with pytest.raises(ValueError, match=r"convert was given a list and takes a torch.nn.Module"):
        torch_bf16.convert(optimizer, model=[parameter()])
    assert type(optimizer) is torch.optim.AdamW
    assert_steps(optimizer)
    assert_steps(torch_bf16.convert(optimizer))


def public_optimizers():
    known = {name: getattr(torch_bf16, name) for name in torch_bf16.__all__}
    ours = torch_bf16.BF16Optimizer
    return [
        name
        for name, each in known.items()
        if isinstance(each, type) and issubclass(each, ours) and each is not ours
    ]


@pytest.mark.parametrize("name", public_optimizers())
def test_every_constructor_takes_a_backend_that_there_is(name):
    assert getattr(torch_bf16, name)([parameter()], lr=0.1, backend="eager").backend == "eager"
    with pytest.raises(ValueError, match="unknown backend 'cuda'; known backends: cpu, eager"):
        getattr(torch_bf16, name)([parameter()], lr=0.1, backend="cuda")


def test_an_unknown_backend_set_later_is_refused():
    optimizer = begun()
    optimizer.backend = "cuda"
    assert_step_refused(optimizer, ValueError, "unknown backend 'cuda'; known backends: cpu, eager")
    optimizer.backend = None
    assert_steps(optimizer)


@pytest.mark.parametrize("coefficient", [float("nan"), float("inf"), "1", torch.ones(2)], ids=str)
def test_a_scale_that_is_no_finite_number_is_refused(coefficient):
    optimizer = torch_bf16.AdamW([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="must be a finite number or a tensor with one element"):
        optimizer.scale_next_step(coefficient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8], ids=str)
def test_what_is_frozen_in_another_dtype_may_be_in_the_optimizer_until_it_is_trained(dtype):
    p = parameter()
    frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
    optimizer = torch_bf16.convert(torch.optim.AdamW([p, frozen], lr=0.1), "bf16-stochastic")
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p < 1).all()
    assert (frozen == 1).all()
    assert frozen not in optimizer.state
    if dtype.is_floating_point:
        frozen.requires_grad_()
        frozen.grad = torch.ones_like(frozen)
        p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=f"is {dtype}; bfloat16, float32 and complex64"):
            optimizer.step()
