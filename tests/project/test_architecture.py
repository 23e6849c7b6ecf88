"""Imports point one way, files stay small, and nothing leaks into users' namespaces."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "kernels" / "torch_bf16"
PLUGINS = ("lightning_bf16", "accelerate_bf16")

# Each row may import the rows above it. Names within one row do not know each other, but a package
# is one name: its files may import one another. There are at most twelve rows.
LAYERS = (
    ("errors", "living", "locks", "memory", "numerics", "parameters", "rules"),
    ("sharding", "formats", "argument_checks", "torch_patches"),
    ("recipe", "backends"),
    ("engine", "environment"),
    ("model",),
    ("states",),
    ("gradients",),
    ("optim",),
    ("foreign",),
    ("prepare", "checkpoints"),
    ("tools",),
    ("__init__", "__main__", "plugin_api"),
)

# Third-party packages, and the only places that may import them.
ROOMS = {
    "numba": ("torch_bf16/backends/cpu",),
    "llvmlite": ("torch_bf16/backends/cpu",),
    "triton": ("torch_bf16/backends/triton",),
    "lightning": ("lightning_bf16",),
    "pytorch_lightning": ("lightning_bf16",),
    "lightning_fabric": ("lightning_bf16",),
    "lightning_utilities": ("lightning_bf16",),
    "torchmetrics": (),
    "accelerate": ("accelerate_bf16",),
    "transformers": ("accelerate_bf16", "torch_bf16/tools/estimate/sources"),
    "trl": ("accelerate_bf16",),
    "safetensors": ("torch_bf16/checkpoints/export",),
    "peft": (),
    "matplotlib": ("torch_bf16/tools/bench/plot", "torch_bf16/tools/compare/figure"),
    "rich": ("torch_bf16/tools/output",),
    "tensorboard": ("torch_bf16/tools/compare/logs",),
}

MAX_LINES = 400
MAX_DEPTH = 3
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc", "helper", "util"}


def import_path(file: Path) -> str:
    """The path below the import root: torch_bf16/optim/adamw.py."""
    base = ROOT / "kernels" if ROOT / "kernels" in file.parents else ROOT
    return file.relative_to(base).as_posix()


def imported_modules(file: Path) -> set[str]:
    """Absolute dotted names of all that a file imports, inside functions too."""
    package = list(Path(import_path(file)).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def layer_of(name: str) -> int:
    return next(i for i, row in enumerate(LAYERS) if name in row)


def core_part(dotted: str) -> str | None:
    """The part of the core that a dotted name lies in: __init__ for public names, else None."""
    head, *rest = dotted.split(".")
    if head != "torch_bf16":
        return None
    known = {name for row in LAYERS for name in row}
    return rest[0] if rest and rest[0] in known else "__init__"


CORE_FILES = sorted(CORE.rglob("*.py"))
PLUGIN_FILES = sorted(f for plugin in PLUGINS for f in (ROOT / plugin).rglob("*.py"))
PACKAGE_FILES = [*CORE_FILES, *PLUGIN_FILES]
ALL_FILES = [
    *PACKAGE_FILES,
    ROOT / "kernels" / "bf16_autoload.py",
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
]


def by_path(files: list[Path]) -> dict:
    return {"argvalues": files, "ids": [f.relative_to(ROOT).as_posix() for f in files]}


def test_the_tree_is_found() -> None:
    assert len(CORE_FILES) > 10
    assert {import_path(f).split("/")[0] for f in PLUGIN_FILES} == set(PLUGINS)


@pytest.mark.parametrize("file", **by_path(CORE_FILES))
def test_core_imports_only_layers_above(file: Path) -> None:
    part = Path(import_path(file)).with_suffix("").parts[1]
    known = {name for row in LAYERS for name in row}
    assert part in known, f"{part} has no place in LAYERS yet"
    for module in imported_modules(file):
        other = core_part(module)
        if other is None or other == part:
            continue
        assert layer_of(other) < layer_of(part), f"{part} imports {module}, which lies below it"


@pytest.mark.parametrize("file", **by_path([f for f in CORE_FILES if f.parent.name == "rules"]))
def test_rules_import_nothing_outside_their_folder(file: Path) -> None:
    for module in imported_modules(file):
        inside = module.startswith("torch_bf16.rules")
        assert inside or module.split(".")[0] in sys.stdlib_module_names, module


@pytest.mark.parametrize("file", **by_path(PACKAGE_FILES))
def test_optional_packages_stay_in_their_rooms(file: Path) -> None:
    path = import_path(file)
    for module in imported_modules(file):
        rooms = ROOMS.get(module.split(".")[0])
        if rooms is not None:
            assert path.startswith(rooms), f"{path} imports {module}"


@pytest.mark.parametrize("file", **by_path(PACKAGE_FILES))
def test_locks_are_free_in_forked_children(file: Path) -> None:
    made = {"threading.Lock", "threading.RLock"} & {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    }
    # Those of cpu/threads.py live for one call of a kernel.
    allowed = import_path(file) in ("torch_bf16/locks.py", "torch_bf16/backends/cpu/threads.py")
    assert bool(made) == allowed, "a lock that outlives a call is a fork_safe_lock()"


@pytest.mark.parametrize("file", **by_path(PLUGIN_FILES))
def test_plugins_use_only_public_names_of_the_core(file: Path) -> None:
    plugin = import_path(file).split("/")[0]
    other = next(p for p in PLUGINS if p != plugin)
    public = {f"torch_bf16.{name}" for name in (*public_names("__init__"), "plugin_api")}
    public |= {f"torch_bf16.plugin_api.{name}" for name in public_names("plugin_api")}
    for module in imported_modules(file):
        assert module.split(".")[0] != other, f"{plugin} imports {other}"
        if module.startswith("torch_bf16."):
            assert module in public, f"{module} is no public name of the core"


def public_names(module: str) -> set[str]:
    tree = ast.parse((CORE / f"{module}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"torch_bf16/{module}.py has no literal __all__")


def test_each_public_name_is_for_programs_or_for_plugins() -> None:
    assert public_names("__init__").isdisjoint(public_names("plugin_api"))


def test_the_readme_of_the_kernels_lists_each_room_below_what_it_imports() -> None:
    text = (ROOT / "kernels" / "README.md").read_text()
    _, _, table = text.partition("| room | what it answers |")
    rows = [line.split("|")[1] for line in table.split("\n\n")[0].splitlines() if "`" in line]
    rooms = [name for row in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", row)]
    assert [*map(layer_of, rooms)] == sorted(map(layer_of, rooms))
    listed = {name for row in LAYERS for name in row if not name.startswith("__")}
    assert sorted(rooms) == sorted(listed)


def test_autoload_imports_the_standard_library_only_at_import() -> None:
    tree = ast.parse((ROOT / "kernels" / "bf16_autoload.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            assert {str(n).split(".")[0] for n in names} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("file", **by_path(ALL_FILES))
def test_a_file_is_named_after_a_subject_and_stays_within_its_size(file: Path) -> None:
    path = Path(import_path(file)).with_suffix("")
    assert FORBIDDEN_NAMES.isdisjoint(path.parts)
    assert len(path.parts) - 2 <= MAX_DEPTH
    lines = len(file.read_text().splitlines())
    if lines > MAX_LINES:
        pytest.fail(f"{path}.py has {lines} lines, at most {MAX_LINES}: split it", pytrace=False)


def test_kernels_and_tests_are_folders_and_no_packages() -> None:
    """As packages they would shadow the hosts that their folders are named after, and `kernels`."""
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("package", ["kernels/torch_bf16", *PLUGINS])
def test_packages_carry_type_information(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_the_installed_version_is_the_projects() -> None:
    from importlib.metadata import version

    import torch_bf16

    assert version("torch-bf16") == torch_bf16.__version__


def test_the_installed_autoload_module_is_the_one_in_the_tree() -> None:
    # An editable install copies this one module; a stale copy would be what the tests see.
    import bf16_autoload

    source = ROOT / "kernels" / "bf16_autoload.py"
    assert Path(bf16_autoload.__file__).read_text() == source.read_text(), (
        "run `make install` again: bf16_autoload.py has changed since it was installed"
    )


@pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="asks git, in a checkout"
)
def test_no_file_of_the_project_is_ignored() -> None:
    """Builds leave out what .gitignore names, also where git has it."""
    command = ["git", "-C", str(ROOT), "ls-files", "-ci", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
