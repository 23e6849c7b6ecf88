"""What is replaced in Accelerate and transformers, and that all of it can be put back."""

from __future__ import annotations

import copy
import gc
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest
import torch

from accelerate_bf16 import _patches
from accelerate_bf16._patches.enums import add_member
from bf16_autoload import TARGETS, Patches


class Base:
    def inherited(self):
        return "base"


class Host(Base):
    def own(self):
        return "host"


def louder(original):
    return lambda self: original(self).upper()


HERE = sys.modules[__name__]


def test_methods_are_replaced_once_and_put_back():
    patches, before = Patches(), dict(vars(Host))
    for _ in range(2):
        patches.replace(HERE, "Host.own", louder)
        patches.replace(HERE, "Host.inherited", louder)
    assert (Host().own(), Host().inherited(), Base().inherited()) == ("HOST", "BASE", "base")
    assert Host.own.__name__ == "own"
    patches.undo()
    assert dict(vars(Host)) == before
    patches.replace(HERE, "Host.own", louder)
    assert Host().own() == "HOST"
    patches.undo()


def test_what_another_library_has_put_on_top_stays(monkeypatch):
    patches = Patches()
    patches.replace(HERE, "Host.own", louder)
    ours = Host.own
    monkeypatch.setattr(Host, "own", louder)
    patches.undo()
    assert Host.own is louder
    monkeypatch.undo()
    assert Host.own is ours
    Host.own = ours.__wrapped__


def test_a_function_is_replaced_wherever_it_was_imported(monkeypatch):
    def function():
        return 1

    before, after = ModuleType("before"), ModuleType("after")
    before.function = before.kept = function
    for module in (before, after):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patches = Patches()
    patches.replace(before, "function", lambda original: lambda: original() + 1)
    after.function = before.function
    patches.replace(before, "function", lambda original: lambda: original() + 1)
    assert (before.function(), after.function()) == (2, 2)
    patches.undo()
    assert before.function is after.function is function


def test_members_are_added_to_any_string_enum_once_and_taken_out_again():
    class Colour(str, Enum):
        RED = "red"

    def contents():
        maps = (Colour._member_map_, Colour._value2member_map_, vars(Colour))
        return list(Colour), *map(dict, maps)

    before, patches = contents(), Patches()
    blue = add_member(patches, Colour, "blue", Colour.RED)
    assert add_member(patches, Colour, "blue") is blue is Colour("blue") is Colour.BLUE
    assert [each.value for each in Colour] == ["red", "blue"]
    unpickle, parts = blue.__reduce_ex__(2)
    assert copy.deepcopy(blue) is copy.copy(blue) is unpickle(*parts) is blue
    patches.undo()
    assert contents() == before
    assert unpickle(*parts) is Colour.RED
    with pytest.raises(ValueError, match="'blue' is not a valid"):
        Colour("blue")


def test_a_temporary_value_goes_when_the_block_raises():
    class State:
        mode = "bf16"

        def fail(self):
            raise OSError(self.mode)

    state = State()
    with pytest.raises(OSError, match="no"), Patches() as patches:  # noqa: PT012
        patches.set(state, "mode", "no")
        state.fail()
    assert state.mode == "bf16"
    assert not vars(state)


def test_handles_of_hooks_go_with_what_they_are_for():
    class Handle:
        removed = 0

        def remove(self):
            Handle.removed += 1

    patches, living = Patches(), Host()
    for owner in (living, living, Host()):
        patches.keep(Handle(), owner)
    del owner
    patches.undo()
    patches.undo()
    assert Handle.removed == 1


def test_preparing_adds_nothing_that_outlives_the_model(make_accelerator, mode):
    def sizes():
        gc.collect()
        return len(_patches.patches._undo), len(_patches.patches._handles)

    accelerator, before = make_accelerator(mode), sizes()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert sizes() == (before[0], before[1] + 1)
    accelerator.free_memory()
    del model
    assert sizes() == before


STOCK = """
import sys, types
import accelerate, accelerate.commands.accelerate_cli, accelerate.commands.config.sagemaker
import transformers.trainer, transformers.training_args
import peft.tuners.tuners_utils
import torch

hosts = ("accelerate", "transf", "peft")

def stock():
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(("accelerate.", "transformers.train", "peft.tuners.tuners_")):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = id(value)
            if isinstance(value, type) and value.__module__.startswith(hosts):
                for attribute, own in list(vars(value).items()):
                    found[name, key, attribute] = id(own)
                    if isinstance(own, (list, dict)):
                        found[name, key, attribute, "contents"] = str(own)
            elif key == "_OPTIMIZER_HANDLERS":
                found[name, key, "contents"] = sorted(value)
    return found

def differing(before, after):
    keys = sorted({str(k) for k in before.keys() ^ after.keys()})
    return keys + [str(k) for k in before.keys() & after.keys() if before[k] != after[k]]

def modules():
    return {name for name in sys.modules if name.startswith(("accelerate.", "transformers."))}

before = stock()
import accelerate_bf16
patched = differing(before, stock())
accelerator = accelerate.Accelerator(mixed_precision="bf16-stochastic", cpu=True)
accelerator.prepare(torch.nn.Linear(2, 2))
from torch_bf16.model.unconverted import _watched
watched = len(_watched)
known = {key[0] for key in before}
accelerate_bf16.unregister()
left = differing(before, {k: v for k, v in stock().items() if k[0] in known})
print(len(patched) > 20, left, watched, len(_watched))
accelerate_bf16.register()
again = differing(before, {k: v for k, v in stock().items() if k[0] in known})
print(sorted(patched) == sorted(again))
accelerate_bf16.unregister()
import importlib
for name in ("accelerate.launchers", "transformers.trainer_utils"):
    importlib.reload(sys.modules[name])
print(hasattr(accelerate.launchers.notebook_launcher, "_replaced_by"))
"""


def test_after_unregister_every_class_is_as_stock_and_register_brings_all_back(
    tmp_path, run_unhooked
):
    # _shared_state is what Accelerate itself keeps of the run.
    script = STOCK.replace("str(own)", "str(own) if attribute != '_shared_state' else ''")
    done = run_unhooked(script, folder=tmp_path, BF16_AUTOLOAD="0")
    assert done.stdout == "True [] 1 0\nTrue\nFalse\n", done.stdout + done.stderr


LIVING = """
import accelerate, torch
import accelerate_bf16

def prepared(accelerator):
    model = torch.nn.Linear(2, 2)
    try:
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    except RuntimeError as error:
        return str(error)[:63], model.weight.dtype
    return str(accelerator.mixed_precision), model.weight.dtype

accelerator = accelerate.Accelerator(mixed_precision="bf16-stochastic", cpu=True)
accelerate_bf16.unregister()
print(*prepared(accelerator))
stock = accelerate.Accelerator()
print(*prepared(stock))
accelerate_bf16.register()
print(*prepared(accelerator))
print(*prepared(stock))
print(*prepared(accelerate.Accelerator()))
accelerate_bf16.unregister()
accelerate.state.AcceleratorState._reset_state()
stock = accelerate.Accelerator()
accelerate_bf16.register()
print(*prepared(accelerate.Accelerator()))
"""


def test_an_accelerator_does_not_train_in_fp32_once_its_mode_was_unregistered(
    tmp_path, run_unhooked
):
    done = run_unhooked(LIVING, folder=tmp_path)
    assert done.stdout.splitlines() == [
        "this Accelerator was made for mixed_precision='bf16-stochastic' torch.float32",
        "no torch.float32",
        "bf16-stochastic torch.bfloat16",
        "no torch.float32",
        "bf16-stochastic torch.bfloat16",
        "no torch.float32",
    ], done.stdout + done.stderr


def test_every_replacement_stands_in_the_readme_and_is_waited_for():
    listed = (Path(_patches.__file__).parent / "README.md").read_text()
    for paths in _patches.REPLACED.values():
        for path in paths:
            assert f"`{path}`" in listed
    targets = {name for name, plugin in TARGETS.items() if plugin == _patches.__name__}
    assert targets == _patches.REPLACED.keys() | _patches.ADDED.keys()
