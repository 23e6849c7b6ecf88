"""``recommend`` as it is called: factories and scripts, what is said of them, and bad input."""

import json
import sys
from pathlib import Path

import pytest
import torch

from torch_bf16.tools import cli

FACTORIES = """
import torch
from torch import nn

class Squared(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 64), nn.LayerNorm(64), nn.Linear(64, 1))

    def forward(self, x, scale=1.0):
        return (scale * self.net(x) - x.sum(1, keepdim=True)).square().mean()

def batches(n=8, width=32):
    torch.manual_seed(1)
    return [torch.randn(16, width) for _ in range(n)]

def made(lr):
    torch.manual_seed(0)
    model = Squared()
    return model, batches(), torch.optim.AdamW(model.parameters(), lr=lr)

def fast(): return made(3e-2)
def slow(): return made(1e-5)
def plain(): return Squared(), batches()
def keywords(): return Squared(), [{"x": x, "scale": 2.0} for x in batches()]
def arguments(): return Squared(), [(x, 2.0) for x in batches()]
def scheduled():
    model, data, optimizer = made(1e-2)
    optimizer.scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=500)
    optimizer.register_step_post_hook(lambda *_: optimizer.scheduler.step())
    return model, data, optimizer
def in_bf16():
    model, data, _ = made(1e-3)
    model = model.bfloat16()
    return model, [x.bfloat16() for x in data], torch.optim.AdamW(model.parameters(), lr=1e-3)

# What is none.
number = 3
def nothing(): return None
def four(): return 1, 2, 3, 4
def raises(): raise RuntimeError("no data here")
def no_model(): return "model", batches()
def no_batches(): return Squared(), 7
def no_optimizer(): return Squared(), batches(), 7
def empty(): return made(1e-3)[0], []
def iterator(): return Squared(), iter(batches(3))
def frozen(): return Squared().requires_grad_(False), batches()
def others():
    return Squared(), batches(), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
def mismatched(): return Squared(), batches(width=31)
def no_loss(): return nn.Linear(32, 2), batches()
def not_finite(): return Squared(), [x * float("nan") for x in batches()]
def still(): return made(0.0)
def half():
    model = Squared().half()
    return model, [x.half() for x in batches()], torch.optim.SGD(model.parameters(), lr=1e-3)
def refused():
    class Closed(torch.optim.LBFGS):
        def step(self, closure=None):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p -= 1e-3 * p.grad
    model = Squared()
    return model, batches(), Closed(model.parameters())
def lost_gradients():
    class Skips(torch.optim.SGD):
        def step(self, closure=None):
            pass
    model = Squared()
    for p in model.parameters():
        p.register_hook(lambda g: g * float("inf"))
    return model, batches(), Skips(model.parameters(), lr=1e-3)
"""
SCRIPT = """
import sys, torch
from torch import nn

print("prints", sys.argv[1:])
torch.manual_seed(0)
model = nn.Linear(32, 32)
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)
try:
    for step in range(100):
        loss = (model(torch.randn(8, 32)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
except Exception as error:
    print("swallowed", error)
torch.save(model.state_dict(), "after_training.pt")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine_to_train.py").write_text(FACTORIES)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mine_to_train", None)


def recommend(capsys, *arguments):
    """The exit status, the record from standard output, and what was said beside it."""
    script = arguments[arguments.index("--") :] if "--" in arguments else ()
    own = arguments[: len(arguments) - len(script)]
    status = cli.main(["recommend", *own, "--json", "-", *script])
    out, err = capsys.readouterr()
    assert status == 0 or out == ""
    return status, json.loads(out) if status == 0 else None, err


def test_a_large_rate_needs_little_and_a_small_one_more(capsys, here):
    found = {}
    for name in ("fast", "slow"):
        status, found[name], _ = recommend(capsys, f"mine_to_train:{name}", "--total-steps", "300")
        assert status == 0
        assert (found[name]["steps"], found[name]["looks"]) == (20, 10)
        assert (found[name]["total_steps"], found[name]["host"]) == (300, "pytorch")
    assert found["fast"]["recommended"] == "bf16-stochastic"
    assert found["slow"]["recommended"] in ("bf16+8", "bf16-fp32-master")
    rows = {each["name"]: each for each in found["slow"]["recipes"]}
    assert rows["bf16-true"]["lost_updates"] > 0.9
    assert rows["bf16-stochastic"]["loses_below_lr"] > 1e-5
    sizes = [rows[n]["bytes"] for n in ("bf16-stochastic", "bf16+8", "bf16-fp32-master", "32-true")]
    assert sizes == sorted(sizes)
    names = {each["name"]: each["exact"] for each in found["slow"]["layers"]}
    assert names["net.0"] in (True, False)
    assert names["net.1"] is True


def test_bytes_are_those_of_estimate(capsys, here):
    _, found, _ = recommend(capsys, "mine_to_train:fast")
    rows = {each["name"]: each["bytes"] for each in found["recipes"]}
    weights = 32 * 64 + 64 + 128 + 64 + 1
    assert rows["32-true"] == 16 * weights
    cli.main(["estimate", "mine_to_train:Squared", "--ranks", "1", "--json", "-"])
    by_name = {
        each["precision"]: each
        for each in json.loads(capsys.readouterr().out)["rows"]
        if not each["released"]
    }
    for name, row in (("bf16-stochastic",) * 2, ("bf16-fp32-master",) * 2):
        held = by_name[row]
        total = sum(held[k] for k in ("weights", "buffers", "gradients", "moments", "master"))
        assert rows[name] == total


@pytest.mark.parametrize("name", ["plain", "keywords", "arguments"])
def test_batches_are_given_as_the_model_takes_them(name, capsys, here):
    status, found, _ = recommend(capsys, f"mine_to_train:{name}", "--lr", "1e-3", "-n", "4")
    assert (status, found["lr"], found["optimizers"]) == (0, 1e-3, ["AdamW"])


def test_a_factory_may_lie_in_a_file(capsys, here):
    status, _, _ = recommend(capsys, str(here / "mine_to_train.py:fast"), "-n", "4")
    assert status == 0


def test_the_schedule_is_followed_to_its_end(capsys, here):
    distance = {}
    for total in (250, 500, 1000):
        _, found, _ = recommend(
            capsys, "mine_to_train:scheduled", "-n", "6", "--total-steps", str(total)
        )
        distance[total] = found["recipes"][1]["distance"]
        assert not any("the last learning rate is taken" in note for note in found["notes"])
    # Down to 0 in 500 steps: half of them have three quarters of the sum, and then nothing comes.
    assert distance[250] == pytest.approx(0.75 * distance[500], rel=0.02)
    assert distance[1000] == pytest.approx(distance[500], rel=0.02)


def test_over_bf16_weights_the_optimizer_is_watched_with_exact_masters(capsys, here):
    status, found, _ = recommend(capsys, "mine_to_train:in_bf16")
    assert status == 0
    assert any("it was converted to exact masters" in note for note in found["notes"])
    assert 0.0 < found["recipes"][1]["noise"] < 1
    assert found["ranges"]["formats"]["bf16"]["product_error"] is None


def test_a_script_runs_as_it_is_and_ends_after_the_steps(capsys, here):
    status, found, err = recommend(capsys, "train.py", "--", "1e-4")
    assert status == 0
    assert "prints ['1e-4']" in err
    # Neither its `except Exception` nor what follows the loop.
    assert "swallowed" not in err
    assert not (here / "after_training.pt").exists()
    assert found["command"] == "python train.py 1e-4"
    assert found["lr"] == 1e-4
    assert found["lines"][0] == "import torch_bf16"
    assert sys.argv[0] != "train.py"
    assert str(here) not in sys.path


def test_measuring_changes_no_bit_of_the_steps(here, monkeypatch):
    """Weights when it ends are those of as many steps alone."""
    namespace = {}
    exec(FACTORIES, namespace)
    torch.manual_seed(3)
    model, batches, optimizer = namespace["made"](1e-3)
    for batch in batches[:8]:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    kept = []
    from torch_bf16.tools.recommend import runs

    training = runs.training_of("mine_to_train:fast")
    watched, data, own = namespace["made"](1e-3)
    monkeypatch.setattr(
        runs, "training_of", lambda text: type(training)(watched, data, own, "mine")
    )
    runs.observed("mine_to_train:fast", [], 8, None, kept.append)
    assert len(kept) == 8
    for one, two in zip(model.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, two)


def test_people_see_tables_reasons_and_two_lines(capsys, here):
    assert cli.main(["recommend", "mine_to_train:slow", "--json", "found.json"]) == 0
    out = capsys.readouterr().out
    assert "recipes, by memory" in out
    assert "\n- RECOMMENDED: " in out
    assert "To write:\n\n    import torch_bf16\n    model, optimizer = torch_bf16.prepare(" in out
    assert json.loads(Path("found.json").read_text())["kind"] == "recommend"


def test_an_interrupt_ends_without_a_traceback(capsys, here):
    (here / "stops.py").write_text("raise KeyboardInterrupt")
    assert cli.main(["recommend", "stops.py"]) == 130
    assert capsys.readouterr().err == "python -m torch_bf16 recommend: interrupted\n"


SCRIPTS = {
    "empty": ("", "ended without a step of any optimizer"),
    "no step": ("import torch\ntorch.optim.SGD([torch.ones(1)], 1.0)", "without a step of any"),
    "raises": ("x = 1\nraise RuntimeError('gone')", "in its line 2: RuntimeError: gone"),
    "exits": ("import sys; sys.exit(3)", "exited with status 3 (its own arguments go after --)"),
    "no Python": ("def broken(:", "line 1: SyntaxError"),
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
    (here / "bad.py").write_text(content)
    status, _, err = recommend(capsys, "bad.py")
    assert (status, said in err) == (2, True), err
    assert "Traceback" not in err


FACTORY_SAID = {
    "no_such_name": "names nothing",
    "number": "is a int, and must be a function without arguments that returns",
    "nothing": "returned NoneType",
    "four": "returned 4 things",
    "raises": "failed: RuntimeError: no data here",
    "no_model": "returned a str as the model",
    "no_batches": "returned a int as the batches",
    "no_optimizer": "returned a int as the optimizer",
    "empty": "the batches are empty",
    "iterator": "ended after 3 batches: return a list or a DataLoader",
    "frozen": "a model without trainable parameters",
    "plain": "returned no optimizer: give --lr",
    "others": "has none of the model's trainable parameters",
    "mismatched": "Squared failed on a batch: RuntimeError",
    "no_loss": "model(batch), model(*batch) or model(**batch) must return one number",
    "not_finite": "the loss of step 1 is nan",
    "still": "no weight is to move: every update that was looked at is exactly 0",
    "half": "trains weights in torch.float16",
    "refused": "no recipe trains with this optimizer",
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
        (["no/such/train.py"], "is no file here. It must be a script, or module:factory"),
        (["."], "is a folder"),
        (["no_such_module:make"], "cannot be imported from"),
        (["train.py", "--lr", "1e-3"], "--lr is for factories"),
        (["mine_to_train:fast", "--lr", "1e-3"], "returned an optimizer, which has its own"),
        (["mine_to_train:fast", "--", "--lr", "1"], "arguments after -- are for scripts"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, said, capsys, here):
    status, _, err = recommend(capsys, *arguments)
    assert (status, said in err) == (2, True), err


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
