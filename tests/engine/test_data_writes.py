"""A write through ``p.data`` raises no version: no low bits of a master may stay beside it."""

import copy
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import torch_patches
from torch_bf16.backends import cuda_graphs
from torch_bf16.engine import data_writes
from torch_bf16.numerics import join16
from torch_bf16.optim.overwritten import drop_remainders

BF16 = torch.bfloat16
SIZE = (40, 50)


def make(recipe="bf16-fp32-master", kind=torch_bf16.AdamW, **options):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(SIZE).to(BF16))
    optimizer = kind([p], lr=1e-3, recipe=recipe, **options)
    take_step(optimizer, p)
    take_step(optimizer, p)
    return p, optimizer


def take_step(optimizer, p):
    generator = torch.Generator().manual_seed(1)
    p.grad = torch.randn(SIZE, generator=generator).to(BF16)
    optimizer.step()


def frozen_step(optimizer, p):
    """A step that changes no weight, so that the master that it read can be seen."""
    optimizer.param_groups[0].update(lr=0.0)
    take_step(optimizer, p)
    return join16(p.detach(), optimizer.state[p]["remainder16"])


NEW = torch.linspace(1, 3, SIZE[0] * SIZE[1]).view(SIZE).to(BF16)


def assign(p, kept):
    p.data = NEW.clone()


def assign_twice(p, kept):
    """The second memory may be the first one's, so that addresses show nothing."""
    for each in (NEW * 2, NEW):
        p.data = each.clone()


def in_place(p, kept):
    p.data.copy_(NEW)


def by_view(p, kept):
    p.data.view(-1).copy_(NEW.view(-1))


def by_numpy(p, kept):
    p.data.view(torch.int16).numpy()[:] = NEW.view(torch.int16).numpy()


def vector(p, kept):
    nn.utils.vector_to_parameters(NEW.reshape(-1).clone(), [p])


def by_an_alias_of_before(p, kept):
    kept.copy_(NEW)


WRITES = [assign, assign_twice, in_place, by_view, by_numpy, vector, by_an_alias_of_before]


@pytest.mark.parametrize("write", WRITES)
def test_no_low_bits_stay_beside_what_was_written(write):
    p, optimizer = make()
    alias = p.data
    take_step(optimizer, p)
    write(p, alias)
    assert torch.equal(optimizer.exact_weight(p), NEW.float())
    with pytest.warns(
        UserWarning, match="bf16 weights, 1 in all, were written through p.data .*exact_w"
    ):
        master = frozen_step(optimizer, p)
    assert torch.equal(master, NEW.float())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_sees_what_is_written_before_its_first_step(copied):
    p, optimizer = copied(make())
    in_place(p, None)
    assert torch.equal(optimizer.exact_weight(p), NEW.float())
    with pytest.warns(UserWarning, match="written through p.data"):
        assert torch.equal(frozen_step(optimizer, p), NEW.float())


def test_the_warning_comes_once():
    p, optimizer = make()
    p.data = NEW.clone()
    with pytest.warns(UserWarning, match="written through p.data") as caught:
        take_step(optimizer, p)
    # Python's filters go by the line of the program.
    assert [each.filename for each in caught] == [__file__]
    p.data.mul_(2)
    take_step(optimizer, p)


@pytest.mark.parametrize("numbers", [slice(3), slice(None, None, 7)])
def test_numbers_that_were_not_written_keep_their_masters(numbers):
    """Clipping and masks by ``.data`` after each step: the others must not become bf16 weights."""
    p, optimizer = make()
    before = optimizer.exact_weight(p)
    p.data[numbers] = 0.0
    master = frozen_step(optimizer, p)
    # Where the lower byte of the weight was that of 0 already, bits below bf16's range may stay.
    assert master[numbers].abs().max() < 1e-38
    others = before.clone()
    others[numbers] = master[numbers]
    assert torch.equal(master, others)


def test_what_was_lent_and_came_back_keeps_all_low_bits():
    """As diffusers' EMAModel does it to validate: store, copy_to, restore."""
    p, optimizer = make()
    before = optimizer.exact_weight(p)
    assert not torch.equal(before, p.float())
    stored = p.detach().clone()
    p.data.copy_(NEW)
    p.data.copy_(stored)
    moved = p.data.clone()
    p.data = moved
    assert torch.equal(frozen_step(optimizer, p), before)


def test_reading_data_at_every_step_changes_nothing():
    (p, optimizer), (other, stock) = make(), make()
    for _ in range(3):
        assert p.data.norm() > 0
        take_step(optimizer, p)
        take_step(stock, other)
    assert torch.equal(p, other)
    assert torch.equal(optimizer.state[p]["remainder16"], stock.state[other]["remainder16"])


def test_a_state_dict_has_no_stale_low_bits():
    p, optimizer = make()
    p.data.copy_(NEW)
    saved = optimizer.state_dict()
    assert not saved["state"][0]["remainder16"].view(torch.int16).any()
    with torch.no_grad():
        p.copy_(NEW * 2)
    assert not optimizer.state_dict()["state"][0]["remainder16"].view(torch.int16).any()
    # Saving decides nothing: what was written may come back.
    assert optimizer.state[p]["remainder16"].any()


def test_optimizers_that_step_by_their_own_code_see_it_too():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(SIZE).to(BF16))
    optimizer = torch_bf16.convert(torch.optim.Adamax([p], lr=1e-3), "bf16-fp32-master")
    take_step(optimizer, p)
    p.data = NEW.clone()
    with pytest.warns(UserWarning, match="written through p.data"):
        assert torch.equal(frozen_step(optimizer, p), NEW.float())


def test_vectors_of_the_stochastic_mode_are_watched_and_its_matrices_are_not():
    torch.manual_seed(0)
    model = torch_bf16.cast_model(nn.Linear(8, 8))
    optimizer = torch_bf16.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    data = optimizer._engine.snapshots
    assert data[model.weight].data is None
    assert data[model.bias].data is not None


def test_a_watch_ends_with_its_optimizer():
    p, optimizer = make()
    assert p.data is not None
    gone = weakref.ref(optimizer._engine.snapshots[p].data)
    del optimizer
    assert gone() is None
    p.data.add_(1)


def test_a_copy_and_a_pickle_are_parameters_as_before():
    p, _ = make()
    for each in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert type(each) is nn.Parameter
        assert torch.equal(each, p)


def test_a_compiled_model_reads_data_in_one_graph():
    model = torch_bf16.cast_model(nn.Linear(8, 8), "bf16-fp32-master")
    optimizer = torch_bf16.SGD(model.parameters(), lr=0.1, recipe="bf16-fp32-master")
    compiled = torch.compile(lambda x: model(x) + model.weight.data.sum(), backend="aot_eager",
                             fullgraph=True)  # fmt: skip
    for _ in range(2):
        compiled(torch.ones(2, 8, dtype=BF16)).sum().backward()
        optimizer.step()
    assert model.weight.isfinite().all()


def test_steps_before_which_nobody_asked_look_at_nothing(monkeypatch):
    p, optimizer = make()
    monkeypatch.setattr(data_writes.DataWatch, "lower_bytes", None)
    take_step(optimizer, p)


def test_swapping_tensors_still_works():
    p, _ = make()
    other = nn.Parameter(NEW.clone())
    p.grad = None
    torch.utils.swap_tensors(p, other)
    assert torch.equal(p, NEW)


def test_weights_that_sam_moves_and_puts_back_keep_all_low_bits():
    """It takes the numbers by ``.data``, moves the weight by a write that counts, and returns."""
    p, optimizer = make()
    before = optimizer.exact_weight(p)
    old = p.data.clone()
    with torch.no_grad():
        p.add_(0.5)
    p.data = old
    assert torch.equal(optimizer.exact_weight(p), before)
    assert torch.equal(frozen_step(optimizer, p), before)


def by_copy(model, average):
    saved = model.weight.detach().clone()
    with torch.no_grad():
        for each in (average.weight, saved):
            model.weight.copy_(each)


def by_loading(model, average):
    saved = copy.deepcopy(model.state_dict())
    for each in (average.state_dict(), saved):
        model.load_state_dict(each)


def moved(evaluate, dtype=torch.float32, steps=100):
    """How far a weight moves by updates of a hundredth of a bf16 spacing, with evaluations."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    average = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-5, weight_decay=0.0)
    torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    for step in range(1, steps + 1):
        model.weight.grad = torch.full_like(model.weight, -1.0)
        optimizer.step()
        if step % 10 == 0:
            evaluate(model, average)
    return optimizer.exact_weight(model.weight).mean().item() - 1


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("evaluate", [by_copy, by_loading])
def test_weights_that_make_room_for_an_average_and_come_back_keep_all_low_bits(evaluate, dtype):
    assert moved(evaluate, dtype) == pytest.approx(8e-3, rel=1e-3)


def test_a_compiled_function_copies_into_a_weight_in_one_graph():
    p, optimizer = make()
    compiled = torch.compile(lambda: p.copy_(NEW), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled()
    assert torch.equal(frozen_step(optimizer, p), NEW.float())


def test_a_write_that_counts_before_data_was_asked_for_drops_all_low_bits():
    p, optimizer = make()
    with torch.no_grad():
        p[0].add_(0.5)
    assert p.data is not None
    visible = p.detach().float()
    assert torch.equal(frozen_step(optimizer, p), visible)


def clamp(p):
    with torch.no_grad():
        p.clamp_(max=100.0)


def clamp_by_data(p):
    p.data.clamp_(max=100.0)


@pytest.mark.parametrize("recipe", ["bf16-fp32-master", "bf16-stochastic"])
@pytest.mark.parametrize("size", [(), (64, 64)])
@pytest.mark.parametrize("write", [clamp, clamp_by_data])
def test_a_weight_that_is_written_after_each_step_goes_on_training(write, size, recipe):
    p = nn.Parameter(torch.full(size, 2.65, dtype=BF16))
    optimizer = torch_bf16.AdamW([p], lr=5e-4, weight_decay=0.0, recipe=recipe)
    before = p.detach().float().mean()
    for _ in range(100):
        p.grad = torch.full_like(p, -1.0)
        optimizer.step()
        write(p)
    # Each step is a sixteenth of the spacing of bf16 numbers there.
    assert 0.04 < p.detach().float().mean() - before < 0.06


def test_only_the_numbers_that_such_a_write_changes_lose_their_low_bits():
    p, optimizer = make()
    for _ in range(3):
        clamp(p)
        take_step(optimizer, p)
    kept = optimizer.exact_weight(p)
    with torch.no_grad():
        p[0].copy_(NEW[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = frozen_step(optimizer, p)
    assert torch.equal(found[0], NEW[0].float())
    assert torch.equal(found[1:], kept[1:])


def test_a_weight_that_nobody_writes_any_more_is_not_watched():
    p, optimizer = make()
    watch = optimizer._engine.snapshots[p].data
    clamp(p)
    for _ in range(data_writes._IDLE_STEPS):
        take_step(optimizer, p)
        assert data_writes.touched([watch])
    take_step(optimizer, p)
    assert not data_writes.touched([watch])


def test_two_optimizers_of_one_weight_see_each_others_steps():
    p = nn.Parameter(torch.ones(16, dtype=BF16))
    both = [torch_bf16.SGD([p], lr=1e-4, recipe="bf16-fp32-master") for _ in range(2)]
    p.grad = torch.full_like(p, -1.0)
    for optimizer in both:
        optimizer.step()
    for optimizer in both:
        with pytest.warns(UserWarning, match="another optimizer has stepped"):
            optimizer.step()
    for optimizer in both * 98:
        optimizer.step()
    assert p.float().mean() > 1.012


def test_what_an_optimizer_has_put_aside_does_not_judge_the_states_of_another():
    p, first = make()
    saved, weights = copy.deepcopy(first.state_dict()), p.detach().clone()
    take_step(first, p)
    assert p.data is not None
    second = torch_bf16.AdamW([p], lr=1e-3, recipe="bf16-fp32-master")
    with torch.no_grad():
        p.copy_(weights)
    second.load_state_dict(saved)
    take_step(second, p)
    (other, optimizer) = make()
    take_step(optimizer, other)
    assert torch.equal(second.exact_weight(p), optimizer.exact_weight(other))


def test_a_capture_right_after_data_was_asked_for_is_refused(monkeypatch):
    (p, optimizer), (other, its) = make(), make()
    assert p.data is not None
    monkeypatch.setattr(cuda_graphs, "capturing", lambda devices: True)
    with pytest.raises(RuntimeError, match=r"their \.data was read, since"):
        drop_remainders(optimizer, [p], lambda: ())
    drop_remainders(its, [other], lambda: ())


def test_the_property_can_be_taken_away_and_comes_back_with_a_plan():
    make()
    assert {"data", "copy_"} <= vars(nn.Parameter).keys()
    torch_patches.restore()
    try:
        assert vars(nn.Parameter).keys().isdisjoint({"data", "copy_"})
        assert nn.Parameter.data is torch.Tensor.data
    finally:
        p, optimizer = make()
    p.data.mul_(2.0)
    with pytest.warns(UserWarning, match=r"written through p\.data"):
        take_step(optimizer, p)
