"""A state dict of another recipe loads, loses what the new one cannot hold, and says so."""

import copy
import itertools
import re

import pytest
import torch
from optimizer_cases import RECIPES, make_optimizer, make_parameters, parameters_of, take_steps

import torch_bf16
from torch_bf16.formats import (
    BF16_NEAREST,
    BF16_PLUS_16,
    BF16_PLUS_FP32,
    FORMATS,
    FP32,
    ROLES,
)
from torch_bf16.numerics.rounding import bf16_nearest, join16, split16
from torch_bf16.states.recoding import (
    Changes,
    recode,
    recode_weight,
    stored_format,
    without_stale_remainders,
)

EXACT = (BF16_PLUS_16, BF16_PLUS_FP32)


def bits(tensor):
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def numbers(optimizer):
    """Every weight and moment as the fp32 number that the next step would read."""
    found = []
    for parameter in parameters_of(optimizer):
        state = optimizer.state[parameter]
        weights = optimizer.recipe.format_of("weights", parameter.shape, parameter.dtype)
        planes = [parameter.detach(), *(state[key] for key in weights.plane_names("")[1:])]
        found.append(
            {
                "weights": weights.decode(planes),
                **{key: state[key].float() for key in ("exp_avg", "exp_avg_sq")},
            }
        )
    return found


def trained(recipe, seed=0):
    optimizer = make_optimizer("adamw", recipe, "eager", make_parameters(seed).values())
    take_steps(optimizer, range(3))
    return optimizer


def loaded(saved, recipe):
    optimizer = make_optimizer("adamw", recipe, "eager", make_parameters(1).values())
    with torch.no_grad():
        for mine, other in zip(parameters_of(optimizer), parameters_of(saved), strict=True):
            mine.copy_(other)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    return optimizer


@pytest.mark.parametrize("live", RECIPES)
@pytest.mark.parametrize("saved", RECIPES)
def test_each_number_is_the_nearest_that_the_new_recipe_holds(saved, live, caplog):
    old = trained(saved)
    new = loaded(old, live)
    lost = {"weights": 0, "exp_avg": 0, "exp_avg_sq": 0}
    for parameter, before, after in zip(
        parameters_of(new), numbers(old), numbers(new), strict=True
    ):
        for name, x in before.items():
            format_ = new.recipe.format_of(name, parameter.shape, parameter.dtype)
            single_bf16 = [plane.dtype for plane in format_.planes] == [torch.bfloat16]
            expected = bf16_nearest(x).float() if single_bf16 else x
            if name == "weights" and single_bf16:
                expected = parameter.detach().float()  # the model's, which nothing may change
            assert torch.equal(bits(after[name]), bits(expected)), name
            lost[name] += int((bits(after[name]) != bits(x)).sum())
    said = "".join(record.getMessage() for record in caplog.records)
    for name, count in lost.items():
        # "weights bf16+16 -> bf16_stochastic: 59 of 59 numbers rounded"
        stated = re.findall(rf"{name} \S+ -> \S+: (\d+) of", said)
        assert sum(map(int, stated)) == count
    assert (sum(lost.values()) > 0) == bool(caplog.records)
    if any(lost.values()):
        assert RECIPES[saved].name in said
        assert RECIPES[live].name in said


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_new_planes_have_the_dtypes_and_shapes_of_their_format(format_):
    x = torch.randn(3, 128).abs()
    planes = recode(x, format_)
    assert [each.dtype for each in planes] == [plane.dtype for plane in format_.planes]
    assert [each.shape for each in planes] == [plane.shape(x.shape) for plane in format_.planes]
    assert all(each.is_contiguous() and each.data_ptr() != x.data_ptr() for each in planes)


@pytest.mark.parametrize("live", ["master", "mixed"])
@pytest.mark.parametrize("saved", ["master", "mixed"])
def test_between_recipes_with_masters_the_weights_go_on_exactly(saved, live):
    old = trained(saved)
    before = numbers(old)
    new = loaded(old, live)
    for one, other in zip(before, numbers(new), strict=True):
        assert torch.equal(bits(one["weights"]), bits(other["weights"]))
    take_steps(new, [3])
    assert any(
        not torch.equal(bits(one["weights"]), bits(other["weights"]))
        for one, other in zip(before, numbers(new), strict=True)
    )


def test_a_dropped_master_is_warned_of(caplog):
    loaded(trained("master"), "stochastic")
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    pattern = r"'bf16-fp32-master' into recipe 'bf16-stochastic'.*weights bf16[+]16 -> bf16_"
    assert re.search(pattern, record.getMessage())


def test_bf16_moments_beside_an_exact_master_say_that_torch_has_trained_the_weights(caplog):
    old = trained("master")
    parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters_of(old)]
    torchs = torch.optim.AdamW(parameters, lr=1e-2)
    torchs.load_state_dict(copy.deepcopy(old.state_dict()))
    take_steps(torchs, [3])
    new = make_optimizer("adamw", "master", "eager", make_parameters().values())
    with torch.no_grad():
        for mine, theirs in zip(parameters_of(new), parameters, strict=True):
            mine.copy_(theirs)
    new.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert "weights bf16+16 -> bf16_nearest" in caplog.text
    for found, weight in zip(numbers(new), parameters, strict=True):
        assert torch.equal(found["weights"], weight.detach().float())


def test_without_a_header_the_planes_tell_the_formats():
    old = trained("master")
    saved = copy.deepcopy(old.state_dict())
    del saved["torch_bf16"]
    new = make_optimizer("adamw", "mixed", "eager", make_parameters().values())
    with torch.no_grad():
        for mine, other in zip(parameters_of(new), parameters_of(old), strict=True):
            mine.copy_(other)
    new.load_state_dict(saved)
    for one, other in zip(numbers(old), numbers(new), strict=True):
        assert torch.equal(bits(one["weights"]), bits(other["weights"]))


def test_a_moment_that_an_optimizer_keeps_in_bf16_drops_no_low_bits():
    state = {
        "exp_avg": torch.ones(3, dtype=torch.bfloat16),
        "exp_avg_sq": torch.ones(3),
        "remainder16": torch.ones(3, dtype=torch.bfloat16),
    }
    changes = Changes()
    assert without_stale_remainders(state, [FP32, FP32], changes) == state
    assert not changes.counts


def test_a_recipe_may_be_changed_between_two_steps():
    optimizer = trained("master")
    before = numbers(optimizer)
    optimizer.recipe = RECIPES["mixed"]
    for parameter in parameters_of(optimizer):
        parameter.grad.zero_()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    for one, other in zip(before, numbers(optimizer), strict=True):
        assert torch.equal(bits(one["weights"]), bits(other["weights"]))
    assert all(
        "remainder16" not in state or "master" not in state for state in optimizer.state.values()
    )
    assert any("master" in state for state in optimizer.state.values())


def test_a_master_for_a_parameter_that_is_fp32_now_is_refused_with_the_export():
    saved = trained("master").state_dict()
    model = [torch.nn.Parameter(p.detach().float()) for p in make_parameters().values()]
    ours = torch_bf16.AdamW(model, recipe="bf16-fp32-master")
    with pytest.raises(torch_bf16.StateMismatchError, match=r"is fp32 now.*fp32_state_dict"):
        ours.load_state_dict(saved)
    assert not ours.state


def patterns():
    """fp32 numbers around every tie and special value of bf16."""
    upper = torch.arange(0, 2**16, 7, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7F, 0x80, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFF])
    x = (upper[:, None] | lower[None].to(torch.int32)).view(torch.float32).flatten()
    return x[x.isfinite() & (x.abs() < 3.3e38)].contiguous()


@pytest.mark.parametrize(
    "new", [f for f in ROLES["weights"].values() if len(f.planes) > 1], ids=lambda f: f.name
)
@pytest.mark.parametrize("visible", ["ties away", "ties to even"])
def test_a_weight_stays_by_its_parameter_at_every_tie(new, visible):
    x = patterns()
    parameter = split16(x)[0] if visible == "ties away" else bf16_nearest(x)
    rest = recode_weight(x, parameter, new)
    after = new.decode([parameter.clone(), *rest])
    distance = (bits(after).long() - bits(x).long()).abs()
    # A number that is not a tie of the other kind stays; the others move by one unit.
    own = recode(x, new)[0].view(torch.int16) == parameter.view(torch.int16)
    same_ties = {"bf16+16": "ties away", "bf16+fp32": "ties to even"}.get(new.name)
    assert own.all() == (visible == same_ties)
    # To 24 bits, 0x7FFF and 0xFFFF round up, too, and one of them across the tie.
    assert own.float().mean() > (0.9 if new in EXACT else 0.8)
    spacing = 1 if new in EXACT else 256
    assert (distance[own] <= (0 if new in EXACT else spacing)).all()
    assert (distance <= spacing).all()


def test_a_stored_format_is_told_by_names_and_dtypes():
    half, whole = torch.zeros(2, dtype=torch.int16), torch.zeros(2)
    assert stored_format({"remainder16": half}, "") is BF16_PLUS_16
    assert stored_format({"master": whole}, "") is BF16_PLUS_FP32
    assert stored_format({"master": half}, "") is BF16_NEAREST
    assert stored_format({"exp_avg": whole}, "exp_avg") is FP32
    assert stored_format({}, "exp_avg") is None


@pytest.mark.parametrize(("kind", "state"), [("AdamW", "exp_avg"), ("Adafactor", "row_var")])
def test_numbers_that_fp32_cannot_hold_are_not_called_exact(kind, state, caplog):
    wide = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    old = getattr(torch.optim, kind)([wide])
    new = getattr(torch_bf16, kind)([torch.nn.Parameter(torch.ones(4, 3))], backend="eager")
    wide.grad = torch.ones_like(wide)
    old.step()
    for number in (1 / 3, 1e199):
        old.state[wide][state].fill_(number)
        numel = old.state[wide][state].numel()
        caplog.clear()
        new.load_state_dict(old.state_dict())
        assert f"{state} float64 -> fp32: {numel} of {numel} numbers rounded" in caplog.text


def test_changes_are_counted_by_kind():
    changes = Changes()
    for lost in (2, 0):
        changes.add("exp_avg", FP32.name, BF16_NEAREST.name, 1000, lost)
    changes.add("weights", BF16_PLUS_16.name, BF16_PLUS_FP32.name, 5, 0)
    assert changes.lost == 2
    assert str(changes) == (
        "exp_avg fp32 -> bf16_nearest: 2 of 2,000 numbers rounded; "
        "weights bf16+16 -> bf16+fp32: 5 numbers, exact"
    )
    x = torch.tensor([1.0, 1.001])
    assert torch.equal(join16(*recode(x, BF16_PLUS_16)), x)


@pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq"])
def test_codes_of_moments_are_told_from_integers_of_the_users(role):
    for name, format_ in ROLES[role].items():
        first, *beside = format_.planes
        assert first.dtype.is_floating_point or any(plane.suffix for plane in beside), (
            f"{name} keeps integers and nothing else, as a state of the user's own may: give it a "
            "second plane with a suffix, by which state dicts tell codes"
        )


def test_formats_with_the_same_planes_decode_alike():
    for one, other in itertools.combinations(FORMATS.values(), 2):
        ours, theirs = ([(p.suffix, p.dtype) for p in each.planes] for each in (one, other))
        assert ours != theirs or one.decode is other.decode, (
            f"{one.name} and {other.name} decode planes of the same names and dtypes, by which "
            "state dicts tell formats, in two ways: rename a plane or change its dtype"
        )
