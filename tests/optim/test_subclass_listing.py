"""Programs that look optimizers up by name find one class of each name: torch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from forked_scripts import call_in_fork

import torch_bf16
from torch_bf16 import torch_patches
from torch_bf16.foreign.convertible import CONVERTIBLE
from torch_bf16.optim import subclass_listing


class Own(torch.optim.SGD):
    """An optimizer without a kernel."""


class Derived(torch_bf16.AdamW):
    """A user's subclass of ours."""


def walk(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from walk(each)


def listed() -> set[type]:
    """Those of torch, of this package and of this file: other tests and hosts have theirs."""
    ours = ("torch", "torch_bf16", __name__)
    found = {*walk(torch.optim.Optimizer)}
    return {each for each in found if each.__module__.partition(".")[0] in ours}


def names() -> Counter:
    return Counter(each.__name__ for each in listed())


@pytest.fixture(autouse=True)
def applied():
    """As after an import; another test of this process may have undone the patch."""
    subclass_listing.leave_out_namesakes()
    yield
    subclass_listing.leave_out_namesakes()


@pytest.fixture
def restored(applied):
    torch_patches.restore()


@pytest.mark.parametrize("name", sorted(each.__name__ for each in CONVERTIBLE.values()))
def test_a_name_that_torch_has_means_the_class_of_torch(name):
    found = [each for each in listed() if each.__name__ == name]
    assert [each.__module__.partition(".")[0] for each in found] == ["torch"]
    assert issubclass(getattr(torch_bf16, name), found[0])


def test_without_the_patch_a_name_means_two_classes(restored):
    assert names()["AdamW"] == 2


def test_what_torch_does_not_have_and_subclasses_of_users_are_listed():
    assert {torch_bf16.ADOPT, torch_bf16.Lion, torch_bf16.BF16Optimizer, Derived} <= listed()


def test_a_converted_class_is_not_listed_beside_the_one_that_it_was():
    optimizer = Own(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    torch_bf16.convert(optimizer)
    assert type(optimizer) is not Own
    assert names()["Own"] == 1


def test_an_unknown_patch_in_the_variable_does_not_fail_an_import(restored, monkeypatch):
    monkeypatch.setenv("TORCH_BF16_DISABLE_PATCHES", "nothing")
    subclass_listing.leave_out_namesakes()
    assert names()["AdamW"] == 2


@pytest.mark.parametrize(
    ("given", "meant"),
    [("AdamW", "torch.optim.AdamW"), ("torch_bf16.AdamW", "torch_bf16.AdamW")],
)
def test_a_command_line_takes_a_name_for_torchs_class_and_a_dotted_name_for_ours(
    given, meant, tmp_path
):
    pytest.importorskip("jsonargparse")  # what LightningCLI parses with
    # In a process without the optimizers that other tests have made up.
    call_in_fork(parse, given, meant, folder=tmp_path)


def parse(given, meant):
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(torch.optim.Optimizer, "optimizer", skip={"params"})
    found = parser.parse_args([f"--optimizer={given}", "--optimizer.lr=0.1"])
    assert found.optimizer.class_path == meant
