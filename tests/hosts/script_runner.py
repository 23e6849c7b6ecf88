"""Runs a script of somebody else on tiny models and data, and writes what it trained.

``script_runner.py RECORD FOLDER MOST HOST SCRIPT OPTIONS...`` ends at MOST backward passes. Models
and tokenizers that it asks the hub for are small and of fixed weights, and data sets are those of
the host's own tests, or made up. Names in braces in an option are folders: ``{llama}``,
``{diffusion}``, ``{text}``, ``{preferences}``, ``{prompts}``, ``{images}``, ``{captioned}``,
``{classes}``, and ``{out}``, which is empty. ``BF16_SCRIPT_PRECISION`` is the precision of Trainers
and Fabrics of Lightning; where timm makes an optimizer, ``BF16_MODE`` prepares it with the model.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import json
import os
import runpy
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from image_stubs import save_captioned, save_classes, save_images, stub_images
from torch.optim.optimizer import register_optimizer_step_post_hook

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "accelerate"), str(ROOT / "examples")]

_losses: list[float] = []
_found: dict[str, list[str]] = {"weights": [], "optimizers": []}


class _Enough(BaseException):
    """As many backward passes as were asked for have run."""


class _Metric:
    """In the place of those of ``evaluate``, which would be fetched."""

    def add_batch(self, **_: Any) -> None: ...

    def compute(self, **_: Any) -> dict[str, float]:
        return {"accuracy": 0.5, "f1": 0.5}


def stub_metrics() -> None:
    """Let ``import evaluate`` find one metric for all names."""
    stub = types.ModuleType("evaluate")
    stub.__spec__ = importlib.machinery.ModuleSpec("evaluate", None)
    stub.load = lambda *_, **__: _Metric()  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["evaluate"] = stub


def stub_hub() -> None:
    """Let names of the hub stand for tiny models of fixed weights; folders are left alone."""
    import datasets
    import transformers
    from tiny_llm import llama, tokenizer

    def classifier() -> Any:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=258,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
        )
        return transformers.BertForSequenceClassification(config)

    def of_bytes() -> Any:
        made = tokenizer()
        made.model_max_length = 128
        return made

    stubs = {
        "AutoTokenizer": of_bytes,
        "AutoModelForSequenceClassification": classifier,
        "AutoModelForCausalLM": llama,
    }
    for name, make in stubs.items():
        kind = getattr(transformers, name)

        def from_pretrained(
            where: Any, *args: Any, _own: Any = kind.from_pretrained, _make: Any = make, **kw: Any
        ) -> Any:
            return _own(where, *args, **kw) if Path(where).is_dir() else _make()

        kind.from_pretrained = from_pretrained

    own = datasets.load_dataset

    def load_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        if path == "csv" or Path(path).is_dir():
            return own(path, *args, **kwargs)
        rows = next(Path("tests").rglob("MRPC"))  # of the host's own tests
        splits = {"train": "train.csv", "validation": "dev.csv", "test": "dev.csv"}
        files = {split: str(rows / name) for split, name in splits.items()}
        found = own("csv", data_files=files).class_encode_column("label")
        for name, rows in found.items():  # more than the largest batch
            found[name] = datasets.concatenate_datasets([rows] * 8)
        return found.map(lambda row, n: {"idx": n}, with_indices=True)

    datasets.load_dataset = load_dataset


def stub_lightning(precision: str) -> None:
    """Let Trainers and Fabrics that are given no precision take this one."""
    from lightning.fabric.connector import _Connector
    from lightning.pytorch.demos.transformer import WikiText2
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from suite_plugin import force

    def download(destination: Path) -> None:
        destination.parent.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(50, (16_000,), generator=generator).tolist()
        lines = (" ".join(f"w{(start + n) % 50}" for n in range(10)) for start in starts)
        destination.write_text("\n".join(lines))

    WikiText2.download = staticmethod(download)
    for connector in (_Connector, _AcceleratorConnector):
        force(connector, precision)


def stub_timm(mode: str) -> None:
    """What a user of timm adds to its loop, which knows no modes: two calls."""
    from timm import optim
    from timm.task import TrainingTask

    import torch_bf16

    own = optim.create_optimizer_v2

    def create_optimizer_v2(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
        return torch_bf16.prepare(model, own(model, **options), mode)[1]

    own_setup = TrainingTask.setup_ema

    def setup_ema(self: TrainingTask, **options: Any) -> torch.nn.Module:
        ema = own_setup(self, **options)
        ema.module.float()
        return ema

    optim.create_optimizer_v2 = create_optimizer_v2
    TrainingTask.setup_ema = setup_ema


def record(most: int) -> None:
    """Note losses where a backward pass starts, what there is then, and what steps."""
    own = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if len(_losses) == most:
            raise _Enough
        if not _losses:
            _found["weights"] = _parameters()
        _losses.append(float(self.detach().mean()))
        own(self, *args, **kwargs)

    def stepped(optimizer: Any, *_: Any) -> None:
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        if name not in _found["optimizers"]:
            _found["optimizers"].append(name)

    torch.Tensor.backward = backward
    register_optimizer_step_post_hook(stepped)


def _parameters() -> list[str]:
    """How many elements are trained and frozen in which dtype, in all modules that are alive."""
    dtypes: Counter[str] = Counter()
    for p in gc.get_objects():
        if issubclass(type(p), torch.nn.Parameter):
            kind = "trained" if p.requires_grad else "frozen"
            dtypes[f"{kind} {str(p.dtype).removeprefix('torch.')}"] += p.numel()
    return [f"{n} {name}" for name, n in sorted(dtypes.items())]


def make_folders(folder: Path, options: list[str]) -> list[str]:
    """The options, with folders in place of names in braces."""
    names = (
        "llama",
        "diffusion",
        "text",
        "preferences",
        "prompts",
        "images",
        "captioned",
        "classes",
        "out",
    )
    places = {name: folder / name for name in names}
    for each in places.values():
        each.mkdir()
    if any("{diffusion}" in each for each in options):
        from tiny_diffusion import save_pipeline

        save_pipeline(places["diffusion"])
    for name, save in (
        ("images", save_images),
        ("captioned", save_captioned),
        ("classes", save_classes),
    ):
        if f"{{{name}}}" in options:
            save(places[name])
    if any("{llama}" in each for each in options):
        from tiny_llm import llama, tokenizer

        llama().save_pretrained(places["llama"])
        tokenizer().save_pretrained(places["llama"])
    words = [f"{n} and {n + 1} and {n + 2}" for n in range(64)]
    rows = {
        "text": [{"text": each} for each in words],
        "preferences": [
            {"prompt": each[:5], "chosen": each[5:], "rejected": each[:4:-1]} for each in words
        ],
        "prompts": [{"prompt": each} for each in words],
    }
    for name, lines in rows.items():
        text = "\n".join(map(json.dumps, lines))
        (places[name] / "train.jsonl").write_text(text)
    return [each.format(**places) if "{" in each else each for each in options]


def main() -> None:
    """Run the script as its own program would."""
    file, folder, most, host, script, *options = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    script = str(Path(script).absolute())
    stub_images()  # before transformers looks for torchvision
    sys.argv = [script, *make_folders(Path(folder), options)]
    sys.path.insert(0, str(Path(script).parent))
    stub_metrics()
    if host == "lightning":
        stub_lightning(os.environ["BF16_SCRIPT_PRECISION"])
        os.chdir(Path(folder) / "out")
    elif host == "timm":
        if mode := os.environ.get("BF16_MODE"):
            stub_timm(mode)
    elif host != "diffusers":  # its scripts look for parts in a folder
        stub_hub()
    record(int(most))
    with contextlib.suppress(_Enough):
        runpy.run_path(script, run_name="__main__")
    Path(file).write_text(json.dumps({"losses": _losses, **_found}))


if __name__ == "__main__":
    main()
