"""What replaces a host's function takes the host's arguments by the host's names."""

import importlib
import inspect
import pkgutil
from operator import attrgetter

import pytest

import accelerate_bf16._patches
import bf16_autoload
import lightning_bf16._patches

REPLACED = [
    *(
        (module, path)
        for module, paths in accelerate_bf16._patches.REPLACED.items()
        for path in paths
    ),
    *(
        (module, path)
        for module in bf16_autoload.TARGETS
        if module.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")
        for path in lightning_bf16._patches.REPLACED[module.rpartition(".")[2]]
    ),
]
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@pytest.mark.parametrize(("module", "path"), REPLACED)
def test_a_program_may_name_the_arguments(module, path):
    found = importlib.import_module(module)
    try:
        replacement = attrgetter(path)(found)
    except AttributeError:
        pytest.skip("this version of the host lacks it")
    original = replacement.__wrapped__
    lightnings = lightning_bf16._patches.REPLACED.get(module.rpartition(".")[2], {})
    if isinstance(name := lightnings.get(path), str):  # what stands there imports it when used
        maker = pkgutil.resolve_name(f"lightning_bf16._patches.{name}")
        replacement = maker(original)
    ours = inspect.signature(replacement, follow_wrapped=False).parameters
    theirs = inspect.signature(original).parameters
    named = [each.name for each in ours.values() if each.kind in BY_NAME]
    # The first one is the object whose method it is.
    assert {*named[1:]} <= theirs.keys()
    if not any(each.kind == inspect.Parameter.VAR_KEYWORD for each in ours.values()):
        assert {*list(theirs)[1:]} <= {*named}
