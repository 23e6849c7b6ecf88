"""What is replaced in torch for the whole process is listed, and can be turned off and undone."""

import re
import threading
from pathlib import Path

import pytest
import torch
from averaged_network import LitEma
from torch import nn
from torch.distributed.algorithms.model_averaging import utils
from torch.distributed.checkpoint import state_dict
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bf16
from torch_bf16 import torch_patches
from torch_bf16.model import autocast
from torch_bf16.torch_patches import PATCHES, SWITCH, Kernels, Replacement

ROOT = Path(__file__).parents[2]
torch_patches.restore()
SAVE = torch.optim.Optimizer.state_dict  # which torch itself has wrapped
SUMS = "fp32" if hasattr(torch.Tensor, "grad_dtype") else "bf16_nearest"
# torch before 2.10 has no fp32 sums.
LISTED = set(PATCHES) - ({"optimizer_init"} if SUMS != "fp32" else set())


@pytest.fixture(autouse=True)
def unpatched():
    torch_patches.restore()
    yield
    torch_patches.restore()
    autocast.fill_gaps()


def train() -> None:
    """All that applies a patch."""
    assert LitEma  # a class of its kind exists
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    recipe = torch_bf16.get_recipe("bf16-fp32-master", backend="eager", accumulate=SUMS)
    torch_bf16.prepare(model, optimizer, recipe)
    with torch_bf16.arithmetic("cpu", "fp32"):
        model(torch.arange(8)).sum().backward()
    optimizer.step()
    optimizer.state_dict()


def applied() -> set[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name
        for name, is_applied in {
            "optimizer_subclasses": "__subclasses__" in vars(torch.optim.Optimizer),
            "optimizer_state_dict": SAVE is not torch.optim.Optimizer.state_dict,
            "average_parameters": hasattr(utils.average_parameters, "__wrapped__"),
            "broadcast_states": hasattr(state_dict._broadcast_state_dict, "__wrapped__"),
            "optimizer_init": hasattr(state_dict._init_optim_state, "__wrapped__"),
            "autocast_kernels": has_kernel("aten::linalg_matrix_exp", "AutocastCPU"),
            "autocast_to_fp32": has_kernel("aten::embedding", "AutocastCPU"),
            "dispatch_mode_enter": hasattr(TorchDispatchMode.__enter__, "__wrapped__"),
            "autocast_init": hasattr(torch.autocast.__init__, "__wrapped__"),
            "autocast_exit": hasattr(torch.autocast.__exit__, "__wrapped__"),
            "averaged_model": hasattr(AveragedModel.update_parameters, "__wrapped__"),
            "foreach_lerp": hasattr(torch._foreach_lerp_, "__wrapped__"),
            "tensor_lerp": hasattr(torch.Tensor.lerp_, "__wrapped__"),
            "lit_ema": hasattr(LitEma.forward, "__wrapped__"),
            "load_from_state_dict": hasattr(nn.Module._load_from_state_dict, "__wrapped__"),
            "parameter_deepcopy": hasattr(nn.Parameter.__deepcopy__, "__wrapped__"),
            "parameter_data": "data" in vars(nn.Parameter),
        }.items()
        if is_applied
    }


def test_training_applies_each_listed_patch_and_restore_undoes_all():
    assert applied() == set()
    train()
    assert applied() == LISTED
    torch_patches.restore()
    assert applied() == set()


@pytest.mark.parametrize("value", ["all", "autocast_exit", "parameter_data, autocast_init"])
def test_what_the_variable_names_is_not_applied(monkeypatch, value):
    monkeypatch.setenv(SWITCH, value)
    train()
    named = {part.strip() for part in value.split(",")}
    assert applied() == (set() if value == "all" else LISTED - named)


def test_a_patch_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv(SWITCH, "autocast")
    with pytest.raises(ValueError, match=r"'autocast': autocast is no patch .* autocast_kernels"):
        torch_bf16.cast_model(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:.* written through p.data:UserWarning")
def test_without_the_patch_a_write_through_data_keeps_the_remainder(monkeypatch):
    """What the table says of parameter_data is true."""

    def written() -> torch.Tensor:
        weight = nn.Parameter(torch.full((64, 64), 1.003))
        model = nn.ParameterDict({"weight": weight})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        torch_bf16.prepare(
            model, optimizer, torch_bf16.get_recipe("bf16-fp32-master", backend="eager")
        )
        for _ in range(2):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
            weight.data.fill_(2)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        return optimizer.exact_weight(weight)

    assert (written() == 2).all()
    torch_patches.restore()
    monkeypatch.setenv(SWITCH, "parameter_data")
    assert (written() != 2).all()


REPLACED = {
    "autocast.__init__": torch.autocast,
    "autocast.__exit__": torch.autocast,
    "TorchDispatchMode.__enter__": TorchDispatchMode,
    "AveragedModel.update_parameters": AveragedModel,
    "torch._foreach_lerp_": torch,
    "Tensor.lerp_": torch.Tensor,
    "Module._load_from_state_dict": nn.Module,
    "Parameter.__deepcopy__": nn.Parameter,
    "Parameter.copy_": nn.Parameter,
    "utils.average_parameters": utils,
    "Optimizer.state_dict": torch.optim.Optimizer,
    "Optimizer.load_state_dict": torch.optim.Optimizer,
}


def named(place: str) -> str:
    return place.rpartition(".")[2]


@pytest.fixture
def wrap():
    """Replaces what is in a place as another library does, by a function that calls it."""
    absent = object()
    stock = {place: vars(owner).get(named(place), absent) for place, owner in REPLACED.items()}

    def wrap(place):
        owner, name = REPLACED[place], named(place)
        below = getattr(owner, name)

        def theirs(*args, **kwargs):
            theirs.calls += 1
            return below(*args, **kwargs)

        theirs.calls = 0
        setattr(owner, name, theirs)
        return theirs

    yield wrap
    torch_patches.restore()
    for place, before in stock.items():
        if before is not absent:
            setattr(REPLACED[place], named(place), before)
        elif named(place) in vars(REPLACED[place]):
            delattr(REPLACED[place], named(place))


def exact_master_of(source: nn.Linear) -> torch.Tensor:
    """The master of a bf16 weight that has loaded fp32 ones."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    recipe = torch_bf16.get_recipe("bf16-fp32-master", backend="eager")
    torch_bf16.prepare(model, optimizer, recipe)
    model.load_state_dict(source.state_dict())
    return optimizer.exact_weight(model.weight)


def follows(move) -> bool:
    """Whether an fp32 average of a cast model follows its weights."""
    model = nn.Linear(8, 8)
    average = AveragedModel(model, multi_avg_fn=lambda mine, theirs, _: move(mine, theirs))
    torch_bf16.cast_model(model)
    before = average.module.weight.clone()
    for _ in range(2):  # the first one copies
        average.update_parameters(model)
        torch.nn.init.ones_(model.weight)
    return not torch.equal(average.module.weight, before)


@torch.no_grad()
def move_one_by_one(mine, theirs):
    for average, weight in zip(mine, theirs, strict=True):
        average.lerp_(weight.bfloat16(), 0.5)


def test_what_another_library_has_wrapped_before_the_cast_is_called_by_ours(wrap):
    theirs = {place: wrap(place) for place in REPLACED}
    source = nn.Linear(8, 8)
    assert torch.equal(exact_master_of(source), source.weight)
    assert follows(move_one_by_one)
    assert follows(lambda mine, theirs: torch._foreach_lerp_(mine, theirs, 0.5))
    for place in ("AveragedModel.update", "torch._foreach", "Tensor.lerp_", "Module._load"):
        assert [each.calls for name, each in theirs.items() if name.startswith(place)] != [0]


@pytest.mark.parametrize("place", REPLACED)
def test_what_another_library_has_put_on_top_of_ours_stays(place, wrap):
    train()
    theirs = wrap(place)
    torch_patches.restore()
    assert getattr(REPLACED[place], named(place)) is theirs


def test_below_what_another_library_has_put_on_top_ours_does_nothing_once_undone(wrap):
    source = nn.Linear(8, 8)
    assert torch.equal(exact_master_of(source), source.weight)
    theirs = wrap("Module._load_from_state_dict")
    torch_patches.restore()
    model = torch_bf16.cast_model(nn.Linear(8, 8), "bf16-fp32-master")
    torch_patches.restore()
    optimizer = torch_bf16.AdamW(model.parameters(), recipe="bf16-fp32-master")
    model.load_state_dict(source.state_dict())
    assert torch.equal(optimizer.exact_weight(model.weight), source.weight.bfloat16().float())
    assert theirs.calls == 1


class Counts:
    def count(self, number):
        return number


@pytest.fixture
def counting():
    def adding(original):
        return lambda self, number: original(self, number + 1)

    made = Replacement("autocast_exit", Counts, "count", adding)
    before = Counts.count
    yield made
    made.undo()
    Counts.count = before


def test_ours_acts_once_whatever_is_put_on_top_of_it_or_back(counting):
    stock = Counts.count
    for _ in range(3):
        counting.apply()
        assert Counts().count(0) == 1
        ours = Counts.count
        Counts.count = lambda self, number, below=ours: below(self, number)
        counting.apply()
        assert Counts().count(0) == 1
        Counts.count = stock  # as a library does that has kept what was there
        assert Counts().count(0) == 0


def test_ours_acts_again_when_what_lay_on_top_while_it_was_applied_is_gone(counting):
    """As after a context that replaces a function and in which a second model is cast."""
    stock = Counts.count
    counting.apply()
    ours = Counts.count
    for _ in range(3):
        Counts.count = lambda self, number: ours(self, number)
        counting.apply()
        assert Counts().count(0) == 1
        Counts.count = ours
        assert Counts().count(0) == 1
        counting.apply()
        assert Counts.count is ours
    counting.undo()
    assert Counts.count is stock


@pytest.mark.parametrize("kind", [Replacement, Kernels])
def test_a_second_thread_waits_until_the_first_has_applied_it(kind):
    begun, go_on, made = threading.Event(), threading.Event(), []

    def make(given):
        made.append(given)
        begun.set()
        assert go_on.wait(20)
        return given

    where = (Counts, "count") if kind is Replacement else ()
    patch = kind("autocast_exit", *where, make)
    first, second = (threading.Thread(target=patch.apply) for _ in range(2))
    first.start()
    assert begun.wait(20)
    second.start()
    second.join(0.2)
    waits = second.is_alive()
    go_on.set()
    first.join()
    second.join()
    patch.undo()
    assert waits
    assert len(made) == 1


def test_kernels_whose_registration_was_interrupted_are_registered_by_the_next_apply():
    calls = []

    def register(library):
        calls.append(library)
        if len(calls) == 1:
            raise KeyboardInterrupt

    kernels = Kernels("autocast_kernels", register)
    with pytest.raises(KeyboardInterrupt):
        kernels.apply()
    kernels.apply()
    kernels.undo()
    assert len(calls) == 2


def test_lerps_take_the_weights_by_all_of_torchs_names():
    train()
    for name, weight in (("weight", 0.5), ("weights", [torch.full((2,), 0.5)])):
        average = [torch.zeros(2)]
        torch._foreach_lerp_(average, [torch.ones(2)], **{name: weight})
        assert average[0].tolist() == [0.5, 0.5]


def test_an_attribute_that_a_class_inherits_is_inherited_again():
    train()
    torch_patches.restore()
    assert "lerp_" not in vars(torch.Tensor)
    assert "data" not in vars(nn.Parameter)


def test_each_patch_has_a_row_in_the_documentation():
    page = (ROOT / "docs" / "versions.md").read_text()
    for name in PATCHES:
        assert re.search(rf"^\| `{name}` \|", page, re.M)
