"""The command that runs scripts of others, on a made-up one."""

from __future__ import annotations

import dataclasses

import pytest
import script_rows
import scripts

MADE = """
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision=sys.argv[sys.argv.index("--mixed_precision") + 1])
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(9):
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def made_in(folder, text=MADE):
    folder.joinpath("diffusers").mkdir()
    folder.joinpath("diffusers", "made.py").write_text(text)
    return script_rows.Script("diffusers", "made.py", ("--output_dir", "{out}"), most=6)


def test_a_script_runs_as_it_is_up_to_so_many_backward_passes(tmp_path):
    found = scripts.run(made_in(tmp_path), tmp_path, "bf16-stochastic", scripts.PATH)
    assert found["weights"] == ["20 trained bfloat16"]
    assert found["optimizers"] == ["torch_bf16.optim.adam.AdamW"]
    assert len(found["losses"]) == 6
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.parametrize("precision", scripts.PRECISIONS)
def test_a_script_is_told_its_precision_as_its_host_is(precision):
    lightning = {"no": "32-true", "bf16": "bf16-mixed"}.get(precision, precision)
    told = scripts.variables("lightning", precision, "here")
    assert (told["BF16_SCRIPT_PRECISION"], told["PYTHONPATH"]) == (lightning, "here")
    told = scripts.variables("accelerate", precision, "here")
    found = told.get("BF16_MODE"), told.get("ACCELERATE_MIXED_PRECISION")
    assert found == ((precision, None) if precision in scripts.MODES else (None, precision))


def test_a_script_that_names_no_precision_takes_the_launchers_and_failing_tells_its_last_lines(
    tmp_path,
):
    text = """
import sys
from accelerate import Accelerator

print(*range(9), sep="\\n", file=sys.stderr)
raise SystemExit(str(Accelerator().mixed_precision))
"""
    script = dataclasses.replace(made_in(tmp_path, text), fp32=(), bf16=())
    # What fails is told by its last lines.
    found = scripts.run(script, tmp_path, "bf16", scripts.PATH)
    assert found == {"failed": "5\n6\n7\n8\nbf16"}


def of(end, weights="8 trained bfloat16", steps=4):
    return {"losses": [2.0] * (steps - 1) + [end], "weights": [weights], "optimizers": []}


@pytest.mark.parametrize(
    ("stochastic", "said"),
    [
        (of(1.06), []),
        (of(1.2), ["bf16-stochastic ends at 1.2000, fp32 at 1.0000"]),
        (of(float("nan")), ["bf16-stochastic ends at nan, fp32 at 1.0000"]),
        (of(1.0, steps=5), ["bf16-stochastic took 5 steps, fp32 4"]),
        (of(1.0, "8 trained float32"), ["bf16-stochastic trains ['8 trained float32']"]),
        ({"failed": "why"}, ["bf16-stochastic fails: why"]),
    ],
)
def test_what_is_not_as_in_the_other_precisions_is_named(stochastic, said):
    stock = of(1.0, "8 trained float32")
    found = {"no": stock, "bf16": stock, "bf16-stochastic": stochastic, "bf16-fp32-master": of(1.0)}
    assert scripts.faults(found) == said
    assert scripts.faults({**found, "no": {"failed": "a data set is missing"}}) == []
