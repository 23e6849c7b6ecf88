"""The examples that show one way to train each, as a user would start them."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import digits_cnn
import fabric
import fsdp2
import lightning_trainer
import nanogpt_char
import pytest
import pytorch_loop
import torch
import torch.distributed.checkpoint as dcp
from forked_scripts import run_script
from free_port import free_port
from ranks import RankError

EXAMPLES = Path(__file__).parents[2] / "examples"
MODES = ("bf16-stochastic", "bf16-fp32-master")
TINY = ["--batch-size=2", "--context=16", "--width=16", "--layers=1", "--corpus-bytes=200000"]


@pytest.fixture(autouse=True)
def in_an_empty_folder_and_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Many CPUs are slow at products in bf16.
    monkeypatch.setenv("BF16_COMPUTE", "fp32")


@pytest.mark.parametrize("precision", MODES)
def test_a_resumed_pytorch_loop_has_the_bits_of_one_that_never_stopped(precision: str) -> None:
    options = [*TINY, "--device=cpu", f"--precision={precision}"]
    pytorch_loop.main([*options, "--steps=5", "--checkpoint=whole.pt"])
    pytorch_loop.main([*options, "--steps=3", "--checkpoint=half.pt"])
    pytorch_loop.main([*options, "--steps=5", "--resume=half.pt", "--checkpoint=resumed.pt"])
    whole, resumed = torch.load("whole.pt"), torch.load("resumed.pt")
    assert whole["step"] == resumed["step"] == 5
    for name, weight in whole["model"].items():
        assert torch.equal(weight, resumed["model"][name]), name


def test_a_checkpoint_that_has_all_steps_is_not_written_again() -> None:
    options = [*TINY, "--device=cpu", "--precision=fp32"]
    pytorch_loop.main([*options, "--steps=2"])
    saved = Path("loop.pt").read_bytes()
    with pytest.raises(SystemExit, match=r"loop\.pt has 2 steps already: --steps 2 must be more"):
        pytorch_loop.main([*options, "--steps=2", "--resume=loop.pt"])
    assert Path("loop.pt").read_bytes() == saved


def test_the_pytorch_loop_needs_a_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pytorch_loop.main(["--micro-batches=0"])
    assert "--micro-batches 0 must be at least 1" in capsys.readouterr().err


def test_the_pytorch_loop_runs_in_fp32_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert math.isfinite(
        pytorch_loop.main([*TINY, "--device=cpu", "--steps=2", "--precision=fp32"])
    )
    assert "step 2: loss" in capsys.readouterr().out


def test_fsdp2_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    first, other = run_as_torchrun_does(2, "--steps=2", folder=tmp_path)
    assert "step 2: loss" in first
    assert "momentum_buffer" not in first
    assert "loss" not in other
    (second,) = run_as_torchrun_does(1, "--steps=4", "--resume", folder=tmp_path)
    assert "step 4: loss" in second
    assert "step 2:" not in second


def run_as_torchrun_does(world: int, *options: str, folder: Path) -> list[str]:
    """What each process of the example prints, with torchrun's environment."""
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{free_port()}"}

    def rank(number: int) -> str:
        place = {"RANK": f"{number}", "LOCAL_RANK": f"{number}", "WORLD_SIZE": f"{world}"}
        return run_script(EXAMPLES / "fsdp2.py", *TINY, *options, folder=folder, **meeting, **place)

    with ThreadPoolExecutor(world) as pool:
        return [*pool.map(rank, range(world))]


def train_fsdp2(options: list[str]) -> float:
    return fsdp2.train(fsdp2.parse_arguments(options), torch.device("cpu"))


def test_fsdp2_with_muon_goes_on_with_another_number_of_processes(ranks, tmp_path: Path) -> None:
    options = [*TINY, "--optimizer=muon", f"--checkpoint={tmp_path}"]
    ranks(2, train_fsdp2, [*options, "--steps=2"])
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert any("momentum_buffer" in name for name in saved)
    (loss,) = ranks(1, train_fsdp2, [*options, "--steps=4", "--resume"])
    assert 4 < loss < 7
    with pytest.raises(RankError, match="has 4 steps already: --steps 4 must be more"):
        ranks(1, train_fsdp2, [*options, "--steps=4", "--resume"])


def test_fsdp2_refuses_batches_of_which_a_process_would_have_more_than_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fsdp2.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(fsdp2.distributed, "get_world_size", lambda: 3)
    with pytest.raises(SystemExit, match="16 cannot be divided by 3 processes; 18 can"):
        train_fsdp2([])


@pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers and logging intervals
def test_the_lightning_trainer_reports_a_validation_loss() -> None:
    assert 4 < lightning_trainer.main([*TINY, "--steps=3", "--precision=bf16-stochastic"]) < 7


@pytest.mark.parametrize("precision", [*MODES, "bf16-mixed", "bf16-true", "32-true"])
def test_the_monitor_is_for_the_modes_of_this_package(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(callbacks: list, **options: object) -> None:
        assert bool(callbacks) is (precision in MODES)
        raise InterruptedError

    monkeypatch.setattr(lightning_trainer.lightning, "Trainer", trainer)
    with pytest.raises(InterruptedError):
        lightning_trainer.main([*TINY, "--steps=1", f"--precision={precision}"])


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fabric_saves_bf16_weights(precision: str) -> None:
    assert math.isfinite(fabric.main([*TINY, "--steps=3", f"--precision={precision}"]))
    saved = torch.load("fabric.ckpt", weights_only=False)["model"]
    assert saved["blocks.0.qkv.weight"].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_fabric_example_does_not_launch_what_fabric_run_has_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What that command sets for the processes that it starts.
    for name, value in {"CLI_USED": "1", "PRECISION": MODES[0], "ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(f"LT_{name}", value)
    assert math.isfinite(fabric.main([*TINY, "--steps=1"]))
    saved = torch.load("fabric.ckpt", weights_only=False)["model"]
    assert saved["blocks.0.qkv.weight"].dtype == torch.bfloat16


def test_the_hugging_face_trainer_writes_on_from_what_it_saved() -> None:
    script, here = EXAMPLES / "hf_trainer.py", Path.cwd()
    tiny = ["--max_steps=2", "--width=16", "--layers=1", "--corpus_bytes=200000", "--context=16"]
    output = run_script(script, *tiny, "--optim=adamw_bf16_stochastic", folder=here)
    assert "validation loss" in output
    saved = json.loads(Path("hf-trainer/config.json").read_text())
    assert saved["dtype"] == "bfloat16"
    assert "def " in run_script(script, "--prompt=def ", folder=here)


def test_a_model_that_is_not_there_is_not_looked_up_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hf_trainer = pytest.importorskip("hf_trainer")
    with pytest.raises(SystemExit, match="none does not exist: train first, without --prompt"):
        hf_trainer.main(["--output_dir=none", "--prompt=def "])
    trl_sft = pytest.importorskip("trl_sft")
    with pytest.raises(SystemExit):
        trl_sft.main(["--lora", "--base=none"])
    assert "--base none does not exist: train it first, without --lora" in capsys.readouterr().err


def test_trl_fine_tunes_all_weights_and_then_an_adapter() -> None:
    tiny = ["--steps=2", "--batch-size=2", "--width=16", "--layers=1"]

    def train(*options: str) -> str:
        mode = {"ACCELERATE_MIXED_PRECISION": "bf16-stochastic"}
        return run_script(EXAMPLES / "trl_sft.py", *tiny, *options, folder=Path.cwd(), **mode)

    assert "saved to trl-sft\n" in train()
    output = train("--lora", "--base=trl-sft", "--output=adapter")
    assert "saved to adapter\n" in output
    adapter = Path("adapter/adapter_config.json")
    assert json.loads(adapter.read_text())["base_model_name_or_path"] == "trl-sft"


def test_the_digits_are_learned_in_every_precision() -> None:
    found = digits_cnn.main(["--epochs=1", "--batch-size=16"])
    assert set(found) == set(digits_cnn.PRECISIONS)
    for precision, (_, accuracy) in found.items():
        assert accuracy > 0.9, precision


def test_nanogpts_settings_are_trained_in_every_precision() -> None:
    letters = random.Random(0).choices("abcdefgh \n", k=4000)
    Path("text.txt").write_text("".join(letters))
    options = ["--text=text.txt", "--steps=1", "--eval-batches=1", "--json=record.json"]
    losses = nanogpt_char.main(options)
    assert set(losses) == set(nanogpt_char.PRECISIONS)
    assert json.loads(Path("record.json").read_text())["losses"] == losses
    for precision, (loss,) in losses.items():
        assert loss == pytest.approx(math.log(10), abs=0.4), precision


def test_a_text_may_have_more_characters_than_a_byte_has_values() -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 400)))
    Path("text.txt").write_text(text, encoding="utf-8")
    training, validation, characters = nanogpt_char.load_text(Path("text.txt"))
    assert [*training, *validation] == [*range(400)]
    assert characters == 400


def test_nanogpts_learning_rate_is_that_of_its_configuration() -> None:
    settings = nanogpt_char.Settings()
    assert settings.lr(0) == pytest.approx(1e-3 / 101)
    assert settings.lr(100) == pytest.approx(1e-3)
    assert settings.lr(1050) == pytest.approx((1e-3 + 1e-4) / 2)
    assert settings.lr(2000) == pytest.approx(1e-4)
