"""`optimizer.state` notices who looks into it; until then steps do not ask where states are."""

import copy
import gc
import pickle
import weakref
from collections import defaultdict
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # teaches the pickler to share tensors
from torch import nn

import torch_bf16
from torch_bf16.engine.states import States
from torch_bf16.errors import StateMismatchError

LOOKS = {
    "[]": lambda s, k: s[k],
    "get": lambda s, k: s.get(k),
    "items": lambda s, k: s.items(),
    "values": lambda s, k: s.values(),
    "setdefault": lambda s, k: s.setdefault(k, {}),
    "pop": lambda s, k: s.pop(k),
    "popitem": lambda s, k: s.popitem(),
    "del": lambda s, k: s.__delitem__(k),
    "clear": lambda s, k: s.clear(),
    "set": lambda s, k: s.__setitem__(k, {}),
    "update": lambda s, k: s.update({}),
    "|=": lambda s, k: s.__ior__({}),
    "copy()": lambda s, k: s.copy(),
    "copy.copy": lambda s, k: copy.copy(s),
    "dict()": lambda s, k: dict(s),
    "**": lambda s, k: {**s},
    "|": lambda s, k: s | {},
    "other |": lambda s, k: {} | s,
    "update another": lambda s, k: {}.update(s),
}


@pytest.mark.parametrize("look", LOOKS)
def test_every_way_to_a_state_is_noticed(look):
    key = nn.Parameter(torch.ones(2))
    states = States(dict)
    dict.__setitem__(states, key, {"step": 1})
    assert not states.seen
    LOOKS[look](states, key)
    assert states.seen


def test_keys_give_nothing_away_and_an_empty_dict_has_nothing():
    key = nn.Parameter(torch.ones(2))
    states = States(dict)
    assert [*states.items()] == []
    states.clear()
    dict.__setitem__(states, key, {"step": 1})
    assert key in states
    assert len(states) == 1
    assert [*states] == [*states.keys()] == [key]
    assert states
    assert not states.seen


def trained(recipe="bf16-fp32-master", kind=torch_bf16.AdamW):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(8, 8).bfloat16()) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    named = [(f"p{n}", each) for n, each in enumerate(parameters)]
    optimizer = kind(named, lr=1e-2, recipe=recipe)
    optimizer.step()
    return optimizer, parameters


def test_what_training_does_gives_nothing_away():
    optimizer, parameters = trained()
    other, _ = trained()
    optimizer.set_exact_weight(parameters[0], optimizer.exact_weight(parameters[0]))
    parameters[0].grad = None
    optimizer.step()
    optimizer.load_state_dict(other.state_dict())
    # At another address, so that a plan is made anew.
    parameters[1].data = parameters[1].data.clone()
    optimizer.step()
    assert not optimizer.state.seen


def test_exact_weights_that_are_written_before_the_first_step_give_nothing_away():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    with torch_bf16.exact_weights(model, optimizer):
        pass
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert not optimizer.state.seen


def test_a_plan_sees_a_remainder_that_exact_weights_have_replaced():
    optimizer, parameters = trained()
    del dict.__getitem__(optimizer.state, parameters[0])["remainder16"]
    optimizer.set_exact_weight(parameters[0], torch.full((8, 8), 1.001))
    remainder = dict.__getitem__(optimizer.state, parameters[0])["remainder16"].clone()
    optimizer.step()
    now = dict.__getitem__(optimizer.state, parameters[0])["remainder16"]
    assert (now != remainder).all()
    assert not optimizer.state.seen


def test_sums_of_micro_batches_give_nothing_away():
    model = nn.Linear(8, 8)
    recipe = torch_bf16.get_recipe("bf16-stochastic", accumulate="bf16_stochastic")
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = torch_bf16.prepare(model, optimizer, recipe)
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert not optimizer.state.seen


def moved(optimizer, parameter):
    """Whether the next step updates a moment that was put elsewhere."""
    moment = dict.__getitem__(optimizer.state, parameter)["exp_avg"]
    moment.data = moment.data.clone()
    before = moment.clone()
    optimizer.step()
    now = dict.__getitem__(optimizer.state, parameter)["exp_avg"]
    return now is moment and not torch.equal(moment, before)


def look_in_a_pre_hook(optimizer):
    held = []
    optimizer.register_state_dict_pre_hook(lambda o: held.append([*o.state.values()]))
    optimizer.state_dict()
    return held


def hold_and_load(optimizer):
    held = [*optimizer.state.values()]
    optimizer.load_state_dict(optimizer.state_dict())
    return held


def watched(optimizer):
    class Watching:
        def before_update(self, members, scale):
            self.members = members

        def after_update(self):
            pass

    optimizer.observers.append(Watching())
    optimizer.step()
    return optimizer.observers


def another_dict(optimizer):
    optimizer.state = defaultdict(dict, optimizer.state)


@pytest.mark.parametrize("look", [look_in_a_pre_hook, hold_and_load, watched, another_dict])
def test_a_state_that_somebody_was_given_may_be_put_elsewhere_at_any_time(look):
    optimizer, parameters = trained()
    held = look(optimizer)
    for _ in range(3):
        optimizer.step()
    assert moved(optimizer, parameters[1])
    assert moved(optimizer, parameters[2])
    del held


def test_a_state_dict_has_the_memory_of_the_states_and_no_tensor_of_theirs():
    optimizer, parameters = trained()
    saved = optimizer.state_dict()["state"][1]
    own = dict.__getitem__(optimizer.state, parameters[1])
    for key, tensor in saved.items():
        assert tensor is not own[key]
        assert tensor.data_ptr() == own[key].data_ptr()
    saved["exp_avg"].data = torch.zeros(8, 8)
    before = own["exp_avg"].clone()
    optimizer.step()
    assert not torch.equal(own["exp_avg"], before)
    assert saved["exp_avg"].eq(0).all()


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_states_that_a_queue_has_put_into_shared_memory_are_still_trained(recipe):
    """Its pickler replaces the memory beneath every tensor that shares it."""
    optimizer, parameters = trained(recipe)
    reference, others = trained(recipe)
    sent = ForkingPickler.dumps(optimizer.state_dict())
    for each in (optimizer, reference):
        each.step()
        each.step()
    for one, other in zip(parameters, others, strict=True):
        assert torch.equal(one, other)
        mine, theirs = (
            dict.__getitem__(o.state, p) for o, p in ((optimizer, one), (reference, other))
        )
        assert mine["step"] == 3
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    del sent


def test_a_state_that_was_dropped_starts_anew():
    optimizer, parameters = trained()
    del optimizer.state[parameters[0]]
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in parameters] == [1, 2, 2]


COPIES = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)


@COPIES
@pytest.mark.parametrize("kind", [torch_bf16.AdamW, torch_bf16.NAdam])
def test_copies_of_what_nobody_has_seen_are_unseen(copied, kind):
    optimizer, parameters = trained(kind=kind)
    assert not copied(optimizer).state.seen
    held = optimizer.state[parameters[0]]
    assert copied(optimizer).state.seen
    del held


@COPIES
def test_copies_and_pickles_step_as_the_optimizer_does(copied):
    optimizer, parameters = trained()
    twin = copied(optimizer)
    assert not optimizer.state.seen
    mine = twin.param_groups[0]["params"]
    for one, other in zip(parameters, mine, strict=True):
        other.grad = one.grad
    optimizer.step()
    twin.step()
    for one, other in zip(parameters, mine, strict=True):
        assert torch.equal(one, other)


def test_a_shallow_copy_leaves_the_optimizer_its_masters():
    optimizer, parameters = trained()
    other = copy.copy(optimizer)
    assert other.param_groups is optimizer.param_groups
    optimizer.step()
    mine = optimizer.state[parameters[0]]["remainder16"]
    assert mine.any()
    saved = optimizer.state_dict()["state"][0]["remainder16"]
    assert torch.equal(saved.view(torch.int16), mine)


def test_states_that_were_replaced_by_a_plain_dict_start_anew():
    optimizer, parameters = trained()
    monitor = torch_bf16.UpdateMonitor(optimizer, every=1)
    optimizer.state = defaultdict(dict)
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"] == 1
    assert monitor.layers


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_a_parameter_that_was_replaced_with_its_state_is_freed(recipe, released):
    """As where a model grows, or is pruned, while it is trained."""
    old, other = (nn.Parameter(torch.ones(n, 4, dtype=torch.bfloat16)) for n in (3, 2))
    release = {"max_norm": None} if released else False
    groups = [{"params": [old]}, {"params": [other]}]
    optimizer = torch_bf16.AdamW(groups, recipe=recipe, release=release)

    def train():
        every = [p for group in optimizer.param_groups for p in group["params"]]
        sum(p.float().sum() for p in every).backward()
        optimizer.step()

    train()
    gone = weakref.ref(old)
    del optimizer.state[old]
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(5, 4, dtype=torch.bfloat16))]
    del old
    train()
    optimizer.zero_grad()
    gc.collect()
    assert len(optimizer._engine.snapshots) == 2
    assert gone() is None


def replace(optimizer, rows, left=()):
    """Exchange a parameter for some of its rows and a new one, and its states with it."""

    def cut(old):
        return torch.cat([old.detach()[rows], torch.zeros(1, 4, dtype=old.dtype)])

    (old,) = optimizer.param_groups[0]["params"]
    state = optimizer.state.pop(old)
    new = nn.Parameter(cut(old))
    optimizer.state[new] = {
        key: each if key in ("step", *left) else cut(each) for key, each in state.items()
    }
    optimizer.param_groups[0]["params"] = [new]
    return new


def step_of(optimizer, gradient):
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = gradient.to(p.dtype)
    optimizer.step()


def grown():
    """An optimizer of torch in fp32, and ours of the same numbers."""
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    fp32 = torch.optim.Adam([nn.Parameter(start.clone())])
    splats = nn.ParameterDict({"sh": nn.Parameter(start.clone())})
    ours = torch.optim.Adam(splats.parameters())
    torch_bf16.prepare(splats, ours, "bf16-fp32-master")
    return fp32, ours


def test_rows_that_were_taken_and_joined_with_their_states_go_on_as_in_fp32():
    """As in Gaussian splatting, which splits and prunes while it trains."""
    fp32, ours = grown()
    generator = torch.Generator().manual_seed(1)
    for count, rows in ((6, [0, 1, 2, 3, 4]), (6, [0, 2, 3]), (4, [1, 1, 3, 0])):
        gradient = torch.randn(count, 4, generator=generator).bfloat16()
        step_of(fp32, gradient)
        step_of(ours, gradient)
        exact, new = replace(fp32, rows), replace(ours, rows)
        torch.testing.assert_close(ours.exact_weight(new), exact.detach(), rtol=0, atol=1e-6)


def test_a_state_that_was_left_as_it_was_is_named():
    _, ours = grown()
    step_of(ours, torch.ones(6, 4))
    replace(ours, [0, 1], left=["remainder16"])
    match = r"remainder16 of .* has shape \(6, 4\) .*replaced the parameter left this state"
    with pytest.raises(StateMismatchError, match=match):
        step_of(ours, torch.ones(3, 4))
