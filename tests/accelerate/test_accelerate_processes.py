"""What only other processes can show: the launcher, replicas, the order of imports."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import replicas
from launching import SCRIPTS, accelerate_in_fork, run

ROOT = Path(__file__).parents[2]


def installed(name):
    return any(each.metadata["Name"] == name for each in distributions())


def test_launcher_sets_the_mode_of_an_unchanged_script(tmp_path):
    out = tmp_path / "result.json"
    options = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--dynamo_backend", "no"]
    command = ["launch", *options, "--mixed_precision", "bf16-stochastic"]
    # The launcher is forked, and starts an interpreter for the script.
    printed = accelerate_in_fork(
        *command, SCRIPTS / "unchanged.py", out, folder=tmp_path, BF16_BACKEND="eager"
    )
    result = json.loads(out.read_text())
    assert result["mode"] == "bf16-stochastic"
    assert result["weights"] == "torch.bfloat16"
    assert result["optimizer"].startswith("torch_bf16.")
    assert result["loss"] == "torch.float32"
    assert result["last"] < 0.5 * result["first"]
    assert printed.count("mixed_precision=bf16-stochastic: 321 parameters ") == 1
    assert printed.count(", backend eager") == 1


def test_replicas_with_different_seeds_end_bit_identical(ranks):
    mode = "bf16-stochastic"
    variables = {"ACCELERATE_MIXED_PRECISION": mode, "BF16_ACCUMULATE": "fp32"}
    first, second = ranks(2, replicas.trained, variables)
    assert first["mode"] == mode
    assert first["gradients"] == ["torch.float32"]
    assert first["initial"] != second["initial"]
    assert first["exact"] == second["exact"] == first["initial"]
    assert set(first["steps"]) == {50}
    assert "remainder16 0.weight" in first["digests"]
    own = ("initial", "printed")
    assert first == {**second, **{name: first[name] for name in own}}
    assert (first["printed"] + second["printed"]).count(f"mixed_precision={mode}: ") == 1


PREPARE = """
import torch
from accelerate import Accelerator
{before}
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
{accelerator}
accelerator.prepare(model, optimizer)
print(accelerator.mixed_precision, model.weight.dtype, type(optimizer).__module__)
"""

TRAINS = "bf16-stochastic torch.bfloat16 torch_bf16.optim.adam\n"
NEW = "accelerator = Accelerator(mixed_precision='bf16-stochastic', cpu=True)"


def test_switched_off_accelerate_knows_its_own_modes_only(tmp_path, run_unhooked):
    script = PREPARE.format(before="", accelerator=NEW)
    done = run_unhooked(script, folder=tmp_path, BF16_AUTOLOAD="0")
    assert done.returncode == 1
    assert "Unknown mixed_precision mode: bf16-stochastic. Choose between ['no'," in done.stderr


def test_switched_off_but_asked_for_by_the_environment_fails_at_prepare(tmp_path, run_unhooked):
    script = PREPARE.format(before="", accelerator="accelerator = Accelerator()")
    variables = {"BF16_AUTOLOAD": "0", "ACCELERATE_MIXED_PRECISION": "bf16_stochastic"}
    done = run_unhooked(script, folder=tmp_path, **variables)
    assert done.returncode == 1
    assert "RuntimeError: mixed_precision='bf16_stochastic' was asked for, but" in done.stderr


# Not what old releases of Accelerate call by names that numpy has deprecated, nor what depends on
# the processor.
STRICT = """
import warnings
warnings.simplefilter("error")
warnings.simplefilter("ignore", DeprecationWarning)
warnings.filterwarnings("ignore", "this CPU takes")
"""


def test_late_import_works_with_the_hook_switched_off(tmp_path, run_unhooked):
    script = STRICT + PREPARE.format(before="import accelerate_bf16", accelerator=NEW)
    done = run_unhooked(script, folder=tmp_path, BF16_AUTOLOAD="0")
    assert done.stdout == TRAINS, done.stderr


def test_early_import_works_with_the_hook_switched_off(tmp_path):
    script = "import accelerate_bf16\n" + PREPARE.format(before="", accelerator=NEW)
    done = run([sys.executable, "-c", script], tmp_path, BF16_AUTOLOAD="0")
    assert done.stdout == TRAINS, done.stderr


def test_import_after_the_accelerator_still_comes_before_prepare(tmp_path, run_unhooked):
    # The environment alone names the mode, unchecked, before anybody knew what it means.
    made = "accelerator = Accelerator(cpu=True)\nimport accelerate_bf16"
    script = PREPARE.format(before="", accelerator=made)
    variables = {"BF16_AUTOLOAD": "0", "ACCELERATE_MIXED_PRECISION": "BF16-Stochastic"}
    done = run_unhooked(script, folder=tmp_path, **variables)
    assert done.stdout == TRAINS, done.stderr
    assert done.stderr.count("mixed_precision=bf16-stochastic: ") == 1


def test_importing_accelerate_alone_imports_none_of_the_optimizers(tmp_path, run_unhooked):
    script = "import warnings; warnings.simplefilter('error', RuntimeWarning)\n"
    script += "import sys, accelerate; print('torch_bf16' in sys.modules, 'numba' in sys.modules)"
    done = run_unhooked(script, folder=tmp_path)
    assert done.stdout == "False False\n", done.stderr


def test_a_trainer_in_a_mode_of_its_own_imports_none_of_the_optimizers(tmp_path, run_unhooked):
    script = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests" / "accelerate")!r}, {str(ROOT / "examples")!r}]
import transformers
from tiny_llm import llama, sequences
arguments = transformers.TrainingArguments(
    {str(tmp_path)!r}, max_steps=1, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
)
trainer = transformers.Trainer(llama(), arguments, train_dataset=sequences())
trainer.train()
trainer.save_model()
print("torch_bf16" in sys.modules, "numba" in sys.modules)
"""
    done = run_unhooked(script, folder=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["False False"], done.stderr


def test_the_package_kernels_of_hugging_face_beside_our_folder_breaks_nothing(tmp_path):
    """The repository's root is on the path first, and has a folder of that name."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("whose = 'Hugging Face'\n")
    script = "import kernels, transformers, accelerate_bf16; print(kernels.whose)"
    done = run([sys.executable, "-c", script], ROOT, PYTHONPATH=str(tmp_path))
    assert done.stdout == "Hugging Face\n", done.stderr


@pytest.mark.skipif(not installed("kernels"), reason="Hugging Face's kernels is not installed")
def test_with_the_package_kernels_installed_transformers_finds_it_and_trains_in_the_mode(tmp_path):
    script = f"""
import sys, torch, transformers, transformers.integrations.hub_kernels, kernels
sys.path[:0] = ["tests/accelerate", "examples"]
from tiny_llm import llama, sequences
arguments = transformers.TrainingArguments(
    {str(tmp_path)!r}, max_steps=1, use_cpu=True, report_to=[], save_strategy="no"
)
trainer = transformers.Trainer(llama(), arguments, train_dataset=sequences())
trainer.train()
print(kernels.__version__ is not None, trainer.model.lm_head.weight.dtype)
"""
    mode = "bf16-stochastic"
    found = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", script]
    done = run(command, ROOT, ACCELERATE_MIXED_PRECISION=mode, PYTHONPATH=found)
    assert done.stdout.endswith("True torch.bfloat16\n"), done.stderr
