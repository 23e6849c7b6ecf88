"""``estimate``: what a MODEL can be, what is said of one that is none, and what it costs to ask."""

import json
import sys

import pytest
import torch
from estimated_models import ROWS, estimate
from torch import nn

from torch_bf16.tools import cli
from torch_bf16.tools.estimate import sources
from torch_bf16.tools.estimate.activations import batch_argument, peak_of_pass
from torch_bf16.tools.system_memory import peak_growth

LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512},
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
}
SEVENTY = {
    **LLAMA,
    **{"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672},
    **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
    "tie_word_embeddings": False,
}


def config(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return folder / "config.json"


def test_a_config_may_have_another_name_than_transformers_gives_it(tmp_path, capsys):
    pytest.importorskip("transformers")
    path = config(tmp_path, LLAMA).rename(tmp_path / "llama.json")
    assert estimate(capsys, path)[1]["parameters"] > 0
    # A config.json of another kind beside it does not count.
    config(tmp_path, {"model_type": "gpt2"})
    assert estimate(capsys, path)[1]["parameters"] > 0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(("8B", 8 * 10**9), ("350M", 350 * 10**6), ("1.5b", 15 * 10**8), ("1_000", 1000)),
        *(("7", 7), ("1e9", 10**9), ("1,300,000", 1300000), ("8.5B", 85 * 10**8)),
    ],
)
def test_a_number_is_multiplied_by_the_bytes_of_each_recipe(text, count, capsys):
    status, found, _ = estimate(capsys, text)
    assert (status, found["parameters"]) == (0, count)
    rows = {each["precision"]: each for each in found["rows"] if not each["released"]}
    for name, size in (("32-true", 16), ("bf16-fp32-master", 14), ("bf16-stochastic", 8)):
        row = rows[name]
        held = sum(row[key] for key in ("weights", "gradients", "moments", "master"))
        assert held == pytest.approx(size * count, rel=0.01, abs=100)
    assert "a number has no shapes" in found["notes"][0]


def test_host_memory_has_a_column_of_its_own(capsys):
    _, found, _ = estimate(capsys, "8B", "--offload", "states")
    rows = {each["precision"]: each for each in found["rows"] if not each["released"]}
    for name, size in (("32-true", 0), ("bf16-fp32-master", 10), ("bf16-stochastic", 4)):
        assert rows[name]["host"] == size * 8e9
    row = rows["bf16-stochastic"]
    assert row["peak"] == (2 + 2) * 8e9 + 2 * 64 * 2**20
    assert row["recipe"]["offload"] == "states"
    assert any("pinned" in note for note in found["notes"])
    cli.main(["estimate", "8B", "--offload", "states"])
    assert "host" in capsys.readouterr().out
    cli.main(["estimate", "8B"])
    assert "host" not in capsys.readouterr().out


def test_what_deepspeed_keeps_is_divided_by_its_stages(capsys):
    _, found, _ = estimate(capsys, "8B", "--ranks", "4")
    rows = {each["precision"]: each for each in found["zero"]}
    for name, whole, cut in (
        ("DeepSpeed, fp32 masters", 2 + 12 / 4, 14 / 4),
        ("DeepSpeed, bf16 states", 2 + 6 / 4, 8 / 4),
        ("bf16-fp32-master", 2 + 10 / 4, 12 / 4),
        ("bf16-stochastic", 2 + 4 / 4, 6 / 4),
    ):
        sizes = [rows[name][f"stage_{stage}"] for stage in (1, 2, 3)]
        assert sizes == pytest.approx([8e9 * whole, 8e9 * whole, 8e9 * cut], rel=1e-6)
    assert [name for name, each in rows.items() if each["loses_updates"]] == [
        "DeepSpeed, bf16 states"
    ]
    assert not any("int8" in name for name in rows)


def test_recipes_that_deepspeed_cannot_train_have_no_row_there(capsys, factories):
    _, found, _ = estimate(capsys, "mine_to_estimate:make")
    assert all(each["precision"].startswith("DeepSpeed") for each in found["zero"])
    assert any("keep batch norm in fp32, but DeepSpeed casts it" in n for n in found["notes"])
    for options in (["--ranks", "1"], ["--optimizer", "AdamWScheduleFree"]):
        assert estimate(capsys, "8B", *options)[1]["zero"] == []


def test_fits_follows_from_the_peak(capsys):
    _, found, _ = estimate(capsys, "8B", "--ranks", "4")
    for row in found["rows"]:
        for of in (row, row["rank"]):
            assert of["fits"] == {
                str(size): of["peak"] <= size * 10**9 for size in (24, 48, 80, 141, 192)
            }


def test_a_config_is_built_on_the_meta_device_with_its_tied_weights_once(capsys, tmp_path):
    pytest.importorskip("transformers")
    path = config(tmp_path / "model", LLAMA)
    block = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128 + 2 * 64
    for given in (path, path.parent):
        status, found, _ = estimate(capsys, given)
        assert (status, found["parameters"]) == (0, 512 * 64 + 2 * block + 64)


def test_a_config_that_names_no_class_gets_the_one_with_a_head(capsys, tmp_path):
    pytest.importorskip("transformers")
    content = {key: each for key, each in LLAMA.items() if key != "architectures"}
    untied = {**content, "tie_word_embeddings": False}
    _, found, _ = estimate(capsys, config(tmp_path / "model", untied))
    _, tied, _ = estimate(capsys, config(tmp_path / "other", content))
    assert found["parameters"] - tied["parameters"] == 512 * 64


WHOLE = {"bart": "BartForConditionalGeneration", "funnel": "FunnelModel"}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_config_that_names_no_class_gets_the_whole_model(kind, capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "d_inner": 8}
    made = transformers.AutoConfig.for_model(kind, **sizes)
    made.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, WHOLE[kind])._from_config(made)
    _, found, _ = estimate(capsys, tmp_path)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())


FACTORIES = """
from torch import nn
import torch

def make():
    return nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.Linear(256, 10))

def adapted():
    model = make()
    model[0].requires_grad_(False)
    return model

class Inner:
    net = staticmethod(make)

ready = make()
number = 3
def reads():
    return nn.Linear(2, int(torch.ones(1).item()) + 2)
def huge():
    return nn.Linear(1 << 24, 1 << 24)
def nothing():
    return None
def needs(argument):
    return argument
def words():
    return nn.Embedding(10, 16)
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "mine_to_estimate.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("mine_to_estimate", None)


@pytest.mark.parametrize("name", ["make", "Inner.net", "ready"])
def test_a_factory_of_the_user_is_called_on_the_meta_device(name, capsys, factories):
    status, found, _ = estimate(capsys, f"mine_to_estimate:{name}")
    assert (status, found["parameters"]) == (0, 128 * 256 + 256 + 512 + 2570)


def test_frozen_weights_take_no_gradient_and_no_moments(capsys, factories):
    _, found, _ = estimate(capsys, "mine_to_estimate:adapted")
    assert found["parameters"] - found["trained"] == 128 * 256 + 256
    row = found["rows"][0]
    assert row["gradients"] == 4 * found["trained"]
    assert row["moments"] == 8 * found["trained"]


def test_a_checkpoint_gives_shapes_and_its_statistics_are_no_parameters(capsys, tmp_path):
    model = nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.Linear(256, 10))
    torch.save(model.state_dict(), tmp_path / "run.pt")
    status, found, _ = estimate(capsys, tmp_path / "run.pt")
    assert (status, found["parameters"]) == (0, sum(p.numel() for p in model.parameters()))
    stochastic = next(each for each in found["rows"] if each["precision"] == "bf16-stochastic")
    assert stochastic["buffers"] == 2 * 256 * 4 + 8
    # Batch norm stays in fp32.
    assert stochastic["weights"] == 2 * (found["parameters"] - 512) + 4 * 512


BAD = {
    "missing": ("no/such/file.json", "is not a file or folder here"),
    "hub": ("meta-llama/Llama-3.1-8B", "download its config.json first"),
    "decimal comma": ("8,5B", "commas stand between groups of three digits"),
    "negative": ("-8B", "is not a file or folder here"),
    "zero": ("0B", "must be between 1 and"),
    "huge": ("99999999T", "must be between 1 and"),
    "no module": ("no_such_module:make", "cannot be imported from"),
    "no name": ("mine_to_estimate:other", "names nothing"),
    "no factory": ("mine_to_estimate:number", "is an int, and no module or factory"),
    "reads numbers": ("mine_to_estimate:reads", "failed on the meta device"),
    "exits": ("sys:exit", "failed on the meta device"),
    "no module made": ("mine_to_estimate:nothing", "returned None"),
    "arguments": ("mine_to_estimate:needs", "It is called without arguments"),
    "empty config": ("", "is not JSON"),
    "truncated config": ('{"model_type": "lla', "is not JSON"),
    "binary config": ("\0\1\2", "is not JSON"),
    "foreign config": ({"a": 1}, "it has no 'model_type'"),
    "list config": ("[1]", "it has no 'model_type'"),
    "unknown config": ({"model_type": "nonesuch"}, "builds no model from"),
    "wrong numbers": ({**LLAMA, "hidden_size": -3}, "builds no model from"),
    "config with code": ({**LLAMA, "auto_map": {"AutoModel": "x.Y"}}, "which is not run"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_model_ends_with_status_2_and_the_reason(kind, capsys, tmp_path, factories):
    given, said = BAD[kind]
    if kind.endswith("config") or kind.startswith(("config", "wrong")):
        pytest.importorskip("transformers")
        given = config(tmp_path / "model", given)
    arguments = ["--", given] if str(given).startswith("-") else [given]
    status = cli.main(["estimate", "--json", "-", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("python -m torch_bf16 estimate: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["8B", "--optimizer", "Nonesuch"], "no optimizer 'Nonesuch'"),
        (["8B", "--optimizer", "Muon(ns_steps=100)"], "ns_steps=100 must be an integer"),
        (["8B", "--optimizer", "AdamW(betas=(0.9,))"], "cannot be made"),
        (["8B", "--optimizer", "SGD(momentum=-1)"], "cannot be made"),
        (["8B", "--optimizer", "SGD(0.9)"], "each needs a name, as in momentum=0.9"),
        (["8B", "--optimizer", "__import__('os')"], "are not plain values"),
        (["8B", "--optimizer", "1 + 1"], "is not an optimizer such as"),
        (["8B", "--batch", "8x1024"], "is not a model that can"),
        (["mine_to_estimate:make", "--batch", "8x7"], "took no step over a batch of (8, 7)"),
        pytest.param(
            ["mine_to_estimate:words", "--batch", "8x7"],
            "unless said: --batch 8x7:int64",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.12", reason="torch 2.11 traces embeddings of fp32 ids"
            ),
        ),
        (["torch.nn:Identity", "--batch", "8x7"], "is a model without trainable parameters"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_options_that_cannot_be_meant_are_refused(arguments, said, capsys, factories):
    status, _, err = estimate(capsys, *arguments)
    assert status == 2
    assert said in err


@pytest.mark.parametrize("options", ["", "(momentum=0.9)"])
def test_an_optimizer_may_be_named_with_its_module(options, capsys):
    _, bare, _ = estimate(capsys, "1M", "--optimizer", f"SGD{options}")
    _, dotted, _ = estimate(capsys, "1M", "--optimizer", f"torch.optim.SGD{options}")
    assert dotted["rows"] == bare["rows"]


def test_a_recipe_is_listed_once_whatever_an_optimizer_does_not_keep(capsys):
    def kept(optimizer):
        rows = estimate(capsys, "1M", "--optimizer", optimizer)[1]["rows"]
        return [each["precision"] for each in rows if not each["released"]]

    ours = ["bf16_stochastic / int8 / int8", "bf16+8 / int8 / int8"]
    assert set(ours) < set(kept("AdamW"))
    assert set(ours) < set(kept("Lion"))
    assert kept("SGD") == [
        *("32-true", "bf16-mixed", "bf16+fp32 / fp32 / fp32", "bf16-fp32-master"),
        *("bf16+8 / bf16_nearest / bf16_stochastic", "bf16-stochastic", "bf16-true"),
    ]


def test_weights_that_do_not_fit_are_told(capsys, factories):
    arguments = ["mine_to_estimate:huge", "--batch", "1x8", "--device", "cpu"]
    status, _, err = estimate(capsys, *arguments)
    assert (status, "does not fit on cpu with such a batch" in err) == (2, True), err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ranks", "0"],
        ["--batch", "x"],
        ["--batch", "8:int63"],
        ["--batch", "9" * 30],
        ["--json", "/no/x"],
    ],
)
def test_arguments_of_another_type_are_refused_at_once(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["estimate", "8B", *arguments])
    assert f"argument {arguments[0]}" in capsys.readouterr().err


def test_without_transformers_a_config_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, err = estimate(capsys, config(tmp_path / "model", LLAMA))
    assert status == 2
    assert "is a config of transformers, which is not installed here" in err


def deep(layers=6, width=64):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    )


@pytest.mark.parametrize("label", ["32-true", "bf16-true", "bf16-stochastic"])
def test_activations_are_those_of_a_real_step_and_what_backward_needs(label):
    with torch.device("meta"):
        model = deep()
    batch = batch_argument("4096x64")
    traced = peak_of_pass(model, ROWS[label], batch, torch.device("meta"), None)
    real = peak_of_pass(model, ROWS[label], batch, torch.device("cpu"), None)
    assert traced == real
    # Each tanh keeps its output, which is the next layer's input; the passes add a few of those.
    kept = 6 * 4096 * 64 * (4 if label == "32-true" else 2)
    assert kept < traced < 2.2 * kept


def test_released_gradients_and_activations_share_the_peak(capsys, tmp_path):
    pytest.importorskip("transformers")
    path = config(tmp_path / "model", LLAMA)
    status, found, _ = estimate(capsys, path, "--batch", "2x32")
    assert status == 0
    assert all(row["activations"] > 0 for row in found["rows"])
    for row, plain in zip(found["rows"], estimate(capsys, path)[1]["rows"], strict=True):
        assert row["peak"] > plain["peak"]
        assert plain["activations"] is None


def test_people_see_tables_and_scripts_a_file(capsys, tmp_path):
    assert cli.main(["estimate", "8B", "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert "GB (10^9 bytes) on one device" in out
    assert "GB on each of 8 ranks of fully_shard" in out
    assert "GB of weights and states on each of 8 ranks of DeepSpeed" in out
    assert "activations are not counted: --batch" in out
    assert json.loads((tmp_path / "found.json").read_text())["kind"] == "estimate"


def test_an_interrupt_ends_without_a_traceback(capsys, monkeypatch):
    def interrupted(text):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_bf16.tools.estimate.command.model_shapes", interrupted)
    assert cli.main(["estimate", "8B"]) == 130
    assert capsys.readouterr().err == "python -m torch_bf16 estimate: interrupted\n"


def test_a_config_of_70_billion_takes_less_than_100_megabytes(tmp_path, forked_workers):
    pytest.importorskip("transformers")
    small = config(tmp_path / "small", LLAMA)
    large = config(tmp_path / "model", SEVENTY)
    grown = peak_growth(estimated, (small,), (large,), 1, 250)
    assert grown is None or 0 <= grown < 10**8


def estimated(path):
    assert cli.main(["estimate", str(path), "--ranks", "64"]) == 0


def test_sources_name_what_they_take():
    for word in ("config.json", "module:factory", "checkpoint", "8B"):
        assert word in sources.KINDS
