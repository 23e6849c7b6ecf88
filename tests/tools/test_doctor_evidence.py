"""What two checkpoints show, and what only looks like it."""

import pytest
import torch
from doctored import doctor, gaussian, saved, verdicts

from torch_bf16.tools import cli

STALL = {"w.weight": gaussian(200, 200).bfloat16()}


def test_a_model_of_which_a_part_was_compiled_meanwhile_is_compared_whole(tmp_path):
    before = {"body.weight": gaussian(40, 40), "head.weight": gaussian(40, 40)}
    after = {"body._orig_mod.weight": before["body.weight"] + 1, "head.weight": gaussian(40, 40)}
    paths = saved(tmp_path / "a.pt", before), saved(tmp_path / "b.pt", after)
    _, found = doctor(*paths, tmp_path / "found.json")
    assert verdicts(found) == {"body._orig_mod.weight": "learns", "head.weight": "stands still"}
    assert not found["notes"]


def test_what_a_cast_to_bf16_took_from_the_earlier_weights_is_no_movement(tmp_path, capsys):
    weights = {"w.weight": gaussian(40, 40), "v.weight": gaussian(40, 30)}
    before = saved(tmp_path / "a.pt", {name: each.bfloat16() for name, each in weights.items()})
    same = saved(tmp_path / "b.pt", weights)
    status, found = doctor(before, same, tmp_path / "found.json")
    assert (status, found["healthy"]) == (3, None)
    assert {each["unmoved"] for each in found["weights"]} == {1.0}
    out = capsys.readouterr().out
    assert "only one of the two checkpoints has it in fp32" in out
    assert "a.pt lacks all but the bf16 numbers of 2 weights" in out
    moved = saved(tmp_path / "b.pt", {**weights, "v.weight": weights["v.weight"] + 0.01})
    status, found = doctor(before, moved, tmp_path / "found.json")
    assert (status, verdicts(found)) == (0, {"w.weight": "not seen", "v.weight": "learns"})
    of_v = found["weights"][-1]
    distance = weights["v.weight"].double() + 0.01 - weights["v.weight"].bfloat16().double()
    assert of_v["distance"] == pytest.approx(float(distance.abs().mean()), rel=1e-5)


def test_bf16_weights_that_are_later_saved_in_fp32_stand_still_as_they_are(tmp_path):
    before = saved(tmp_path / "a.pt", STALL)
    after = saved(tmp_path / "b.pt", {name: each.float() for name, each in STALL.items()})
    status, found = doctor(before, after, tmp_path / "found.json")
    assert (status, verdicts(found)) == (1, {"w.weight": "stands still"})
    assert not found["notes"]


@pytest.mark.parametrize("stalls", [False, True])
def test_pruned_weights_stand_at_zero_and_are_not_rounded_away(stalls, tmp_path):
    mask = torch.arange(60_000) % 10 < 3
    start = gaussian(60_000) * mask
    moved = start + gaussian(60_000).flip(0) * 0.1 * mask
    if stalls:
        moved = torch.where(start.abs() < 1e-3, moved, start)
    paths = [
        saved(tmp_path / f"{n}.pt", {"w.weight": each.view(200, 300).bfloat16()})
        for n, each in enumerate((start, moved))
    ]
    status, found = doctor(*paths, tmp_path / "found.json")
    assert (status, verdicts(found)["w.weight"]) == ((1, "stalls") if stalls else (0, "learns"))
    assert (found["weights"][0]["lost"] > 0.5) == stalls


def test_toward_zero_a_gain_of_one_moves_by_half_of_what_it_takes_away_from_it(tmp_path):
    for sign, lost in ((1, 0), (-1, 1)):
        state = {"exp_avg": torch.full((64,), sign * 0.5), "exp_avg_sq": torch.full((64,), 0.25)}
        state = {"step": 1000, **{name: each.bfloat16() for name, each in state.items()}}
        group = {"lr": 3e-3, "betas": (0.0, 0.5), "eps": 1e-8, "weight_decay": 0.0, "params": ["n"]}
        optimizer = {"state": {"n": state}, "param_groups": [group]}
        gains = {"n": torch.ones(64).bfloat16()}
        path = saved(tmp_path / "a.pt", gains, optimizer=optimizer)
        status, found = doctor(path, tmp_path / "found.json")
        (row,) = found["weights"]
        assert (float(torch.tensor(1 - sign * 3e-3).bfloat16()) == 1) == lost
        assert (status, row["update_below_half_unit"]) == (lost, lost)


def test_a_verdict_says_how_many_weights_have_not_moved(tmp_path, capsys):
    before = {**STALL, "w.bias": torch.zeros(200).bfloat16()}
    after = {**STALL, "w.bias": gaussian(200).bfloat16()}
    paths = saved(tmp_path / "a.pt", before), saved(tmp_path / "b.pt", after)
    assert cli.main(["doctor", *map(str, paths)]) == 0
    assert "it moved as it should; 1 of 2 weights have not moved" in capsys.readouterr().out


def test_masters_that_deepspeed_keeps_in_its_own_folder_are_not_denied(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {"n.weight": torch.ones(64), "w.weight": gaussian(200, 200)}
    moved = {name: each + 0.0015 for name, each in weights.items()}
    for after, expected in ((weights, (3, None)), (moved, (0, True))):
        folders = [tmp_path / f"checkpoint-{step}" for step in (10, 20)]
        for folder, content in zip(folders, (weights, after), strict=True):
            (folder / "global_step10").mkdir(parents=True, exist_ok=True)
            rounded = {name: each.bfloat16() for name, each in content.items()}
            safetensors.save_file(rounded, folder / "model.safetensors")
        status, found = doctor(*folders, tmp_path / "found.json")
        assert (status, found["healthy"]) == expected
        assert verdicts(found)["n.weight"] == "not seen"
    assert "in DeepSpeed's folder global_step10" in capsys.readouterr().out
