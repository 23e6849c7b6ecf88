"""What an installed torch-bf16 must do, whatever it is installed beside; `compat.py` runs it.

python compat_smoke.py     # in an empty folder, with the environment's own python

Prints one JSON object: the versions, and for each part "ok", "not installed", or what went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

MODES = ("bf16-fp32-master", "bf16-stochastic")
PACKAGES = ("torch", "triton", "numba", "lightning", "accelerate", "transformers", "torch-bf16")


class Failed(Exception):
    """What was seen is not what should be."""


def require(holds: bool, claim: str) -> None:
    if not holds:
        raise Failed(claim)


def plain_pytorch() -> None:
    """Both modes learn, keep their bytes and resume bit for bit."""
    import torch

    import torch_bf16

    here = Path(torch_bf16.__file__).parent
    require("site-packages" in here.parts, f"torch_bf16 comes from {here}")
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))

    def made(mode: str):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return torch_bf16.prepare(model, optimizer, mode)

    def steps(model, optimizer, n: int) -> float:
        loss = torch.tensor(0.0)
        for _ in range(n):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x) - x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    for mode in MODES:
        model, optimizer = made(mode)
        first, last = steps(model, optimizer, 1), steps(model, optimizer, 30)
        require(last < 0.9 * first, f"{mode}: the loss went from {first} to {last}")
        require(model[0].weight.dtype == torch.bfloat16, f"{mode}: {model[0].weight.dtype}")
        torch.save((model.state_dict(), optimizer.state_dict()), "plain.pt")
        steps(model, optimizer, 3)
        resumed, other = made(mode)
        weights, states = torch.load("plain.pt")
        resumed.load_state_dict(weights)
        other.load_state_dict(states)
        steps(resumed, other, 3)
        same = all(map(torch.equal, model.parameters(), resumed.parameters()))
        require(same, f"{mode}: a resumed run has other bits")


def lightning() -> None:
    """Trainer by name, resumed; Fabric."""
    import lightning
    import torch
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 32)

        def training_step(self, batch, batch_idx):
            return (self.layer(batch) - batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = DataLoader(torch.randn(8, 4, 32), batch_size=None)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for mode in MODES:
        module = Module()
        trainer = lightning.Trainer(precision=mode, max_epochs=1, accelerator="cpu", **quiet)
        trainer.fit(module, data)
        require(module.layer.weight.dtype == torch.bfloat16, f"{mode}: {module.layer.weight.dtype}")
        trainer.save_checkpoint("lightning.ckpt")
        again = lightning.Trainer(precision=mode, max_epochs=2, accelerator="cpu", **quiet)
        again.fit(Module(), data, ckpt_path="lightning.ckpt")
        require(again.global_step == 16, f"{mode}: resumed to step {again.global_step}")
        fabric = lightning.Fabric(precision=mode, accelerator="cpu", devices=1)
        model = torch.nn.Linear(32, 32)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        fabric.backward(model(torch.randn(4, 32)).square().mean())
        optimizer.step()
        require(model.weight.dtype == torch.bfloat16, f"Fabric, {mode}: {model.weight.dtype}")


def accelerate() -> None:
    """Accelerator by name and by the launcher, its state saved and loaded."""
    import torch
    from accelerate import Accelerator

    for mode in MODES:
        accelerator = Accelerator(mixed_precision=mode, cpu=True)
        model = torch.nn.Linear(32, 32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.randn(4, 32)).square().mean())
        optimizer.step()
        kept = model.weight.clone()
        accelerator.save_state("accelerate-state")
        with torch.no_grad():
            model.weight.zero_()
        accelerator.load_state("accelerate-state")
        require(torch.equal(kept, model.weight), f"{mode}: load_state gave other weights")
        require(accelerator.mixed_precision == mode, f"{mode}: {accelerator.mixed_precision}")
        accelerator.free_memory()
        accelerator.state._reset_state(True)
    Path("launched.py").write_text(
        "from accelerate import Accelerator\nprint(str(Accelerator().mixed_precision))\n"
    )
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]
    said = run(*launch, "--mixed_precision=bf16-stochastic", "launched.py")
    require("bf16-stochastic" in said, f"accelerate launch: {said}")


def transformers() -> None:
    """The Trainer by the name of its optimizer, saved and loaded."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    rows = torch.randint(0, 64, (16, 16))
    for optim in ("adamw_bf16_stochastic", "adamw_bf16_fp32_master"):
        arguments = TrainingArguments(
            "trainer", max_steps=2, optim=optim, use_cpu=True, report_to=[], save_strategy="no"
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
        trainer.train()
        trainer.save_model("saved")
        weight = GPT2LMHeadModel.from_pretrained("saved").transformer.wte.weight
        require(torch.isfinite(weight).all().item(), f"{optim}: saved weights are not finite")


def command_line() -> None:
    """The commands start, and `info` knows itself."""
    for command in (["info"], ["estimate", "8B"], ["--help"]):
        said = run("-m", "torch_bf16", *command)
        require(bool(said.strip()), f"torch_bf16 {' '.join(command)} says nothing")


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False
    )
    require(done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()[-400:]}")
    return done.stdout


PARTS: dict[str, tuple[Callable[[], None], str]] = {
    "plain PyTorch": (plain_pytorch, "torch"),
    "Lightning": (lightning, "lightning"),
    "Accelerate": (accelerate, "accelerate"),
    "transformers": (transformers, "transformers"),
    "command line": (command_line, "torch"),
}


def outcome(part: Callable[[], None], package: str) -> str:
    if find_spec(package) is None:
        return "not installed"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            part()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:400]
    return "ok"


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    versions = {"python": platform.python_version()} | {each: installed(each) for each in PACKAGES}
    parts = {name: outcome(*part) for name, part in PARTS.items()}
    print(json.dumps({"versions": versions, "parts": parts}))


if __name__ == "__main__":
    main()
