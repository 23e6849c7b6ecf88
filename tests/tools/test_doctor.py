"""Whom the doctor convicts: runs of the demo in all four precisions, and made-up ones."""

import json

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16.tools import cli

demo_checkpoints = pytest.importorskip("demo_checkpoints", reason="the demo needs Lightning")
STEPS = demo_checkpoints.STEPS
HEALTHY = ["32-true", "bf16-fp32-master", "bf16-stochastic"]


@pytest.fixture(scope="module", params=[5e-4, 3e-5], ids=["demo's lr", "fine-tuning lr"])
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    demo_checkpoints.train(folder, request.param)
    return folder, request.param


def doctor(*arguments):
    """The exit status and the record."""
    *paths, target = arguments
    status = cli.main(["doctor", *map(str, paths), "--json", str(target)])
    return status, json.loads(target.read_text())


def verdicts(found):
    return {each["name"]: each["verdict"] for each in found["weights"]}


@pytest.mark.parametrize("alone", [False, True], ids=["two checkpoints", "one"])
def test_plain_bf16_is_convicted_and_no_other_precision(runs, alone, tmp_path, capsys):
    folder, lr = runs
    for mode in ("bf16-true", *HEALTHY):
        files = [folder / f"{mode}-{step}.ckpt" for step in (0, STEPS)][alone:]
        status, found = doctor(*files, tmp_path / "found.json")
        assert status == (mode == "bf16-true"), (mode, found["verdict"])
        assert found["steps"] == STEPS
        judged = verdicts(found)
        assert all(verdict == "learns" for verdict in judged.values()) == (mode in HEALTHY), mode
        gains = [n for n in judged if n.endswith("norm.weight")]
        assert {judged[name] for name in gains} == {"learns" if mode in HEALTHY else "stalls"}
    out = capsys.readouterr().out
    assert "stall over" in out or alone
    if alone:
        assert "of its next update would be lost. At lr" in out
    elif lr < 1e-4:
        assert "of the distance that small elements moved is missing" in out
    else:
        assert "gains are exactly 1.0, as they were" in out


def test_weights_alone_are_enough_and_bf16_copies_of_a_run_that_learned_are_cleared(runs, tmp_path):
    folder, _ = runs
    for mode in ("bf16-true", *HEALTHY):
        files = []
        for step in (0, STEPS):
            content = torch.load(folder / f"{mode}-{step}.ckpt", weights_only=True)["state_dict"]
            files.append(tmp_path / f"{step}.pt")
            torch.save({name: each.bfloat16() for name, each in content.items()}, files[-1])
        status, found = doctor(*files, tmp_path / "found.json")
        assert status == (mode == "bf16-true"), (mode, found["verdict"])


def test_one_checkpoint_without_an_optimizer_is_not_enough(runs, tmp_path, capsys):
    folder, _ = runs
    assert cli.main(["doctor", str(folder / "bf16-true-0.ckpt")]) == 2
    assert "one checkpoint without it cannot show what moved" in capsys.readouterr().err


def saved(path, weights, **rest):
    torch.save({"state_dict": weights, **rest}, path)
    return path


def gaussian(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * 0.02


def walk(weights, size, steps, rounded, seed=1):
    """Steps of one size with random signs and a drift, as optimizers of Adam's kind take."""
    generator = torch.Generator().manual_seed(seed)
    drift = torch.randn(weights.shape, generator=generator)
    for _ in range(steps):
        noise = torch.randn(weights.shape, generator=generator)
        weights = weights + size * torch.tanh(drift + noise)
        weights = weights.bfloat16().float() if rounded else weights
    return weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "saved as fp32"])
def test_a_share_is_missing_that_arithmetic_in_fp32_does_not_lose(dtype, tmp_path):
    """A control beside each: the same steps without rounding, saved in bf16."""
    start = gaussian(400, 300).bfloat16().float()
    before = saved(tmp_path / "a.pt", {"w.weight": start.to(dtype)})
    lost = walk(start, 2e-5, 50, rounded=True)
    kept = walk(start, 2e-5, 50, rounded=False)
    after = saved(tmp_path / "b.pt", {"w.weight": lost.to(dtype)})
    status, found = doctor(before, after, tmp_path / "found.json")
    assert status == 1
    (weight,) = found["weights"]
    true = 1 - float((lost - start).abs().mean() / (kept - start).abs().mean())
    assert weight["lost"] == pytest.approx(true, abs=0.05)
    assert weight["unmoved"] == pytest.approx(float((lost == start).float().mean()))
    after = saved(tmp_path / "c.pt", {"w.weight": kept.bfloat16().to(dtype)})
    status, found = doctor(before, after, tmp_path / "found.json")
    assert status == 0
    assert found["weights"][0]["lost"] < 0.05


def test_what_is_frozen_is_named_and_not_convicted(tmp_path, capsys):
    start = gaussian(100, 100)
    moved = walk(start, 1e-3, 20, rounded=False)
    before = saved(tmp_path / "a.pt", {"frozen.weight": start, "trained.weight": start})
    after = saved(tmp_path / "b.pt", {"frozen.weight": start, "trained.weight": moved})
    status, found = doctor(before, after, tmp_path / "found.json")
    assert (status, verdicts(found)) == (
        0,
        {"frozen.weight": "stands still", "trained.weight": "learns"},
    )
    assert "frozen.weight has not moved, and not by rounding" in capsys.readouterr().out


def test_nan_and_infinities_are_counted(tmp_path, capsys):
    start = gaussian(10, 10)
    broken = start + 1e-3
    broken[0, :2] = torch.nan
    broken[1, 0] = torch.inf
    before = saved(tmp_path / "a.pt", {"h.0.weight": start, "h.1.weight": start})
    after = saved(tmp_path / "b.pt", {"h.0.weight": broken, "h.1.weight": start + 1e-3})
    status, _ = doctor(before, after, tmp_path / "found.json")
    assert status == 1
    assert "h.*.weight is broken: 2 NaN and 1 infinities of 100 numbers" in capsys.readouterr().out


def test_the_same_checkpoint_twice_is_said(tmp_path, capsys):
    before = saved(tmp_path / "a.pt", {"w": gaussian(10, 10)})
    assert cli.main(["doctor", str(before), str(before)]) == 1
    assert "not one element differs" in capsys.readouterr().out


def adamw(tmp_path, dtype, lr, **options):
    """A file of a run of torch's AdamW over weights of a dtype, with its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to(dtype)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=lr, **options)
    for _ in range(5):
        model(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path, model, optimizer


def test_the_expected_update_is_the_one_that_the_optimizer_took(tmp_path):
    path, model, optimizer = adamw(tmp_path, torch.float32, 1e-2, weight_decay=0.1)
    _, found = doctor(path, tmp_path / "found.json")
    rows = {each["name"]: each for each in found["weights"]}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        m = state["exp_avg"].double() / (1 - 0.9**5)
        v = state["exp_avg_sq"].double() / (1 - 0.999**5)
        d = -1e-2 * (m / (v.sqrt() + 1e-8) + 0.1 * p.detach().double())
        assert rows[name]["update"] == pytest.approx(float(d.square().mean().sqrt()), rel=1e-5)
        s = (p.detach() + d.float()).bfloat16().double() - p.detach().bfloat16().double()
        lost = 1 - float((s * d).sum() / (d * d).sum())
        assert rows[name]["update_lost_to_nearest"] == pytest.approx(lost, abs=1e-6)


@pytest.mark.parametrize(("lr", "status"), [(1e-6, 1), (0.3, 0)])
def test_one_checkpoint_of_bf16_weights_is_judged_by_its_learning_rate(lr, status, tmp_path):
    path, _, _ = adamw(tmp_path, torch.bfloat16, 1e-3)
    target = tmp_path / "found.json"
    assert cli.main(["doctor", str(path), "--lr", str(lr), "--json", str(target)]) == status


def test_fp32_moments_beside_bf16_weights_say_that_the_file_is_a_copy(tmp_path, capsys):
    path, _, _ = adamw(tmp_path, torch.float32, 1e-6)
    content = torch.load(path, weights_only=True)
    content["model"] = {name: each.bfloat16() for name, each in content["model"].items()}
    torch.save(content, path)
    assert cli.main(["doctor", str(path)]) == 3
    assert "it does not say how its weights were rounded" in capsys.readouterr().out


def test_a_decay_that_the_schedule_alone_scales_is_a_part_of_the_update(tmp_path):
    """Fully decoupled, it is 0.1 a step at the highest rate, whatever that is."""
    weight = nn.Parameter(gaussian(64, 64))
    options = {"weight_decay": 0.1, "fully_decoupled_weight_decay": True}
    optimizer = torch_bf16.AdamW([("w", weight)], lr=1e-6, **options)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    content = {"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "run.pt")
    _, found = doctor(tmp_path / "run.pt", tmp_path / "found.json")
    expected = float(weight.detach().square().mean().sqrt()) * 0.1
    assert found["weights"][0]["update"] == pytest.approx(expected, rel=1e-5)


def lacking_rank(name, parameter):
    """A state of torch's AdamW of a projection to fewer rows, as GaLore keeps it."""
    optimizer = torch.optim.AdamW([(name, parameter)], lr=1e-6)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[parameter][key] = optimizer.state[parameter][key][:8].clone()
    return optimizer


UNKNOWN_UPDATES = {
    "RMSprop": lambda *pair: torch.optim.RMSprop([pair], lr=1e-6),
    "Adagrad": lambda *pair: torch.optim.Adagrad([pair], lr=1e-6),
    "Muon": lambda *pair: torch_bf16.Muon([pair], lr=1e-6, recipe=NEAREST),
    "GaLore": lacking_rank,
}
NEAREST = torch_bf16.Recipe(weights="bf16_nearest", exp_avg="bf16_nearest")


@pytest.mark.parametrize("kind", UNKNOWN_UPDATES)
def test_one_checkpoint_whose_next_update_nobody_knows_clears_nobody(kind, tmp_path, capsys):
    weight = nn.Parameter(gaussian(64, 64).bfloat16())
    optimizer = UNKNOWN_UPDATES[kind]("weight", weight)
    if not optimizer.state:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    content = {"model": {"weight": weight.detach()}, "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "run.pt")
    status, found = doctor(tmp_path / "run.pt", tmp_path / "found.json")
    assert (status, found["healthy"]) == (3, None)
    assert verdicts(found) == {"weight": "not judged"}
    assert {each["lost"] for each in found["weights"]} == {None}
    assert "VERDICT: one checkpoint is not enough: it does not say what" in capsys.readouterr().out


def test_weights_that_were_not_judged_are_counted_beside_those_that_were(tmp_path, capsys):
    path, _, _ = adamw(tmp_path, torch.bfloat16, 0.3)
    content = torch.load(path, weights_only=True)
    content["model"]["another"] = gaussian(8, 8).bfloat16()
    torch.save(content, path)
    status, found = doctor(path, tmp_path / "found.json")
    assert (status, verdicts(found)["another"]) == (0, "not judged")
    out = capsys.readouterr().out
    assert "another was not judged" in out
    assert "VERDICT: no weight stalls after 5 steps" in out
    assert out.rstrip().endswith("; 1 of 7 weights were not judged")


@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
def test_the_states_of_all_optimizers_of_a_run_are_looked_at(named, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(torch.bfloat16)
    optimizers = []
    for each, prefix in zip(model, ("0.", "1."), strict=True):
        pairs = [(prefix + name, p) for name, p in each.named_parameters()]
        optimizers.append(torch.optim.AdamW(pairs if named else [p for _, p in pairs], lr=1e-6))
    model(torch.randn(8, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    states = []
    for each in optimizers:
        each.step()
        states.append(each.state_dict())
    weights = model.state_dict()
    torch.save({"state_dict": weights, "optimizer_states": states}, tmp_path / "gan.ckpt")
    status, found = doctor(tmp_path / "gan.ckpt", tmp_path / "found.json")
    assert status == 1
    assert set(verdicts(found)) == set(weights)
    assert set(verdicts(found).values()) <= {"stalls", "loses"}


def test_each_weight_is_judged_by_the_recipe_of_its_own_optimizer(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizers = []
    recipes = ("bf16-fp32-master", "bf16-stochastic")
    for prefix, part, recipe in zip(("0.", "1."), model, recipes, strict=True):
        pairs = [(prefix + name, p) for name, p in part.named_parameters()]
        optimizers.append(torch.optim.AdamW(pairs, lr=1e-6))
        torch_bf16.prepare(part, optimizers[-1], recipe)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in optimizers:
        each.step()
    states = [each.state_dict() for each in optimizers]
    content = {"state_dict": model.state_dict(), "optimizer_states": states}
    torch.save(content, tmp_path / "two.ckpt")
    _, found = doctor(tmp_path / "two.ckpt", tmp_path / "found.json")
    rounding = {each["name"]: each["rounding"] for each in found["weights"]}
    exact = dict.fromkeys(("0.weight", "0.bias", "1.bias"), "none")
    assert rounding == {**exact, "1.weight": "stochastic"}


def of_ours(tmp_path):
    """Files of a run with exact masters, at two steps: with its optimizer, and weights alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=3e-5)
    torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    for step in (0, 1, 40):
        while int(next(iter(optimizer.state.values()), {"step": 0})["step"]) < step:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(8, 64)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**content, "step": step}, tmp_path / f"{step}.pt")
        torch.save(content["model"], tmp_path / f"weights-{step}.pt")
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after", "lacks"),
    [
        ("0.pt", "40.pt", None),  # masters are there from the cast on
        ("weights-1.pt", "40.pt", "earlier"),
        ("1.pt", "weights-40.pt", "later"),
        ("1.pt", "40.pt", None),
    ],
)
def test_masters_in_one_checkpoint_alone_convict_nobody_and_that_is_said(
    before, after, lacks, tmp_path, capsys
):
    folder = of_ours(tmp_path)
    status, found = doctor(folder / before, folder / after, tmp_path / "found.json")
    assert status == 0
    assert {each["lacks_master"] for each in found["weights"]} == {lacks}
    gain = verdicts(found)["1.weight"]
    assert gain == ("learns" if lacks is None else "not seen")
    out = capsys.readouterr().out
    assert "frozen" not in out
    assert ("lacks the exact masters of 6 weights" in out) == (lacks is not None)


def test_a_checkpoint_in_fp32_is_exact_beside_one_with_masters(tmp_path):
    folder = of_ours(tmp_path)
    start = torch.load(folder / "weights-1.pt")
    torch.save({name: each.float() for name, each in start.items()}, folder / "fp32.pt")
    status, found = doctor(folder / "fp32.pt", folder / "40.pt", tmp_path / "found.json")
    assert (status, verdicts(found)["1.weight"]) == (0, "learns")


def test_weights_that_were_fp32_are_compared_as_the_cast_left_them(tmp_path):
    """A fine-tuning in plain bf16 of fp32 weights begins with a cast, which is not learning."""
    start = gaussian(400, 300)
    lost = walk(start.bfloat16().float(), 2e-5, 50, rounded=True)
    before = saved(tmp_path / "a.pt", {"w.weight": start})
    after = saved(tmp_path / "b.pt", {"w.weight": lost.bfloat16()})
    status, found = doctor(before, after, tmp_path / "found.json")
    assert status == 1
    unmoved = float((lost == start.bfloat16().float()).float().mean())
    assert found["weights"][0]["unmoved"] == pytest.approx(unmoved)


def test_nothing_is_said_of_masters_that_cannot_be_compared(tmp_path, capsys):
    folder = of_ours(tmp_path)
    status, found = doctor(folder / "weights-1.pt", folder / "1.pt", tmp_path / "found.json")
    assert (status, found["healthy"]) == (3, None)
    assert "VERDICT: these two checkpoints cannot tell" in capsys.readouterr().out


def test_a_conviction_names_the_lines_of_each_host(tmp_path, capsys):
    path, _, _ = adamw(tmp_path, torch.bfloat16, 1e-6)
    assert cli.main(["doctor", str(path)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "accelerate launch --mixed_precision bf16-fp32-master ..." in out
    assert 'Trainer(precision="bf16-fp32-master")' in out
