"""``doctor`` as a command: what it prints, what it refuses, and how little memory it takes."""

import json

import pytest
import torch

from torch_bf16.tools import cli
from torch_bf16.tools.system_memory import peak_growth

EIGHT_BITS = torch.ones(4, 4).to(torch.float8_e5m2)
HEADER = '{"w.weight":{"dtype":"BF16","shape":[%d],"data_offsets":[0,%d]}}'


def saved(path, weights):
    torch.save(weights, path)
    return str(path)


@pytest.fixture
def pair(tmp_path):
    weights = {"h.weight": torch.randn(40, 40), "h.bias": torch.zeros(40)}
    moved = {name: each + 0.01 for name, each in weights.items()}
    return saved(tmp_path / "step=5.pt", weights), saved(tmp_path / "step=25.pt", moved)


def test_scripts_get_json_alone_on_standard_output(pair, capsys):
    assert cli.main(["doctor", *pair, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["kind"], found["healthy"], found["steps"], err) == ("doctor", True, 20, "")
    assert {each["name"] for each in found["weights"]} == {"h.weight", "h.bias"}


def test_people_see_the_worst_weights_and_the_verdict(pair, capsys):
    assert cli.main(["doctor", *pair, "--most", "1"]) == 0
    out = capsys.readouterr().out
    assert "step=25.pt, 20 steps" in out
    assert "worst 1 of 2 weights" in out
    assert out.rstrip().endswith("VERDICT: no weight stalls over 20 steps: it moved as it should")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "net."])
def test_names_are_matched_without_what_wraps_the_model(prefix, tmp_path, capsys):
    weights = {"h.weight": torch.randn(4, 4)}
    before = saved(tmp_path / "a.pt", weights)
    after = saved(tmp_path / "b.pt", {f"{prefix}{n}": each + 1 for n, each in weights.items()})
    assert cli.main(["doctor", before, after, "--json", "-"]) == 0
    (weight,) = json.loads(capsys.readouterr().out)["weights"]
    assert weight["unmoved"] == 0


@pytest.mark.parametrize("order", [("generator", "critic"), ("critic", "generator")])
def test_a_part_is_not_compared_with_another_that_has_its_names(order, tmp_path, capsys):
    before = {f"{each}.net.weight": torch.randn(4, 4) for each in order}
    after = {"net.weight": before["generator.net.weight"]}
    paths = saved(tmp_path / "a.pt", before), saved(tmp_path / "b.pt", after)
    assert cli.main(["doctor", *paths]) == 2
    assert "no weight of the same name" in capsys.readouterr().err


def test_what_is_not_in_both_is_told(tmp_path, capsys):
    weights = {"a": torch.ones(3), "b": torch.ones(2), "d": EIGHT_BITS, "e": EIGHT_BITS}
    before = saved(tmp_path / "a.pt", weights)
    weights = {"a": torch.zeros(3), "b": torch.ones(5), "c": torch.ones(4), "d": EIGHT_BITS}
    weights |= {"e": torch.ones(4, 4), "batches": torch.tensor(3)}
    after = saved(tmp_path / "b.pt", weights)
    assert cli.main(["doctor", before, after]) == 0
    out = capsys.readouterr().out
    assert "1 weights have other shapes, such as b (2,) and (5,)" in out
    assert f"1 weights of {after} are not in {before}" in out
    unread = "1 tensors of float8_e5m2 (16 elements) were not examined"
    assert (out.count(unread), out.count(f"of {before}, {unread}")) == (2, 1)
    assert "int64" not in out


def test_a_refusal_tells_the_notes_that_say_why(tmp_path, capsys):
    names = ("a.weight", "b.weight")
    tensors = {name: torch.ones(2, 2).bfloat16() for name in names}
    state = {"exp_avg": torch.ones(2, 2)}
    groups = [{"params": [0]}, {"params": [1]}]
    states = {"state": {0: state, 1: state}, "param_groups": groups}
    path = saved(tmp_path / "run.pt", {"model": tensors, "optimizer": states})
    assert cli.main(["doctor", path]) == 2
    assert "EARLIER LATER (2 of 2 states of the optimizer could" in capsys.readouterr().err


def test_checkpoints_of_two_models_are_refused(tmp_path, capsys):
    before = saved(tmp_path / "a.pt", {"x.weight": torch.ones(3)})
    after = saved(tmp_path / "b.pt", {"y.gain": torch.ones(3)})
    assert cli.main(["doctor", before, after]) == 2
    assert "have no weight of the same name and shape: x.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no"),
        (b"", "is empty"),
        (b"\x80\x02garbage", "was cut short or damaged"),
        ({"step": torch.tensor(3)}, "holds no floating-point weights"),
        ({"w": 3}, "has no weights"),
        ({"w": EIGHT_BITS}, "weights (1 tensors of float8_e5m2 (16 elements) were not examined)"),
    ],
    ids=["missing", "empty", "garbage", "no floats", "no tensors", "eight bits"],
)
def test_a_bad_second_checkpoint_ends_with_status_2(content, said, pair, tmp_path, capsys):
    path = tmp_path / "bad.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert cli.main(["doctor", pair[0], str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_three_checkpoints_and_bad_rates_are_refused(pair, capsys):
    assert cli.main(["doctor", *pair, pair[0]]) == 2
    assert "takes one checkpoint or two, not 3" in capsys.readouterr().err
    for rate in ("0", "-1", "nan", "fast"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["doctor", *pair, f"--lr={rate}"])
        assert "is not a positive number" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", *pair, "--most=-3"])
    assert "is not a whole number of 1 or more" in capsys.readouterr().err


def test_swapped_checkpoints_are_refused(pair, capsys):
    assert cli.main(["doctor", *reversed(pair)]) == 2
    said = capsys.readouterr().err
    assert "step=25.pt is of step 25 and" in said
    assert "give the earlier one first" in said


def test_an_interrupt_ends_without_a_traceback(pair, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_bf16.tools.doctor.command.examine", interrupted)
    assert cli.main(["doctor", *pair]) == 130
    assert capsys.readouterr().err == "python -m torch_bf16 doctor: interrupted\n"


def sparse(path, numel):
    """A safetensors file of zeros, which takes no room on disk."""
    header = (HEADER % (numel, 2 * numel)).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * numel)
    return path


def pair_of(folder, numel):
    """Two files of as many zeros."""
    folder.mkdir()
    before = sparse(folder / "a.safetensors", numel)
    torch.save({"w.weight": torch.zeros(numel, dtype=torch.bfloat16)}, folder / "b.pt")
    return str(before), str(folder / "b.pt")


def test_memory_stays_far_below_the_files(tmp_path, forked_workers):
    """Two of 160 MB; two of 5 GB were tried by hand."""
    numel = 80_000_000
    small, large = pair_of(tmp_path / "small", 1000), pair_of(tmp_path / "large", numel)
    grown = peak_growth(examined, small, large, 1, 250)
    assert grown is None or 0 <= grown < 1.5 * numel


def examined(before, after):
    assert cli.main(["doctor", before, after]) == 1
