"""``recommend`` on what is not training, or none that can be measured."""

import pytest
from factories_to_train import FACTORIES, SCRIPT, recommend

from torch_bf16.tools import cli


@pytest.fixture
def here(tmp_path, write_module):
    write_module("mine_to_train", FACTORIES)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "exits.py").write_text("import sys; sys.exit(3)")
    return tmp_path


SCRIPTS = {
    "empty": ("", "ended without a step of any optimizer"),
    "no step": ("import torch\ntorch.optim.SGD([torch.ones(1)], 1.0)", "without a step of any"),
    "raises": ("x = 1\nraise RuntimeError('gone')", "in its line 2: RuntimeError: gone"),
    "exits": ("import sys; sys.exit(3)", "exited with status 3 (its own arguments go after --)"),
    "no Python": ("def broken(:", "line 1: SyntaxError"),
    "imports no Python": ("x = 1\nimport broken", "in its line 2: SyntaxError"),
    "foreign": ("PK\x03\x04\x00binary", "SyntaxError"),
    "missing import": ("import no_such_module_here", "No module named 'no_such_module_here'"),
    "one step": (
        "import torch\np = torch.nn.Parameter(torch.ones(2, 2))\np.sum().backward()\n"
        "o = torch.optim.SGD([p], 1.0)\nfor _ in range(4): o.step()",
        "ended after 4 of 20 steps, so nothing was measured",
    ),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_that_does_not_train_ends_with_status_2_and_the_reason(kind, capsys, here):
    content, said = SCRIPTS[kind]
    (here / "broken.py").write_text("def broken(:")
    (here / "bad.py").write_text(content)
    status, _, err = recommend(capsys, "bad.py")
    assert (status, said in err) == (2, True), err
    assert "Traceback" not in err


def test_a_refusal_is_not_swallowed_by_the_script(capsys, here):
    (here / "wide.py").write_text(SCRIPT.replace("32)", "32, dtype=torch.float64)"))
    status, _, err = recommend(capsys, "wide.py", "--", "1e-3")
    assert (status, "trains weights in torch.float64" in err) == (2, True)
    assert "swallowed" not in err


FACTORY_SAID = {
    "no_such_name": "names nothing",
    "number": "is an int, and must be a function without arguments that returns",
    "nothing": "returned NoneType",
    "four": "returned 4 things",
    "raises": "failed: RuntimeError: no data here",
    "exits": "failed: SystemExit: usage",
    "no_model": "returned a str as the model",
    "no_batches": "returned an int as the batches",
    "no_optimizer": "returned an int as the optimizer",
    "empty": "the batches are empty",
    "iterator": "ended after 3 batches: return a list or a DataLoader",
    "frozen": "a model without trainable parameters",
    "plain": "returned no optimizer: give --lr",
    "others": "has none of the model's trainable parameters",
    "mismatched": "Squared failed on a batch: RuntimeError",
    "no_loss": "model(batch), model(*batch) or model(**batch) must return one number",
    "not_finite": "the loss of step 1 is nan",
    "still": "no weight would move: every update that was observed is exactly 0",
    "half": "trains weights in torch.float16",
    "released": "releases gradients: it steps inside the backward pass",
    "closure": "LBFGS took no step: TypeError",
    "refused": "no recipe trains with this optimizer",
    "unseen": "torch's hooks do not see the steps of Apart",
    "lost_gradients": "hold NaN or infinities",
}

WITH_RATE = ("empty", "iterator", "mismatched", "no_loss", "not_finite")


@pytest.mark.parametrize("name", FACTORY_SAID)
def test_a_factory_of_something_else_ends_with_status_2_and_the_reason(name, capsys, here):
    rate = ["--lr", "1e-3"] if name in WITH_RATE else []
    status, _, err = recommend(capsys, f"mine_to_train:{name}", "-n", "4", *rate)
    assert (status, FACTORY_SAID[name] in err) == (2, True), err
    assert err.startswith("python -m torch_bf16 recommend: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/train.py"], "is not a file here. It must be a script, or module:factory"),
        (["."], "is a folder"),
        (["no_such_module:make"], "cannot be imported from"),
        (["exits.py:make"], "exits.py raised SystemExit(3)"),
        (["train.py", "--lr", "1e-3"], "--lr is for factories"),
        (["mine_to_train:fast", "--lr", "1e-3"], "returned an optimizer, which has its own"),
        (["mine_to_train:fast", "--", "--lr", "1"], "arguments after -- are for scripts"),
        (["train.py", "--total-steps", "5"], "is less than --steps 20"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, said, capsys, here):
    status, _, err = recommend(capsys, *arguments)
    assert (status, said in err) == (2, True), err


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is")
@pytest.mark.parametrize("name", ["with_an_empty_parameter", "scripted"])
def test_what_cannot_be_measured_is_passed_over(name, capsys, here):
    status, _, err = recommend(capsys, f"mine_to_train:{name}", "-n", "4")
    assert status == 0, err


def test_an_unreadable_script_and_one_of_several_ranks_are_refused(capsys, here, monkeypatch):
    monkeypatch.setattr(
        "runpy.run_path", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission"))
    )
    assert recommend(capsys, "train.py")[0] == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = recommend(capsys, "train.py")
    assert (status, "this is one of several ranks" in err) == (2, True)


@pytest.mark.parametrize("option", [["--steps", "0"], ["--lr", "-1"], ["--total-steps", "x"]])
def test_options_of_another_type_are_refused_at_once(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["recommend", "train.py", *option])
    assert f"argument {option[0]}" in capsys.readouterr().err.replace("--steps/-n", "--steps")
