"""What DeepSpeed's own tools make of a checkpoint: each rank converts one and goes on from it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed_cases import state_digest
from deepspeed_training import config, digest, engine_of, start, train, weights

CUT, LAST = 3, 5


def converted(stage: int, recipe: Any, folder: Path) -> dict[str, Any]:
    """Weights and states after some steps, in one run and from a universal checkpoint of it."""
    engine = engine_of(config(stage), recipe)
    train(engine, range(CUT))
    engine.save_checkpoint(str(folder), tag="cut")
    saved = weights(engine)
    if dist.get_rank() == 0:
        _to_universal(folder)
    dist.barrier()
    whole = _train_on(engine)
    engine = engine_of({**config(stage), "checkpoint": {"load_universal": True}}, recipe)
    engine.load_checkpoint(str(folder), tag="universal")
    return {
        "whole": whole,
        "universal": _train_on(engine),
        "fp32": digest({name: each.bfloat16() for name, each in _fp32(folder).items()}),
        "saved": digest(saved),
    }


def _train_on(engine: Any) -> tuple[str, str]:
    train(engine, range(CUT, LAST))
    return digest(weights(engine)), state_digest(engine)


def _to_universal(folder: Path) -> None:
    """As ``ds_to_universal.py --inject_missing_state`` does it."""
    start()
    from deepspeed.checkpoint import ds_to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    folders = {"input_folder": str(folder / "cut"), "output_folder": str(folder / "universal")}
    ds_to_universal.main(Namespace(**folders, **options, strict=True, inject_missing_state=True))


def _fp32(folder: Path) -> dict[str, Any]:
    """As ``zero_to_fp32.py``, which each checkpoint gets a copy of, does it."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="cut")
    assert all(each.bfloat16().float().equal(each.float()) for each in found.values())
    return found
