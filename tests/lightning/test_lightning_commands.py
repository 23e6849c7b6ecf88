"""The precision is chosen where Lightning's users choose it, in scripts that stay as they are."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from pathlib import Path

import pytest
from free_port import free_port
from lightning_models import MODES, TRAINERS

HERE = Path(__file__).parent
FAMILIES = {"lightning.pytorch": "lightning_bf16.pytorch"}

OPTIONS = {
    "recipe": "bf16-fp32-master",
    "compute": "bf16",
    "weights": "bf16+fp32",
    "exp_avg": "bf16_nearest",
    "exp_avg_sq": "bf16_stochastic",
    "accumulate": "bf16_nearest",
    "reduce": "bf16_wire",
    "offload": "states",
    "keep_fp32": ["head"],
    "seed": 11,
    "backend": "eager",
    "vectors": "like_matrices",
    "release_gradients": True,
    "release_max_norm": 0.5,
    "release_norm": "last_step",
    "release_accumulation_steps": 1,
}


@pytest.fixture(scope="module")
def start(unhooked):
    """Runs a program in the environment without variables that choose something; its output."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("BF16_", "PL_", "LT_"))}

    def run(*command, given="", **environment):
        variables = {**clean, "OMP_NUM_THREADS": "1", **environment}
        done = unhooked.run(*command, given=given, **variables)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture(scope="module", params=TRAINERS)
def chosen(request, start, tmp_path_factory):
    """The package, and by name what a command line made of the script or what it printed."""
    package = request.param
    folder = tmp_path_factory.mktemp("commands")
    plugin = f"{FAMILIES.get(package, f'lightning_bf16.{package}')}.BF16Precision"
    as_yaml = folder / "plugin.yaml"
    as_yaml.write_text(
        json.dumps({"trainer": {"plugins": [{"class_path": plugin, "init_args": OPTIONS}]}})
    )
    precision = folder / "precision.yaml"
    precision.write_text("trainer:\n  precision: bf16-fp32-master\n")
    options = [
        f"--trainer.plugins.{name}={json.dumps(value) if isinstance(value, list) else value}"
        for name, value in OPTIONS.items()
    ]
    cli = [str(HERE / "cli_app.py"), "fit"]
    lines = {
        "flag": ([*cli, "--trainer.precision=bf16-stochastic", "--trainer.own=3"], {}),
        "config": ([*cli, f"--config={precision}"], {}),
        "config, overruled": (
            [*cli, f"--config={precision}", "--trainer.precision=bf16-stochastic"],
            {},
        ),
        "plugin flags": ([*cli, f"--trainer.plugins={plugin}", *options], {}),
        "plugin config": ([*cli, f"--config={as_yaml}"], {}),
        "environment of the CLI": (cli, {"PL_FIT__TRAINER__PRECISION": "bf16-stochastic"}),
        "environment": (
            [str(HERE / "trainer_app.py")],
            {"PL_TRAINER_PRECISION": "bf16-stochastic"},
        ),
        "misspelt": ([*cli, "--trainer.precision=bf16-stochastc"], {}),
        "stock": ([*cli, "--trainer.precision=bf16-true"], {}),
    }
    # What was printed is a configuration that can be read again.
    printed = str(folder / "printed.yaml")
    files = {"printed": printed}
    lines["printed"] = ([*cli, f"--config={as_yaml}", "--print_config"], {})
    lines["printed, read again"] = ([*cli, f"--config={printed}"], {})
    given = json.dumps([[*line, files.get(name)] for name, line in lines.items()])
    answers = json.loads(start(HERE / "command_lines.py", given=given, PACKAGE=package))
    return plugin.rpartition(".")[0], dict(zip(lines, answers, strict=True))


def told(chosen, name):
    out, err = chosen[1][name]
    assert out, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("flag", "bf16-stochastic"),
        ("config", "bf16-fp32-master"),
        ("config, overruled", "bf16-stochastic"),
        ("environment of the CLI", "bf16-stochastic"),
        ("environment", "bf16-stochastic"),
    ],
)
def test_a_recipes_name_is_a_precision_on_command_lines_and_in_the_environment(
    chosen, name, recipe
):
    found = told(chosen, name)
    assert found["plugin"] == chosen[0]
    assert found["recipe"]["name"] == recipe
    assert found["optimizer"].startswith("torch_bf16.")
    assert set(found["dtypes"].values()) == {"torch.bfloat16"}
    assert found["steps"] == 2
    assert found["own"] == {"flag": 3, "environment": None}.get(name, 0)


@pytest.mark.parametrize("name", ["plugin flags", "plugin config", "printed, read again"])
def test_every_option_of_the_plugin_is_an_argument_of_lightning_cli(chosen, name):
    plugin = importlib.import_module(chosen[0]).BF16Precision
    assert OPTIONS.keys() == inspect.signature(plugin).parameters.keys()
    found = told(chosen, name)
    assert found["plugin"] == chosen[0]
    recipe = {**found["recipe"], "recipe": found["recipe"]["name"], "compute": found["compute"]}
    fields = {f"release_{name}": value for name, value in found["release"].items()}
    fields["release_gradients"] = True
    assert {name: {**recipe, **fields}[name] for name in OPTIONS} == OPTIONS
    assert found["dtypes"] == {
        "body.weight": "torch.bfloat16",
        "body.bias": "torch.bfloat16",
        "head.weight": "torch.float32",
        "head.bias": "torch.float32",
    }
    assert found["steps"] == 2


def test_a_misspelt_precision_lists_ours_beside_the_hosts(chosen):
    out, err = chosen[1]["misspelt"]
    assert not out
    assert "bf16-stochastc" in err
    assert all(f"'{name}'" in err for name in (*MODES, "bf16-true"))


def test_the_same_script_in_bf16_true_is_the_hosts_own(chosen):
    found = told(chosen, "stock")
    assert found["recipe"] is None
    assert found["optimizer"].startswith("torch.optim")


def test_fabric_run_takes_the_name_for_scripts_of_both_packages(start):
    options = ("--accelerator=cpu", f"--main-port={free_port()}", "--precision=bf16-stochastic")
    # What the command ``fabric`` does. It hung once at its end: then it and the script say where.
    watch = "import faulthandler; faulthandler.dump_traceback_later(180); "
    command = watch + "from lightning.fabric.cli import _main; _main()"
    out = start(command, "run", *options, str(HERE / "fabric_app.py"))
    assert out.splitlines() == [
        f"{package} {plugin} torch_bf16.optim.adam torch.bfloat16 torch.float32"
        for package, plugin in (
            ("lightning.fabric", "lightning_bf16.fabric"),
            ("lightning_fabric", "lightning_bf16.lightning_fabric"),
        )
    ]
