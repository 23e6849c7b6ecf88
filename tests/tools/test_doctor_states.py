"""What the doctor learns from the states of optimizers, of ours, torch's and other libraries'."""

import pytest
import torch
from doctored import doctor, gaussian, saved, verdicts
from torch import nn

import torch_bf16
from torch_bf16.tools import cli


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


@pytest.mark.parametrize(
    "named", [(True, True), (False, False), (True, False)], ids=["names", "numbers", "both"]
)
def test_the_states_of_all_optimizers_of_a_run_are_looked_at(named, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(torch.bfloat16)
    optimizers = []
    for each, prefix, with_names in zip(model, ("0.", "1."), named, strict=True):
        pairs = [(prefix + name, p) for name, p in each.named_parameters()]
        given = pairs if with_names else [p for _, p in pairs]
        optimizers.append(torch.optim.AdamW(given, lr=1e-6))
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


def adamw_states(*names, shape=(64, 64), **more):
    """What torch's AdamW saves of weights that it has stepped, with more for each."""
    state = {"step": 9.0, "exp_avg": gaussian(*shape), "exp_avg_sq": gaussian(*shape).square()}
    group = {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    return {
        "state": {number: {**state, **more} for number in range(len(names))},
        "param_groups": [{**group, "params": [*range(len(names))], "param_names": [*names]}],
    }


@pytest.mark.parametrize(
    ("key", "change", "verdict"),
    [
        ("kahan_comp", 1e-6, "learns"),  # added to the weight
        ("fp32_param", 1e-6, "learns"),  # in place of the weight
        ("fp32_param", 0.0, "stands still"),
        ("weight_residual", 1e-6, "not seen"),  # in a form that is not known
        ("remainder16", 1e-6, "not seen"),  # of ours, and cut to another shape
    ],
)
def test_what_other_libraries_keep_of_weights_is_read_or_said_to_be_hidden(
    key, change, verdict, tmp_path, capsys
):
    weight = gaussian(64, 64).bfloat16()
    for number in (0, 1):
        kept = change * number + (weight.float() if key == "fp32_param" else gaussian(64, 64))
        kept = kept[:8].bfloat16() if key == "remainder16" else kept
        states = adamw_states("w", **{key: kept})
        saved(tmp_path / f"{number}.pt", {"w": weight}, optimizer_states=[states])
    status, found = doctor(tmp_path / "0.pt", tmp_path / "1.pt", tmp_path / "found.json")
    assert verdicts(found) == {"w": verdict}
    assert status == {"learns": 0, "stands still": 1, "not seen": 3}[verdict]
    said = "keeps the lost bits in a form that cannot be read here"
    assert (said in capsys.readouterr().out) == (verdict == "not seen")


@pytest.mark.parametrize("by", ["names", "numbers", "a group without states", "a second file"])
def test_gains_that_no_optimizer_updates_are_not_convicted(by, tmp_path):
    start, gains = gaussian(100, 100), torch.ones(256).bfloat16()
    states = adamw_states("lora.weight", shape=(100, 100))
    if by == "numbers":
        del states["param_groups"][0]["param_names"]
    elif by == "a group without states":  # as of SGD, which keeps none
        states["param_groups"].append({"lr": 1e-3, "params": [1]})
    for number in (0, 1):
        weights = {"norm.weight": gains, "lora.weight": start + number * 2e-3}
        (folder := tmp_path / f"{number}").mkdir()
        torch.save(weights, folder / "pytorch_model.bin")
        torch.save(states, folder / "optimizer.bin")
        if by == "a second file":  # as Accelerate writes for a second optimizer
            torch.save(states, folder / "optimizer_1.bin")
    status, found = doctor(tmp_path / "0", tmp_path / "1", tmp_path / "found.json")
    unknown = by.startswith("a ")
    assert verdicts(found)["norm.weight"] == ("stalls" if unknown else "stands still")
    assert status == unknown
    assert any("not optimizer_1.bin" in each for each in found["notes"]) == (by == "a second file")


def test_a_conviction_names_the_lines_of_each_host(tmp_path, capsys):
    path, _, _ = adamw(tmp_path, torch.bfloat16, 1e-6)
    assert cli.main(["doctor", str(path)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "accelerate launch --mixed_precision bf16-fp32-master ..." in out
    assert 'Trainer(precision="bf16-fp32-master")' in out
