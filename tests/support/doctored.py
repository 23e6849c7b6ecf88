"""The doctor over files that tests write: its verdict, and what goes into the files."""

from __future__ import annotations

import json

import torch

from torch_bf16.tools import cli

__all__ = ["doctor", "gaussian", "saved", "verdicts"]


def doctor(*arguments):
    """The exit status and the record."""
    *paths, target = arguments
    status = cli.main(["doctor", *map(str, paths), "--json", str(target)])
    return status, json.loads(target.read_text())


def verdicts(found):
    return {each["name"]: each["verdict"] for each in found["weights"]}


def saved(path, weights, **rest):
    torch.save({"state_dict": weights, **rest}, path)
    return path


def gaussian(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * 0.02
