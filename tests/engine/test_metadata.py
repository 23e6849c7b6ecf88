"""One question about many tensors: what it says is what a look at each of them says."""

from functools import partial

import pytest
import torch

from torch_bf16 import AdamW
from torch_bf16.engine import metadata
from torch_bf16.engine.metadata import Metadata


def tensors():
    return [torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(1, 4), torch.ones(0), torch.ones(())]


def noted(found):
    known = Metadata()
    known.note(found)
    return known


def test_other_tensors_of_the_same_kind_are_the_same():
    known = noted(tensors())
    assert known.holds(tensors())
    # What the stride of a dimension of size 1 is depends on who made the tensor.
    first, second, *rest = tensors()
    other = second.as_strided((1, 4), (1, 1))
    assert other.stride() != second.stride()
    assert known.holds([first, other, *rest])


OTHERS = {
    "dtype": torch.ones(2, 3),
    "shape": torch.ones(3, 2, dtype=torch.bfloat16),
    "dimensions": torch.ones(6, dtype=torch.bfloat16),
    "strides": torch.ones(3, 2, dtype=torch.bfloat16).t(),
    "class": torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)),
    "negated": torch.ones(2, 3, dtype=torch.complex64).conj().imag,
    "device": torch.ones(2, 3, dtype=torch.bfloat16, device="meta"),
    "layout": torch.ones(2, 3, dtype=torch.bfloat16).to_sparse(),
    "no tensor": None,
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_tensor_is_noticed(what):
    first, *rest = tensors()
    if what == "negated":
        first = torch.ones(2, 3, dtype=torch.complex64).imag
    known = noted([first, *rest])
    assert known.holds([first, *rest])
    assert not known.holds([OTHERS[what], *rest])


def test_nothing_is_kept_alive_or_noted_in_vain(monkeypatch):
    known = noted(tensors())
    calls = []
    monkeypatch.setattr(metadata, "TensorGuards", lambda *given, **named: calls.append(given))
    known.note(tensors())
    assert calls == []
    assert known.holds(tensors())
    known.note(tensors())
    assert len(calls) == 1


def attacked(attack, steps=3, missing=()):
    """What a step makes of parameters of which something was changed in memory before it.

    Some of them may have no gradient in the steps before.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(4, 4, generator=generator).bfloat16()) for _ in range(3)
    ]
    optimizer = AdamW(parameters, lr=0.1)
    for _ in range(steps):
        for number, each in enumerate(parameters):
            gradient = torch.randn(4, 4, generator=generator).bfloat16()
            each.grad = None if number in missing else gradient
        optimizer.step()
    try:
        attack(parameters[1])
        optimizer.step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return [each.detach().clone() for each in parameters]


def _give_a_gradient(parameter, then):
    parameter.grad = torch.ones_like(parameter)
    then(parameter)


def _transpose(parameter):
    parameter.data = parameter.data.t()


def _transpose_the_gradient(parameter):
    parameter.grad.data = parameter.grad.data.t()


def _transpose_in_place(parameter):
    with torch.no_grad():
        parameter.t_()


def _negate_the_gradient(parameter):
    parameter.grad = torch.ones(4, 4, dtype=torch.complex64).conj().imag.bfloat16()
    parameter.grad = torch._neg_view(parameter.grad)


def _share_a_gradient(parameter):
    parameter.grad = torch.ones(4, 4, dtype=torch.bfloat16).expand(4, 4)


def _shorten_the_gradient(parameter):
    parameter.grad.data = torch.ones(2, 4, dtype=torch.bfloat16)


def _recast(parameter):
    parameter.data = parameter.data.view(torch.float16)


@pytest.mark.parametrize("missing", [(), (0,), (1,)], ids=["none", "first", "attacked"])
@pytest.mark.parametrize(
    "attack",
    [
        *(_transpose, _transpose_in_place, _transpose_the_gradient, _negate_the_gradient),
        *(_share_a_gradient, _shorten_the_gradient, _recast, lambda parameter: None),
    ],
)
def test_a_step_notices_what_a_look_at_each_notices(attack, missing, monkeypatch):
    if 1 in missing and "gradient" in attack.__name__:
        attack = partial(_give_a_gradient, then=attack)
    found = attacked(attack, missing=missing)
    # The first step has nothing noted.
    monkeypatch.setattr(metadata, "TensorGuards", None)
    want = attacked(attack, missing=missing)
    assert type(found) is type(want)
    assert found == want if isinstance(want, str) else all(map(torch.equal, found, want))


def test_a_gradient_that_ends_early_is_refused_in_any_step():
    for steps in range(4):
        assert "has a gradient of shape (2, 4)" in attacked(
            partial(_give_a_gradient, then=_shorten_the_gradient), steps=steps
        )


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_sparse_gradient_is_refused_by_name_in_any_step(steps):
    def make_sparse(parameter):
        parameter.grad = torch.ones_like(parameter).to_sparse()

    assert "has a sparse gradient (torch.sparse_coo)" in attacked(make_sparse, steps=steps)


def test_steps_note_what_they_have_looked_at():
    parameters = [torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = AdamW(parameters)
    for _ in range(3):
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
    (block,) = optimizer._engine.plan._guard._blocks
    with torch.no_grad():
        assert block._metadata.holds(parameters)
        assert block._gradient_metadata.holds([each.grad for each in parameters])


def test_other_sets_of_gradients_are_looked_at_once():
    parameters = [torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = AdamW(parameters)
    for step in range(4):
        for number, each in enumerate(parameters):
            each.grad = torch.ones_like(each) if step == 0 or number == step % 3 else None
        optimizer.step()
    (block,) = optimizer._engine.plan._guard._blocks
    with torch.no_grad():
        assert block._gradient_metadata.holds(block._fill_gaps([each.grad for each in parameters]))
        parameters[0].grad.data = torch.ones(4, 2, dtype=torch.bfloat16)
        gradients = [each.grad for each in parameters]
        assert not block._gradient_metadata.holds(block._fill_gaps(gradients))
