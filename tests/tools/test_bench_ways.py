"""Rows beside plain steps: moved gradients, idle rows, and a graph, which a stub replays."""

import itertools
import json
from types import SimpleNamespace

import torch

from torch_bf16.tools import cli
from torch_bf16.tools.bench import command
from torch_bf16.tools.bench.entries import ours
from torch_bf16.tools.bench.peers import PEERS
from torch_bf16.tools.bench.ways import WAYS, in_ways, step_of

CPU = torch.device("cpu")
SHAPES = [(20, 8), (8,)]


def made(recipe="bf16-stochastic"):
    return ours([recipe])[0].make(SHAPES, CPU)


def matrix_of(optimizer):
    return optimizer.param_groups[0]["params"][0]


def test_moved_gradients_have_another_address_in_every_step_and_the_same_numbers():
    moved, plain = made(), made()
    step, addresses = step_of(moved, "moved"), []
    for _ in range(4):
        step()
        plain.step()
        addresses.append(matrix_of(moved).grad.data_ptr())
    assert all(a != b for a, b in itertools.pairwise(addresses))
    assert torch.equal(matrix_of(moved), matrix_of(plain))


def test_idle_rows_keep_moments_of_zero():
    optimizer = made()
    step = step_of(optimizer, "zero-rows")
    for _ in range(3):
        step()
    moments = optimizer.state[matrix_of(optimizer)]["exp_avg"]
    zero = [row for row in range(20) if not moments[row].any()]
    assert zero == [9, 19]


def test_a_graph_is_captured_after_one_step_and_then_replayed(monkeypatch):
    log = []

    class Context:
        def __init__(self, *_):
            pass

        def __enter__(self):
            log.append("capture")

        def __exit__(self, *_):
            log.append("captured")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: log.append("replay"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Context())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: Context())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    optimizer = made()
    step = step_of(optimizer, "graph")
    steps = []
    for _ in range(4):
        step()
        steps.append(float(optimizer.state[matrix_of(optimizer)]["step"]))
    assert log == [*["capture", "captured"] * 2, "replay", "replay", "replay"]
    assert steps == [1, 2, 2, 2]


def test_rows_of_a_way_say_so_and_a_graph_needs_a_gpu_and_a_capturable_optimizer():
    torchs = PEERS["torch"].entries[0]
    rows = {each.name: each for each in in_ways([torchs], WAYS)}
    assert list(rows) == [f"{torchs.name}, {way}" for way in ("moved", "graph", "zero-rows")]
    graph, moved = rows[f"{torchs.name}, graph"], rows[f"{torchs.name}, moved"]
    assert (graph.only_on, graph.options["capturable"]) == ("cuda", True)
    assert moved.estimate == torchs.estimate + 4


def test_the_command_adds_them_for_ours_and_the_baseline(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "peak_bytes", lambda *arguments: None)
    file = tmp_path / "figures.json"
    wanted = ["--parameters", "20000", "--tensors", "6", "--rounds", "2", "--threads", "1"]
    recipe = ["--recipes", "bf16-stochastic", "--ways", "moved,graph,zero-rows"]
    assert cli.main(["bench", *wanted, *recipe, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    names = [row["name"] for row in record["results"]]
    for name in ("torch fused fp32", "bf16-stochastic"):
        assert f"{name}, moved" in names
        assert f"{name}, zero-rows" in names
        assert record["failed"][f"{name}, graph"] == "needs CUDA"
    assert record["device_state"] == {"before": {}, "after": {}}


def test_without_triton_a_gpu_is_refused_and_not_timed_with_eager(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("TORCH_BF16_BACKEND", raising=False)
    monkeypatch.setattr("torch_bf16.backends.triton._missing", lambda: "it is not installed")
    monkeypatch.setattr(command, "measure", None)
    assert cli.main(["bench", "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert "'triton' was asked for and cannot run on cuda:0: it is not installed" in said
    assert "Working here: eager" in said
