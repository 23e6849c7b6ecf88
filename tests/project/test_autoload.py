"""The zero-import hook, on host modules made for the purpose."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
import warnings
import zipfile
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest

import bf16_autoload


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """A package ``some_host`` with a module, a plugin that notes its calls, and a clean finder."""
    package = tmp_path / "some_host"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modes.py").write_text("MODES = ['fp32']\n\ndef known():\n    return MODES\n")
    (package / "user.py").write_text("from some_host.modes import MODES\nSEEN = list(MODES)\n")
    late = "import bf16_autoload\nbf16_autoload.autoload()\nMODES = ['fp32']\n"
    (package / "late.py").write_text(late)
    (package / "late_and_broken.py").write_text(late + "raise OSError('of the host itself')\n")
    (package / "broken.py").write_text("raise OSError('of the host itself')\n")
    plugin = types.ModuleType("some_plugin")
    plugin.calls = []
    plugin.on_import = lambda module: (
        plugin.calls.append(module.__name__),
        module.MODES.append("bf16"),
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "some_plugin", plugin)
    names = ("modes", "broken", "late", "late_and_broken")
    targets = {f"some_host.{name}": "some_plugin" for name in names}
    monkeypatch.setattr(bf16_autoload, "TARGETS", targets)
    monkeypatch.setattr(bf16_autoload, "_warned", set())
    others = [f for f in sys.meta_path if not isinstance(f, bf16_autoload._Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    yield plugin
    for name in [n for n in sys.modules if n.split(".")[0] == "some_host"]:
        del sys.modules[name]


def test_the_plugin_sees_the_module_before_anybody_else(hosts):
    bf16_autoload.autoload()
    assert importlib.import_module("some_host.user").SEEN == ["fp32", "bf16"]
    assert hosts.calls == ["some_host.modes"]


def test_loader_source_and_reload_stay_normal(hosts):
    bf16_autoload.autoload()
    module = importlib.import_module("some_host.modes")
    assert "exec_module" not in vars(module.__spec__.loader)
    assert inspect.getsource(module.known) == "def known():\n    return MODES\n"
    assert importlib.reload(module).MODES == ["fp32", "bf16"]
    assert hosts.calls == ["some_host.modes"] * 2


def test_modules_of_a_zip_file_share_a_loader(hosts, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "hosts.zip", "w") as file:
        for source in (tmp_path / "some_host").iterdir():
            file.write(source, f"some_host/{source.name}")
            source.unlink()
    (tmp_path / "some_host").rmdir()
    monkeypatch.syspath_prepend(str(tmp_path / "hosts.zip"))
    bf16_autoload.autoload()
    importlib.util.find_spec("some_host.modes")
    assert importlib.import_module("some_host.user").SEEN == ["fp32", "bf16"]
    assert hosts.calls == ["some_host.modes"]
    assert "exec_module" not in vars(sys.modules["some_host.modes"].__spec__.loader)


def test_a_module_that_is_imported_already_is_patched_at_once(hosts):
    module = importlib.import_module("some_host.modes")
    assert module.MODES == ["fp32"]
    bf16_autoload.watch("some_plugin")
    assert module.MODES == ["fp32", "bf16"]


def test_a_module_that_imports_torch_itself_is_patched_when_it_is_done(hosts):
    module = importlib.import_module("some_host.late")
    assert module.MODES == ["fp32", "bf16"]
    assert type(module.__spec__) is ModuleSpec
    assert importlib.reload(module).MODES == ["fp32", "bf16"]


def test_a_module_that_fails_after_importing_torch_is_left_alone(hosts):
    with pytest.raises(OSError, match="of the host itself"):
        importlib.import_module("some_host.late_and_broken")
    assert hosts.calls == []
    assert not bf16_autoload._warned


def test_only_the_targets_of_the_named_plugin_are_watched(hosts):
    bf16_autoload.watch("another_plugin")
    assert importlib.import_module("some_host.modes").MODES == ["fp32"]


def test_watching_twice_makes_one_finder(hosts):
    bf16_autoload.watch()
    bf16_autoload.watch("some_plugin")
    assert sum(isinstance(f, bf16_autoload._Finder) for f in sys.meta_path) == 1


@pytest.mark.parametrize("value", ["0", "false", "OFF"])
def test_the_variable_turns_it_off(hosts, monkeypatch, value):
    monkeypatch.setenv("BF16_AUTOLOAD", value)
    bf16_autoload.autoload()
    assert importlib.import_module("some_host.modes").MODES == ["fp32"]


def test_a_plugin_that_raises_warns_once_and_the_host_imports(hosts):
    hosts.on_import = lambda module: 1 / 0
    bf16_autoload.autoload()
    with pytest.warns(RuntimeWarning, match="some_plugin could not add .* ZeroDivisionError"):
        module = importlib.import_module("some_host.modes")
    importlib.reload(module)  # a second warning would be an error
    assert module.MODES == ["fp32"]


def test_a_stand_in_without_a_name_is_named_in_a_warning(hosts, monkeypatch):
    """Some programs put a mock in place of a module that they do not need."""
    module = importlib.import_module("some_host.modes")
    monkeypatch.setitem(sys.modules, "some_host.broken", MagicMock(__spec__=None))
    with pytest.warns(RuntimeWarning, match=r"modes to some_host: .*__name__"):
        bf16_autoload.autoload()
    assert module.MODES == ["fp32", "bf16"]


def test_a_missing_plugin_warns_and_the_host_imports(hosts, monkeypatch):
    monkeypatch.setitem(sys.modules, "some_plugin", None)
    bf16_autoload.autoload()
    with pytest.warns(RuntimeWarning, match=r"ModuleNotFoundError.*BF16_AUTOLOAD=0"):
        assert importlib.import_module("some_host.modes").MODES == ["fp32"]


def test_where_warnings_are_errors_the_host_still_imports(hosts, capsys):
    hosts.on_import = lambda module: 1 / 0
    bf16_autoload.autoload()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("some_host.modes")
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_explicit_registration_raises_what_the_plugin_raises(hosts):
    importlib.import_module("some_host.modes")
    hosts.on_import = lambda module: 1 / 0
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        bf16_autoload.watch("some_plugin")


def test_an_error_of_the_host_itself_comes_through(hosts):
    bf16_autoload.autoload()
    with pytest.raises(OSError, match="of the host itself"):
        importlib.import_module("some_host.broken")
    assert hosts.calls == []


def test_a_loader_that_takes_no_attributes_is_left_alone_with_a_warning(hosts, monkeypatch):
    class Loader:
        __slots__ = ()

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            module.MODES = ["fp32"]

    class Finder:
        def find_spec(self, name, path=None, target=None):
            return ModuleSpec(name, Loader()) if name == "some_host.modes" else None

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    bf16_autoload.autoload()
    with pytest.warns(RuntimeWarning, match="cannot follow the import of some_host.modes"):
        assert importlib.import_module("some_host.modes").MODES == ["fp32"]


def test_autoload_itself_never_raises(hosts, monkeypatch):
    def broken(plugin=None):
        raise RuntimeError("inside watch")

    monkeypatch.setattr(bf16_autoload, "watch", broken)
    with pytest.warns(RuntimeWarning, match="could not register itself: .*inside watch"):
        bf16_autoload.autoload()


def test_a_name_that_nobody_watches_is_not_looked_up(hosts):
    bf16_autoload.autoload()
    finder = next(f for f in sys.meta_path if isinstance(f, bf16_autoload._Finder))
    assert finder.find_spec("json") is None
