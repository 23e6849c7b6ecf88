"""The way out: exact fp32 weights and moments, as objects and as files."""

import os
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from exported import export_file
from optimizer_cases import RECIPES, bits, every_recipe, take_steps
from optimizer_wrappers import Wrapper

import torch_bf16
from torch_bf16 import fp32_optimizer_state_dict, fp32_state_dict
from torch_bf16.checkpoints.export import fp32_weights
from torch_bf16.checkpoints.reader import OptimizerStates, open_checkpoint
from torch_bf16.states.recoding import stored_format
from torch_bf16.tools import cli

LIKE = {"lr": 0.01, "weight_decay": 0.1}


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3), torch.nn.LayerNorm(3)
    )
    model[2].bias = model[3].bias  # tied
    return model


def make_run(recipe, named=True):
    model = torch_bf16.cast_model(make_model(), RECIPES[recipe])
    parameters = model.named_parameters() if named else model.parameters()
    optimizer = torch_bf16.AdamW(parameters, **LIKE, recipe=RECIPES[recipe])
    return model, optimizer


def give_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
        parameter.grad = gradient.to(parameter.dtype)


def fp32_run(steps):
    """The same run in fp32, by an optimizer of the same arithmetic."""
    model = make_model()
    optimizer = torch_bf16.AdamW(model.parameters(), **LIKE)
    for seed in range(steps):
        give_gradients(model.parameters(), seed)
        optimizer.step()
    return model, optimizer


# From its first step on "mixed" has moments that are not fp32.
@pytest.mark.parametrize(("recipe", "steps"), [("master", 0), ("master", 3), ("mixed", 0)])
def test_exported_weights_are_those_of_the_run_in_fp32(recipe, steps):
    model, optimizer = make_run(recipe)
    for seed in range(steps):
        give_gradients(model.parameters(), seed)
        optimizer.step()
    expected, _ = fp32_run(steps)
    exported = fp32_state_dict(model, optimizer)
    assert exported.keys() == expected.state_dict().keys()
    assert exported._metadata == expected.state_dict()._metadata
    for name, value in expected.state_dict().items():
        assert exported[name].dtype == value.dtype
        if value.is_floating_point():
            assert torch.equal(bits(exported[name]), bits(value)), name
    make_model().load_state_dict(exported)


@every_recipe
def test_training_goes_on_in_plain_torch_as_it_would_have_here(recipe):
    model, optimizer = make_run(recipe)
    for seed in range(3):
        give_gradients(model.parameters(), seed)
        optimizer.step()
    plain = make_model()
    plain.load_state_dict(fp32_state_dict(model, optimizer))
    theirs = torch.optim.AdamW(plain.parameters(), **LIKE, foreach=False)
    theirs.load_state_dict(fp32_optimizer_state_dict(optimizer))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        state = theirs.state[q]
        assert state["step"] == 3
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].dtype == torch.float32
            assert torch.equal(state[key], optimizer.state[p][key].float())
    give_gradients(model.parameters(), 3)
    give_gradients(plain.parameters(), 3)
    optimizer.step()
    theirs.step()
    exact = fp32_state_dict(model, optimizer)
    for name, value in plain.named_parameters():
        # Where the recipe is exact, a few roundings of the step; else one of bf16's.
        tolerance = 1e-6 if recipe == "master" else 2.0**-7
        torch.testing.assert_close(exact[name], value.detach(), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("moments", ["bf16_stochastic", "int8"])
def test_exported_moments_are_the_fp32_numbers_that_the_next_step_reads(moments):
    """torch casts what it loads, so loading does not show the dtype."""
    recipe = torch_bf16.Recipe("own", exp_avg=moments, exp_avg_sq=moments)
    model = torch_bf16.cast_model(torch.nn.Linear(64, 64), recipe)
    optimizer = torch_bf16.AdamW(model.parameters(), **LIKE, recipe=recipe)
    give_gradients(model.parameters(), 0)
    optimizer.step()
    for p, exported in zip(
        model.parameters(), fp32_optimizer_state_dict(optimizer)["state"].values(), strict=True
    ):
        assert exported.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key in ("exp_avg", "exp_avg_sq"):
            stored = stored_format(optimizer.state[p], key)
            planes = [optimizer.state[p][name] for name in stored.plane_names(key)]
            assert exported[key].dtype == torch.float32
            assert torch.equal(exported[key], stored.decode(planes))


def test_without_an_optimizer_weights_are_upcast():
    model, _ = make_run("master")
    for name, value in fp32_state_dict(model).items():
        assert value.dtype != torch.bfloat16
        assert torch.equal(value, model.state_dict()[name].to(value.dtype))


def test_what_shares_an_address_with_a_weight_and_no_shape_has_no_master_of_it():
    model = torch.nn.ParameterDict({"a": torch.randn(4, 4), "b": torch.ones(0, 4)})
    model["c"] = torch.nn.Parameter(torch.ones(0, 8), requires_grad=False)
    model = torch_bf16.cast_model(model, "bf16-fp32-master")
    named = [("a", model["a"]), ("b", model["b"])]
    optimizer = torch_bf16.AdamW(named, recipe="bf16-fp32-master")
    give_gradients([model["a"], model["b"]], 0)
    optimizer.step()
    saved = {**model.state_dict(), "tied": model["a"].detach(), "first": model["a"].detach()[:1]}
    weights, exact = fp32_weights(saved, [OptimizerStates.of(optimizer.state_dict())])
    assert exact == 3
    assert torch.equal(weights["tied"], optimizer.exact_weight(model["a"]))
    assert torch.equal(weights["first"], model["a"][:1].float())
    assert weights["c"].shape == (0, 8)


def test_a_weight_written_from_outside_is_exported_as_it_was_written():
    model, optimizer = make_run("master")
    take_steps(optimizer, [1])
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    assert (fp32_state_dict(model, optimizer)["0.weight"] == 0.5).all()


def saved_run(folder, kind):
    model, optimizer = make_run("master", named=kind != "unnamed")
    take_steps(optimizer, range(2))
    path = folder / "run.pt"
    if kind == "lightning":
        content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
        torch.save(content, path)
    elif kind == "torch":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    else:
        torch_bf16.save_checkpoint(path, model=model, optimizer=optimizer)
    return model, optimizer, path


@pytest.mark.parametrize("kind", ["ours", "torch", "lightning"])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_the_command_writes_the_exact_weights_of_a_file(kind, suffix, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer, path = saved_run(tmp_path, kind)
    output = tmp_path / f"weights.{suffix}"
    assert cli.main(["export", str(path), str(output)]) == 0
    assert "from exact masters" in capsys.readouterr().out
    read = safetensors.load_file(output) if suffix == "safetensors" else torch.load(output)
    expected = fp32_state_dict(model, optimizer)
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(read[name], value), name
    assert cli.main(["export", str(path), str(output), "--dtype", "bfloat16"]) == 0
    read = safetensors.load_file(output) if suffix == "safetensors" else torch.load(output)
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
    assert {each.name for each in tmp_path.iterdir()} == {path.name, output.name}


def test_weights_and_optimizer_may_be_in_two_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer, _ = saved_run(tmp_path, "ours")
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    export_file(
        tmp_path / "model.safetensors",
        tmp_path / "out.safetensors",
        optimizer=tmp_path / "optimizer.bin",
    )
    read = safetensors.load_file(tmp_path / "out.safetensors")
    for name, value in fp32_state_dict(model, optimizer).items():
        # Such files have no tied weights: 3.bias is known by its bits, which are those of 2.bias.
        assert torch.equal(read[name], value), name


def test_without_safetensors_its_own_name_is_what_to_install(tmp_path, monkeypatch):
    torch.save({"weight": torch.ones(2)}, tmp_path / "run.pt")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(
        torch_bf16.CheckpointError, match="pip install safetensors, or give the target"
    ):
        export_file(tmp_path / "run.pt", tmp_path / "out.safetensors")


@pytest.mark.parametrize("kind", ["unnamed", "no weights", "absent", "damaged", "safetensors"])
def test_what_cannot_be_exported_says_why_and_writes_nothing(kind, tmp_path, capsys):
    model, _, path = saved_run(tmp_path, kind)
    match = "has no parameter names"
    if kind == "no weights":
        torch_bf16.save_checkpoint(path, step=1)
        match = "has no weights: it holds step"
    elif kind == "absent":
        path.unlink()
        match = "there is no"
    elif kind == "damaged":
        data = bytearray(path.read_bytes())
        data[data.index(model[0].weight.detach().view(torch.uint8).numpy().tobytes())] ^= 1
        path.write_bytes(data)
        match = "was cut short or damaged"
    elif kind == "safetensors":
        path = tmp_path / "half.safetensors"
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_model(model, path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        match = f"half.safetensors ({path.stat().st_size:,} bytes) was cut short or damaged"
    output = tmp_path / "out.pt"
    assert cli.main(["export", str(path), str(output)]) == 2
    assert match in capsys.readouterr().err
    assert not output.exists()


def test_a_checkpoint_is_not_written_over(tmp_path, capsys):
    _, _, path = saved_run(tmp_path, "ours")
    content = path.read_bytes()
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    for output in (path, link):
        assert cli.main(["export", str(path), str(output)]) == 2
        assert "give another name for the output" in capsys.readouterr().err
    assert path.read_bytes() == content


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_full_disk_is_told_and_leaves_nothing_half_written(suffix, tmp_path, capsys, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    _, _, path = saved_run(tmp_path, "ours")
    output = tmp_path / f"out.{suffix}"
    output.write_text("before")

    def fill(content, target):
        target.write_text("half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    library, name = (torch, "save") if suffix == "pt" else (safetensors, "save_file")
    monkeypatch.setattr(library, name, fill)
    assert cli.main(["export", str(path), str(output)]) == 2
    assert f"{output} was not written: [enforce fail" in capsys.readouterr().err
    assert output.read_text() == "before"
    assert {each.name for each in tmp_path.iterdir()} == {path.name, output.name}


def test_a_device_is_not_replaced_by_a_file(tmp_path, capsys):
    _, _, path = saved_run(tmp_path, "ours")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert cli.main(["export", str(path), str(pipe)]) == 2
    assert "pipe is a device or a pipe, which the file would replace" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_the_names_of_torchs_tutorial_are_read(tmp_path):
    model, optimizer, path = saved_run(tmp_path, "ours")
    content = {"model_state_dict": model.state_dict()}
    torch.save({**content, "optimizer_state_dict": optimizer.state_dict()}, tmp_path / "tut.pt")
    for source in (path, tmp_path / "tut.pt"):
        assert cli.main(["export", str(source), str(source.with_suffix(".out"))]) == 0
    ours, theirs = (torch.load(each.with_suffix(".out")) for each in (path, tmp_path / "tut.pt"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", ["missing", "empty", "no weights", "cut short", "another run"])
def test_a_folder_that_cannot_be_exported_says_why_and_writes_nothing(kind, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer, file = saved_run(tmp_path, "ours")
    file.unlink()
    folder, output = tmp_path / "state", tmp_path / "out.pt"
    match = "has no weights"
    if kind != "missing":
        folder.mkdir()
    else:
        match = "there is no"
    if kind == "no weights":
        torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    elif kind in ("cut short", "another run"):
        weights = {name: each.clone() for name, each in model.state_dict().items()}
        if kind == "another run":
            weights = {f"{name}_of_another": each for name, each in weights.items()}
            match = "belong to no weight here"
        safetensors.save_file(weights, folder / "model.safetensors")
        torch.save(optimizer.state_dict(), folder / "optimizer.bin")
        if kind == "cut short":
            data = (folder / "optimizer.bin").read_bytes()
            (folder / "optimizer.bin").write_bytes(data[: len(data) // 2])
            match = "was cut short or damaged"
    assert cli.main(["export", str(folder), str(output)]) == 2
    assert match in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.filterwarnings("ignore::UserWarning")  # DCP without a process group
def test_a_folder_of_dcp_is_exported(tmp_path):
    model, optimizer, _ = saved_run(tmp_path, "ours")
    content = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(content, checkpoint_id=tmp_path / "dcp")
    header = open_checkpoint(tmp_path / "dcp").optimizers[0].header
    assert header["recipe"] == content["optim"]["torch_bf16"]["recipe"]
    assert cli.main(["export", str(tmp_path / "dcp"), str(tmp_path / "out.pt")]) == 0
    read, expected = torch.load(tmp_path / "out.pt"), fp32_state_dict(model, optimizer)
    for name, value in expected.items():
        assert torch.equal(read[name], value), name  # of 3.bias too, which is tied to 2.bias


def two_optimizers(named=True):
    """One for the first linear layer, one for the rest."""
    model = torch_bf16.cast_model(make_model(), RECIPES["master"])
    every = list(model.named_parameters())
    parts = [every[:2], every[2:]]
    if not named:
        parts = [[(name.partition(".")[2], p) for name, p in part] for part in parts]
    optimizers = [torch_bf16.AdamW(part, **LIKE, recipe=RECIPES["master"]) for part in parts]
    for each in optimizers:
        take_steps(each, [1])
    return model, optimizers


def exact_weights_of(model, optimizers):
    owners = {p: o for o in optimizers for g in o.param_groups for p in g["params"]}
    return {
        name: owners[p].exact_weight(p) if p in owners else p.detach()
        for name, p in model.state_dict(keep_vars=True).items()
    }


def test_the_masters_of_all_optimizers_are_kept_however_they_are_wrapped():
    model, (one, other) = two_optimizers()
    exact = exact_weights_of(model, (one, other))
    found = fp32_state_dict(model, one, Wrapper(Wrapper(other)))
    assert not torch.equal(exact["2.weight"], model[2].weight.float())
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    with pytest.raises(ValueError, match=r"fp32_state_dict was given an SGD, .*by a recipe"):
        fp32_state_dict(model, torch.optim.SGD(model.parameters()))


def test_a_file_of_two_optimizers_is_exported_with_the_masters_of_both(tmp_path):
    model, optimizers = two_optimizers()
    states = [each.state_dict() for each in optimizers]
    torch.save({"state_dict": model.state_dict(), "optimizer_states": states}, tmp_path / "l.ckpt")
    assert "6 of them from exact masters" in export_file(tmp_path / "l.ckpt", tmp_path / "w.pt")
    read, exact = torch.load(tmp_path / "w.pt"), exact_weights_of(model, optimizers)
    assert all(torch.equal(read[name], exact[name]) for name in exact)


def test_masters_of_two_optimizers_under_one_name_are_not_exported(tmp_path):
    model, optimizers = two_optimizers(named=False)
    states = [each.state_dict() for each in optimizers]
    torch.save({"model": model.state_dict(), "optimizer": states}, tmp_path / "run.pt")
    with pytest.raises(torch_bf16.CheckpointError, match="several optimizers have an exact master"):
        export_file(tmp_path / "run.pt", tmp_path / "w.pt")


def test_an_optimizers_file_without_one_is_refused(tmp_path):
    *_, path = saved_run(tmp_path, "ours")
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    with pytest.raises(torch_bf16.CheckpointError, match=r"no state dict of an opt.*holds epoch"):
        export_file(path, tmp_path / "w.pt", optimizer=tmp_path / "other.pt")
    assert not (tmp_path / "w.pt").exists()
