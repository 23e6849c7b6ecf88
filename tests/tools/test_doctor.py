"""Whom the doctor convicts: runs of the demo in all four precisions, and made-up ones."""

import pytest
import torch
from doctored import doctor, gaussian, saved, verdicts
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


def test_one_checkpoint_without_an_optimizer_is_not_enough(runs, capsys):
    folder, _ = runs
    assert cli.main(["doctor", str(folder / "bf16-true-0.ckpt")]) == 2
    assert "one checkpoint without it cannot show what moved" in capsys.readouterr().err


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


def test_a_run_in_which_hardly_anything_moved_is_not_cleared(tmp_path, capsys):
    start = gaussian(200, 200)
    lost = walk(start.bfloat16().float(), 1e-8, 20, rounded=True)
    assert 0.99 < float((lost == start.bfloat16().float()).float().mean()) < 1
    bias = torch.zeros(200), walk(torch.zeros(200), 1e-8, 20, rounded=True)
    weights = zip((start, lost), bias, strict=True)
    paths = [
        saved(tmp_path / f"{number}.pt", {"w.weight": w.bfloat16(), "w.bias": b.bfloat16()})
        for number, (w, b) in enumerate(weights)
    ]
    status, found = doctor(*paths, tmp_path / "found.json")
    assert (status, found["healthy"]) == (3, None)
    assert verdicts(found) == {"w.weight": "not judged", "w.bias": "learns"}
    assert "too few have to tell what rounding took. Give two" in capsys.readouterr().out
