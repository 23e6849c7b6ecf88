"""Steps that end with an error say how far they came."""

import pytest
import torch
from optimizer_cases import make_optimizer, take_steps
from torch import nn

import torch_bf16
from torch_bf16.backends import eager
from torch_bf16.backends.cpu import launch, threads


def three(backend):
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(8, 64).bfloat16()) for _ in range(3)]
    optimizer = make_optimizer("adamw", "stochastic", backend, mine)
    take_steps(optimizer, [0])
    return optimizer, mine


def failing(function, at, error):
    """``function``, but for its call number ``at``, which raises ``error``."""
    calls = iter(range(1000))

    def called(*arguments):
        if next(calls) == at:
            raise error
        return function(*arguments)

    return called


PARTLY = (
    "3 parameters may be updated in part, 0 were updated and their steps counted, the others not. "
    "Load the last checkpoint before going on"
)


@pytest.mark.parametrize("name", ["_update", "_encode"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_kernel_that_failed_after_it_had_written_is_not_said_to_have_left_all_alone(
    name, at, monkeypatch
):
    optimizer, mine = three("eager")
    before = [each.clone() for each in mine]
    error = torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(eager, name, failing(getattr(eager, name), at, error))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, mine, strict=True)]
    assert moved == [at == 1, False, False]
    said = "Nothing was updated" if (name, at) == ("_update", 0) else PARTLY
    assert str(caught.value) == f"out of memory. {said}"
    assert [optimizer.state[each]["step"].item() for each in mine] == [1, 1, 1]


def test_a_kernel_for_cpus_that_broke_off_may_have_written(monkeypatch):
    optimizer, _ = three("cpu")
    monkeypatch.setattr(threads, "finished", lambda job: False)
    with pytest.raises(RuntimeError, match=f"for the reason printed above. {PARTLY}"):
        optimizer.step()
    monkeypatch.setattr(launch, "with_factors", failing(None, 0, RuntimeError("no sums")))
    with pytest.raises(RuntimeError, match=r"no sums\. Nothing was updated$"):
        optimizer.step()


def test_errors_that_make_their_message_of_something_else_get_a_note(monkeypatch):
    optimizer, _ = three("eager")
    monkeypatch.setattr(eager, "_update", failing(None, 0, OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left") as caught:
        optimizer.step()
    if hasattr(caught.value, "add_note"):
        assert caught.value.__notes__ == ["Nothing was updated"]


class BreaksOff(torch.optim.Optimizer):
    """A class of a program's own, which some weights make fail."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad[0] > 1:
                    raise KeyError("no such number")
                p.data.sub_(p.grad)


@pytest.mark.parametrize(
    ("at", "said"),
    [(0, ""), (2, "2 of 3 parameters were updated, the others not. Load the last checkpoint")],
)
def test_a_class_that_breaks_off_between_its_parameters_is_said_to_have_updated_some(at, said):
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = torch_bf16.convert(BreaksOff(weights))
    optimizer.bucket_bytes = 1
    for scales in ([1.0] * 3, [1.0] * 3, [1.0] * 3, [2.0 if n == at else 1.0 for n in range(3)]):
        for weight, scale in zip(weights, scales, strict=True):
            weight.grad = torch.full((3,), scale)
        if max(scales) == 1:
            optimizer.step()
    with pytest.raises(KeyError) as caught:
        optimizer.step()
    assert ("parameters were updated" in str(caught.value)) == bool(said)
    assert said in str(caught.value)
    assert [each[0].item() for each in weights] == [-4.0 if n < at else -3.0 for n in range(3)]
