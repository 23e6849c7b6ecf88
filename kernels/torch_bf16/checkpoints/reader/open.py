"""Find the files that make up a checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from torch_bf16.errors import CheckpointError, described

from .dcp_folder import read_dcp
from .safetensors_file import read_safetensors
from .saved import Saved
from .torch_file import read_optimizer, read_torch_file

__all__ = ["open_checkpoint"]

_INDEX = ".index.json"
_MODELS = (
    *("adapter_model", "model", "pytorch_model", "diffusion_pytorch_model"),
    "pytorch_model_fsdp",  # Accelerate's, of FULL_STATE_DICT
)
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_STEP = re.compile(r"(?:checkpoint|step|epoch=\d+-step)[-_=](\d+)")

_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.safetensors)")


def open_checkpoint(path: Path, verify: bool = False) -> Saved:
    """Open a checkpoint of any training; its tensors are read when they are needed.

    Args:
        path: a file of safetensors, of torch.save or of Lightning, an index of several, or a folder
            of the Trainer, of Accelerate or of ``torch.distributed.checkpoint``.
        verify: whether to compare the checksums that files of torch.save have, which reads all of
            them; those in a folder of ``torch.distributed.checkpoint`` when they are first read.

    Raises:
        CheckpointError: it is damaged, foreign, one rank's part or holds no weights; the message
            says what works.
        OSError: it does not exist, or cannot be read.
    """
    if path.is_dir():
        found = _folder(path, verify)
        # Accelerate numbers them, and says nowhere which weights belong to which.
        found.further = sorted(path.glob("optimizer_[1-9]*"))
        if found.further and found.optimizers:
            more = ", ".join(each.name for each in found.further)
            found.notes.append(f"of the optimizers of {path}, only the first was read: not {more}")
        if not found.optimizers and (sharded := sorted(path.glob("global_step*"))):
            found.further, found.hidden = sharded, True
            found.notes.append(
                f"{path} has its optimizer's state in DeepSpeed's folder {sharded[-1].name}: it "
                "was not read, nor were the exact masters that it may hold"
            )
    elif not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    elif not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    else:
        found = _file(path, verify)
    if found.step is None and (match := _STEP.search(path.name)):
        found.step = int(match[1])
    return found


def _file(path: Path, verify: bool) -> Saved:
    if not path.stat().st_size:
        raise CheckpointError(f"{path} is empty: the run that wrote it was cut off")
    if path.name.endswith(_INDEX):
        return _read_index(path, verify)
    if path.suffix == ".safetensors":
        return _with_tensors(read_safetensors(path))
    if path.suffix == ".json":
        raise CheckpointError(
            f"{path} is not an index of a checkpoint: such a name ends in {_INDEX}"
        )
    return read_torch_file(path, verify)


def _folder(path: Path, verify: bool) -> Saved:
    if (path / ".metadata").exists():
        return read_dcp(path, verify=verify)
    names = {each.name for each in path.iterdir()}
    if sharded := sorted(path.glob("*model_fsdp_*/.metadata")):
        # Accelerate numbers its models.
        models = [read_dcp(each.parent, verify=verify) for each in sharded]
        found = models[0] if len(models) == 1 else _merge(path, models)
        states = path / "optimizer_0"
        if (states / ".metadata").exists():
            found.optimizers = read_dcp(states, False, verify).optimizers
        return replace(found, path=path, step=_trainer_step(path))
    weights = _weights_in(path, names)
    if not weights:
        raise CheckpointError(_nothing_in(path, names))
    parts = [_file(each, verify) for each in weights]
    found = parts[0] if len(parts) == 1 else _merge(path, parts)
    found.path, found.step = path, _trainer_step(path) or found.step
    for name in _OPTIMIZERS:
        if name in names and not found.optimizers:
            found.optimizers, notes = read_optimizer(path / name, verify)
            found.notes += notes
    return found


def _weights_in(path: Path, names: set[str]) -> list[Path]:
    indices = sorted(path / name for name in names if name.endswith(_INDEX))
    for model in _MODELS:
        if index := [each for each in indices if each.name.startswith(f"{model}.")]:
            return index[:1]
        for suffix in (".safetensors", ".bin"):
            if f"{model}{suffix}" in names:
                # Accelerate adds a number to the files of further models.
                more = re.compile(rf"{model}_\d+\{suffix}")
                found = sorted(name for name in names if more.fullmatch(name))
                return [path / name for name in (f"{model}{suffix}", *found)]
    if indices:
        return indices[:1]
    found = sorted(name for name in names if name.endswith(".safetensors"))
    _check_shards(path, found)
    return [path / name for name in found]


def _check_shards(path: Path, names: list[str]) -> None:
    """Raise if files that are numbered as 00001-of-00003 are not all there, without an index."""
    for name in names:
        if match := _SHARD.fullmatch(name):
            start, count, end = match.groups()
            shards = {
                f"{start}-{k:0{len(count)}}-of-{count}{end}" for k in range(1, int(count) + 1)
            }
            if missing := sorted(shards - {*names})[:4]:
                raise CheckpointError(
                    f"{path} has {name}, but neither an index nor {', '.join(missing)}: the "
                    "checkpoint is incomplete"
                )


def _read_index(path: Path, verify: bool) -> Saved:
    try:
        placed = json.loads(path.read_text())["weight_map"]
        files = sorted({path.parent / name for name in placed.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not an index of a checkpoint, which names a file for each tensor under "
            f"'weight_map': {described(error)}"
        ) from None
    if missing := [each.name for each in files if not each.exists()]:
        raise CheckpointError(
            f"{path} names {len(files)} files and {', '.join(missing[:4])} "
            f"{'is' if len(missing) == 1 else 'are'} not there: the checkpoint is incomplete"
        )
    if inner := [each.name for each in files if each.name.endswith(_INDEX)]:
        raise CheckpointError(
            f"{path} names {inner[0]}, another index, in place of a file of tensors"
        )
    found = _merge(path, [_file(each, verify) for each in files])
    if missing := placed.keys() - found.tensors.keys() - {*found.left_out}:
        raise CheckpointError(
            f"{path} names {min(missing)} and {len(missing) - 1} more tensors that are in none of "
            "its files: they are not of one checkpoint"
        )
    return found


def _merge(path: Path, parts: list[Saved]) -> Saved:
    tensors = {}
    for number, part in enumerate(parts):
        for name, each in part.tensors.items():
            tensors[f"{number}.{name}" if name in tensors else name] = each
    merged = Saved(path, tensors, ordered=False)
    for part in parts:
        merged.notes += part.notes
        merged.left_out += part.left_out
    return _with_tensors(merged)


def _with_tensors(found: Saved) -> Saved:
    if not found.tensors:
        raise CheckpointError(f"{found.path} holds no tensors")
    return found


def _trainer_step(path: Path) -> int | None:
    try:
        return int(json.loads((path / "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _nothing_in(path: Path, names: set[str]) -> str:
    message = (
        f"{path} has no weights: model.safetensors, adapter_model.safetensors, pytorch_model.bin, "
        "an index of several, or .metadata of torch.distributed.checkpoint"
    )
    if inner := sorted(name for name in names if _STEP.fullmatch(name)):
        return f"{message}. It holds {', '.join(inner[:4])}: give the path of one of them"
    if any(name.startswith("global_step") or name == "zero_to_fp32.py" for name in names):
        return (
            f"{message}. It is DeepSpeed's: run its zero_to_fp32.py there, and give what that made"
        )
    if files := sorted(n for n in names if n.endswith((".ckpt", ".pt", ".pth", ".safetensors"))):
        return f"{message}. It holds {', '.join(files[:4])}: give the path of one of them"
    return f"{message}. It holds {', '.join(sorted(names)[:6]) or 'nothing'}"
