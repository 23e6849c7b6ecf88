"""``recommend`` as it is called: factories and scripts, what is said of them, and bad input."""

import json
import sys
from pathlib import Path

import pytest
import torch
from factories_to_train import FACTORIES, SCRIPT, recommend

from torch_bf16.tools import cli
from torch_bf16.tools.recommend import runs


@pytest.fixture
def here(tmp_path, write_module):
    write_module("mine_to_train", FACTORIES)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_a_large_rate_needs_little_and_a_small_one_more(capsys, here):
    found = {}
    for name in ("fast", "slow"):
        status, found[name], _ = recommend(capsys, f"mine_to_train:{name}", "--total-steps", "300")
        assert status == 0
        assert (found[name]["steps"], found[name]["observed_steps"]) == (20, 10)
        assert (found[name]["total_steps"], found[name]["host"]) == (300, "pytorch")
    assert found["fast"]["recommended"] == "bf16-stochastic"
    assert found["slow"]["recommended"] in ("bf16+8", "bf16+16")
    rows = {each["name"]: each for each in found["slow"]["recipes"]}
    assert rows["bf16-true"]["lost_updates"] > 0.9
    assert rows["bf16-stochastic"]["loses_below_lr"] > 1e-5
    ours = ("bf16-stochastic", "bf16+8", "bf16+16", "bf16-fp32-master")
    sizes = [rows[n]["bytes"] for n in (*ours, "32-true")]
    assert sizes == sorted(sizes)
    # The bits that the cast of bf16+8 sets aside outweigh what it saves, until the first step.
    assert rows["bf16+16"]["peak_bytes"] < rows["bf16+8"]["peak_bytes"]
    first_step = [each for each in found["slow"]["reasons"] if "the first step of bf16+8" in each]
    assert len(first_step) == (found["slow"]["recommended"] == "bf16+8")
    names = {each["name"]: each["exact"] for each in found["slow"]["layers"]}
    assert names["net.0.weight"] in (True, False)
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


def test_bytes_are_those_of_each_group(capsys, here):
    """Only the first matrix has a momentum."""
    _, found, _ = recommend(capsys, "mine_to_train:in_groups", "-n", "4")
    rows = {each["name"]: each["bytes"] for each in found["recipes"]}
    first, others = 32 * 64, 64 + 128 + 64 + 1
    assert rows["32-true"] == 12 * first + 8 * others
    assert rows["bf16-stochastic"] == 6 * first + 4 * 64 + 6 * (others - 64)


def test_a_script_may_prepare_its_optimizer_after_some_steps(capsys, here):
    (here / "late.py").write_text(
        "import torch, torch_bf16\n"
        "model = torch.nn.Linear(32, 32)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "for step in range(40):\n"
        "    if step == 12:\n"
        "        torch_bf16.prepare(model, optimizer, 'bf16-fp32-master')\n"
        "    with torch.autocast('cpu', torch.bfloat16):\n"
        "        loss = (model(torch.randn(8, 32)) - 1).float().square().mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    status, found, err = recommend(capsys, "late.py", "-n", "20")
    assert status == 0, err
    assert found["observed_steps"] == 10


@pytest.mark.parametrize("name", ["plain", "keywords", "arguments"])
def test_batches_are_given_as_the_model_takes_them(name, capsys, here):
    status, found, _ = recommend(capsys, f"mine_to_train:{name}", "--lr", "1e-3", "-n", "4")
    assert (status, found["lr"], found["optimizers"]) == (0, 1e-3, ["AdamW"])


def test_a_factory_may_lie_in_a_file(capsys, here):
    text = str(here / "mine_to_train.py:fast")
    status, found, _ = recommend(capsys, text, "-n", "4")
    assert (status, found["command"]) == (0, text)


def test_the_schedule_is_followed_to_its_end(capsys, here):
    distance = {}
    for total in (250, 500, 1000):
        _, found, _ = recommend(
            capsys, "mine_to_train:scheduled", "-n", "6", "--total-steps", str(total)
        )
        distance[total] = found["recipes"][1]["distance"]
        assert not any("the last learning rate is assumed" in note for note in found["notes"])
    # Down to 0 in 500 steps: half of them have three quarters of the sum, and then nothing comes.
    assert distance[250] == pytest.approx(0.75 * distance[500], rel=0.02)
    assert distance[1000] == pytest.approx(distance[500], rel=0.02)


def test_over_bf16_weights_the_optimizer_is_watched_with_exact_masters(capsys, here):
    status, found, _ = recommend(capsys, "mine_to_train:in_bf16")
    assert status == 0
    assert any("it was converted to exact masters" in note for note in found["notes"])
    assert 0.0 < found["recipes"][1]["noise"] < 1
    assert found["ranges"]["formats"]["bf16"]["product_error"] is None


def test_what_a_class_without_a_rule_writes_over_bf16_weights_is_not_known(capsys, here):
    status, _, err = recommend(capsys, "mine_to_train:by_its_own_step")
    said = "the updates by Adamax of 6 weights are not known before they are stored"
    assert (status, said in err) == (2, True), err


def test_one_step_over_bf16_weights_is_too_few(capsys, here):
    status, _, err = recommend(capsys, "mine_to_train:in_bf16", "-n", "1")
    assert (status, "give --steps 2 or more" in err) == (2, True)


def test_what_a_recipe_of_ours_intends_is_seen_although_it_rounds(capsys, here):
    _, cast, _ = recommend(capsys, "mine_to_train:cast", "--total-steps", "300")
    _, plain, _ = recommend(capsys, "mine_to_train:slow", "--total-steps", "300")
    distances = [each["recipes"][1]["distance"] for each in (cast, plain)]
    assert distances[0] == pytest.approx(distances[1], rel=0.2)
    assert cast["recommended"] == plain["recommended"]
    assert cast["layers"][0]["name"].startswith("inner.")


@pytest.mark.parametrize("name", ["kept", "declared"])
def test_what_stays_in_fp32_loses_nothing(name, capsys, here):
    _, found, _ = recommend(capsys, f"mine_to_train:{name}", "-n", "4")
    exact = {each["name"].removeprefix("inner."): each["exact"] for each in found["layers"]}
    assert exact == {"net.0": True, "net.1": True, "net.2.weight": False, "net.2.bias": True}
    said, written = 'what keep_fp32=["net.0"] keeps in fp32', ', keep_fp32=["net.0"]))'
    assert any(said in note for note in found["notes"]) == (name == "kept")
    assert found["lines"][-1].endswith(written) == (name == "kept")
    held = {each["name"]: each["bytes"] for each in found["recipes"]}
    # Of the 64 weights that are rounded.
    assert held["bf16+8"] - held["bf16-stochastic"] == 64


def test_of_an_optimizer_that_steps_others_each_step_counts_once(here):
    found = runs.observe("mine_to_train:two", [], 4, None, lambda line: None)
    assert [type(each).__name__ for each in found.optimizers] == ["Both"]
    assert found.steps == [4]
    assert [each.observed_steps for each in found.parameters.values()] == [2] * 4


STEPS = {
    "plain": "optimizer.zero_grad(); loss().backward(); optimizer.step()",
    # Its gradients are made within the step, as Lightning's are.
    "closure": "optimizer.step(closure)",
    "keyword": "optimizer.step(closure=closure)",
    # A fused optimizer is given the gradients of the scaled loss.
    "scaler": "optimizer.zero_grad(); scaler.scale(loss()).backward(); scaler.step(optimizer)",
}


def test_gradients_are_those_that_the_step_uses(capsys, here):
    found = {}
    for kind, step in STEPS.items():
        (here / "steps.py").write_text(f"""
import torch
torch.manual_seed(0)
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
loss = lambda: (model(torch.ones(8, 32)) - 1).square().mean()

def closure():
    optimizer.zero_grad()
    made = loss()
    made.backward()
    return made

for _ in range(9):
    {step}
    scaler._scale is None or scaler.update()
""")
        # A single step has no gradients of an earlier one.
        for steps in ("1", "6"):
            status, content, err = recommend(capsys, "steps.py", "-n", steps)
            assert status == 0, err
            found[kind, steps] = content
    for (_, steps), content in found.items():
        plain = found["plain", steps]
        largest = content["ranges"]["largest_gradient"]
        assert largest == pytest.approx(plain["ranges"]["largest_gradient"], rel=1e-6)
        assert content["recipes"][1]["distance"] == pytest.approx(plain["recipes"][1]["distance"])


CAUGHT = """
import sys, torch
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
try:
    for step in range(40):
        try:
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
        except:
            if {stop}:
                raise RuntimeError("of its own")
except BaseException:
    {then}
"""


@pytest.mark.parametrize(
    ("stop", "then"), [("True", "raise"), ("True", "pass"), ("step > 30", "pass")]
)
def test_a_script_that_catches_its_end_is_ended_all_the_same(stop, then, capsys, here, monkeypatch):
    left = []
    monkeypatch.setattr(runs.os, "_exit", left.append)
    (here / "catches.py").write_text(CAUGHT.format(stop=stop, then=then))
    given = ["recommend", "catches.py", "-n", "4", "--json", "found.json"]
    assert cli.main(given) == 0
    found = json.loads((here / "found.json").read_text())
    assert (found["steps"], found["observed_steps"]) == (4, 2)
    assert "catches even the exception that ends it" in " ".join(found["notes"])
    # Only another step needs a process that ends there.
    assert left[:1] == ([0] if stop != "True" else [])
    assert "RECOMMENDED" in capsys.readouterr().out


def test_a_script_that_looks_for_its_batch_size_is_measured_after_a_step_that_failed(capsys, here):
    """As accelerate.utils.find_executable_batch_size does; a step that raised calls no hook."""
    (here / "search.py").write_text("""
import torch
from torch import nn

class Adam(torch.optim.Adam):
    def step(self, closure=None):
        if size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().step(closure)

for size in (16, 8):
    try:
        model = nn.Linear(32, 32)
        optimizer = Adam(model.parameters(), lr=1e-3)
        for _ in range(100):
            optimizer.zero_grad()
            (model(torch.randn(size, 32)) - 1).square().mean().backward()
            optimizer.step()
    except torch.OutOfMemoryError:
        pass
""")
    status, found, err = recommend(capsys, "search.py", "-n", "6")
    assert status == 0, err
    assert (found["steps"], found["observed_steps"]) == (6, 3)


def test_a_script_runs_as_it_is_and_ends_after_the_steps(capsys, here):
    status, found, err = recommend(capsys, "train.py", "--", "1e-4")
    assert status == 0
    assert "prints ['1e-4']" in err
    # Neither its `except Exception` nor what follows the loop.
    assert "swallowed" not in err
    assert not (here / "after_training.pt").exists()
    assert found["command"] == "python train.py 1e-4"
    assert found["lr"] == 1e-4
    # Its schedule is known to a function alone, which has ended.
    assert not any("the last learning rate is assumed" in note for note in found["notes"])
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
    training = runs.training_of("mine_to_train:fast")
    watched, data, own = namespace["made"](1e-3)
    monkeypatch.setattr(
        runs, "training_of", lambda text: type(training)(watched, data, own, "mine")
    )
    runs.observe("mine_to_train:fast", [], 8, None, kept.append)
    assert len(kept) == 8
    for one, two in zip(model.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, two)


def test_people_see_tables_reasons_and_two_lines(capsys, here):
    assert cli.main(["recommend", "mine_to_train:slow", "--json", "found.json"]) == 0
    out = capsys.readouterr().out
    assert "recipes, by memory" in out
    assert "\n- RECOMMENDED: " in out
    assert (
        "What to write:\n\n    import torch_bf16\n    model, optimizer = torch_bf16.prepare(" in out
    )
    assert json.loads(Path("found.json").read_text())["kind"] == "recommend"


def test_an_interrupt_ends_without_a_traceback(capsys, here):
    (here / "stops.py").write_text("raise KeyboardInterrupt")
    assert cli.main(["recommend", "stops.py"]) == 130
    assert capsys.readouterr().err == "python -m torch_bf16 recommend: interrupted\n"


def test_a_file_finds_what_lies_beside_it(capsys, here, monkeypatch):
    (here / "project").mkdir()
    (here / "project" / "parts.py").write_text(FACTORIES)
    (here / "project" / "tune.py").write_text("from parts import plain")
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    before = [*sys.path]
    status, _, err = recommend(capsys, "project/tune.py:plain", "--lr", "1e-3", "-n", "4")
    assert status == 0, err
    assert sys.path == before


def test_a_file_may_change_where_imports_are_found(capsys, here, monkeypatch):
    code = "import sys\nfrom mine_to_train import plain\nsys.path = sys.path[2:]"
    (here / "tune.py").write_text(code)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(here)])
    status, _, err = recommend(capsys, "tune.py:plain", "--lr", "1e-3", "-n", "4")
    assert status == 0, err
