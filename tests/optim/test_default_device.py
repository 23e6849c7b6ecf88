"""Another default device and dtype than torch's own: ``torch.set_default_device("cuda")``, say."""

import ast
import copy
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from optimizer_cases import assert_same, set_gradients, snapshot

import torch_bf16

CORE = Path(torch_bf16.__file__).parent
# Functions of torch that make a tensor where and as the defaults say.
MAKERS = {
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "scalar_tensor"),
    *("arange", "linspace", "eye", "rand", "randn", "randint", "randperm"),
}


@contextmanager
def other_defaults():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def run(kind, backend, defaults):
    shapes = ((8, 6), (4, 64)) if kind is torch_bf16.Muon else ((8, 6), (4, 64), (5,), ())
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    parameters = [torch.nn.Parameter(each) for each in drawn]
    with defaults():
        optimizer = kind(parameters, lr=1e-2, backend=backend)
    for seed in range(3):
        set_gradients(parameters, seed)
        with defaults():
            torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return snapshot(optimizer)


# Numba takes seconds for each rule: on the CPU backend one of a kernel, and those of parts.
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "eager") for kind in ("AdamW", "NAdam", "Adagrad", "Muon", "Adafactor", "SGD")),
        *((kind, "cpu") for kind in ("AdamW", "Muon", "Adafactor")),
    ],
)
def test_steps_and_state_dicts_do_not_follow_the_defaults(kind, backend):
    made = getattr(torch_bf16, kind)
    assert_same(run(made, backend, other_defaults), run(made, backend, nullcontext))


def test_a_norm_that_was_saved_is_fp32_again():
    model = torch.nn.Linear(4, 4)
    released = {"max_norm": 1.0, "norm": "last_step"}
    optimizer = torch_bf16.SGD(model.parameters(), lr=0.0, release=released)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    norm = optimizer._engine.last_norm
    saved = copy.deepcopy(optimizer.state_dict())
    with other_defaults():
        optimizer.load_state_dict(saved)
    assert norm != norm.bfloat16()
    assert torch.equal(optimizer._engine.last_norm, norm)


@pytest.mark.parametrize("room", sorted({*CORE.iterdir()} - {CORE / "tools"}), ids=lambda p: p.name)
def test_every_tensor_says_where_it_is_made(room):
    """Also those that are made on GPUs alone: pinned memory cannot be on a default device."""
    found = []
    for path in sorted(room.rglob("*.py")) if room.is_dir() else [room]:
        for node in ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ():
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)) if (
                    name in MAKERS and "device" not in {each.arg for each in node.keywords}
                ):
                    found.append(f"{path.relative_to(CORE)}:{node.lineno}: torch.{name}")
    assert not found
