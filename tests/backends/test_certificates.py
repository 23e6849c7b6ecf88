"""Certificates: faults are found before a kernel is used, and training goes on without it."""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from certificate_digests import digests_by_the_oracle, variants
from every_rule import RULES
from planted_faults import PLACES, Deadly, Planted, shows, trained

from torch_bf16 import RECIPES, Recipe, backends
from torch_bf16.backends import Variant, choose, choose_for
from torch_bf16.backends.certificates import certificate, verdicts
from torch_bf16.backends.certificates.digests import expected
from torch_bf16.backends.certificates.trial import Trial, digests_of
from torch_bf16.formats import BF16_NEAREST, BF16_STOCHASTIC, FP32
from torch_bf16.rules import ADAMW, WEIGHTS

CPU = torch.device("cpu")
VARIANT = Variant(ADAMW, (BF16_STOCHASTIC, BF16_NEAREST, BF16_STOCHASTIC), torch.bfloat16, CPU)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No verdicts of other tests, on disk or in memory, and no warning given yet."""
    monkeypatch.setenv("TORCH_BF16_CACHE", str(tmp_path))
    monkeypatch.setattr(certificate, "_known", {})
    backends._warn_of.cache_clear()
    backends._automatic.cache_clear()
    yield tmp_path
    backends._warn_of.cache_clear()
    backends._automatic.cache_clear()


@pytest.mark.parametrize("rule", RULES)
def test_the_digests_are_those_of_the_oracle(rule):
    found = variants(rule)
    # Each rule, and over all of them each layout: tests/proofs/digests.py makes all.
    for variant in found[len(rule) % 7 :: 7] or found[:1]:
        assert expected(variant) == digests_by_the_oracle(variant), variant.name


def test_all_that_recipes_ask_for_has_a_digest():
    recipes = [*RECIPES.values(), Recipe(exp_avg="int8", exp_avg_sq="int8")]
    shapes = ((64, 64), torch.bfloat16), ((64,), torch.bfloat16), ((64, 64), torch.float32)
    for rule in (each for each in RULES.values() if each.role == WEIGHTS):
        roles = (WEIGHTS, *(state.role for state in rule.states))
        for recipe in recipes:
            for shape, dtype in shapes:
                formats = tuple(recipe.format_of(role, shape, dtype) for role in roles)
                variant = Variant(rule, formats, dtype, CPU)
                assert expected(variant) is not None, variant.name


def test_every_shipped_variant_has_a_digest_for_each_plane():
    for variant in (each for rule in RULES for each in variants(rule)):
        assert len(expected(variant)) == sum(len(each.planes) for each in variant.formats)


def some_variants():
    """Each rule once, each layout of AdamW, of every dtype and stride in turn."""
    chosen = [variants(name)[number % 4] for number, name in enumerate(RULES)]
    return chosen + variants("adamw")[1::5]


# Numba takes seconds for each variant, and every step of other tests tries its own.
@pytest.mark.parametrize(("backend", "every"), [("eager", 1), ("cpu", 15)])
def test_a_right_backend_passes(backend, every):
    for variant in some_variants()[::every]:
        assert certificate.fault_of(choose(CPU, backend), variant) is None


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_fault_is_found(place):
    for variant in some_variants():
        if shows(place, variant):
            fault = certificate._other_bits(Planted(place), Trial.of(variant))
            assert fault is not None, variant.name
            assert "has other bits than it must" in fault


def test_the_eager_backend_on_the_host_judges_variants_without_a_digest(monkeypatch):
    monkeypatch.setattr(certificate, "expected", lambda variant: None)
    trial = Trial.of(VARIANT)
    assert certificate._other_bits(choose(CPU, "cpu"), trial) is None
    assert "weight" in certificate._other_bits(Planted("rule"), trial)


class _Failing:
    """A backend that cannot compile."""

    name, capturable, scalars = "cpu", False, choose(CPU, "eager").scalars

    def unavailable(self, device):
        return None

    def fingerprint(self, device):
        return []

    def load(self, bucket):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")


def _read_only(monkeypatch):
    """Root may write anywhere, so permissions would not show it."""
    monkeypatch.setenv("TORCH_BF16_CACHE", "/dev/null/verdicts")
    assert verdicts.folder() is None


def _read_only_since(monkeypatch):
    def refuse(*arguments, **named):
        raise PermissionError("read-only")

    monkeypatch.setattr(verdicts.tempfile, "mkstemp", refuse)


@pytest.mark.parametrize(
    ("wrong", "folder"),
    [
        (_Failing(), None),
        *((Planted(place), None) for place in PLACES),
        *((Planted("rule"), each) for each in (_read_only, _read_only_since)),
    ],
)
def test_training_goes_on_in_another_backend_with_the_right_bits(
    wrong, folder, monkeypatch, caplog
):
    want = trained("eager")
    monkeypatch.setitem(backends._BACKENDS, "cpu", wrong)
    if folder is not None:
        folder(monkeypatch)
    with caplog.at_level(logging.WARNING, "torch_bf16"):
        assert torch.equal(trained(), want)
        assert torch.equal(trained(), want)
    (record,) = caplog.records
    assert "is not used for adamw_bf16_stochastic" in record.getMessage()
    assert "Please report" in record.getMessage()


def test_only_the_variant_that_fails_goes_elsewhere(monkeypatch):
    monkeypatch.setattr(
        backends, "fault_of", lambda b, v: "wrong" if b.name == "cpu" and v.strided else None
    )
    strided = Variant(ADAMW, VARIANT.formats, torch.bfloat16, CPU, True)
    assert choose_for(strided).name == "eager"
    assert choose_for(VARIANT).name == "cpu"


def test_no_backend_at_all_is_an_error_that_says_what_each_did(monkeypatch):
    monkeypatch.setattr(backends, "fault_of", lambda b, v: f"{b.name} is off by one")
    with pytest.raises(backends.BackendUnavailableError, match=r"cpu is off by one.*eager is off"):
        choose_for(VARIANT)


def test_a_backend_asked_for_by_name_is_not_tried(monkeypatch):
    monkeypatch.setattr(backends, "fault_of", pytest.fail)
    assert choose_for(VARIANT, "cpu").name == "cpu"
    monkeypatch.setenv("TORCH_BF16_BACKEND", "eager")
    assert choose_for(VARIANT).name == "eager"
    assert choose_for(VARIANT, "cpu").name == "cpu"
    monkeypatch.setenv("TORCH_BF16_BACKEND", "gpu")
    with pytest.raises(ValueError, match="unknown backend 'gpu'; known backends: cpu, eager"):
        choose_for(VARIANT)


class _Counting(Planted):
    """Right, and counts how often it was tried."""

    loads = 0

    def load(self, bucket):
        self.loads += 1
        return super().load(bucket)


def test_a_verdict_outlives_its_process_and_is_of_its_versions(fresh, monkeypatch):
    backend = _Counting("nowhere")
    assert certificate.fault_of(backend, VARIANT) is None
    tried = backend.loads
    assert tried == 2
    monkeypatch.setattr(certificate, "_known", {})
    assert certificate.fault_of(backend, VARIANT) is None
    assert backend.loads == tried
    monkeypatch.setattr(certificate, "_known", {})
    monkeypatch.setattr(backend, "place", "nowhere, newer driver")
    assert certificate.fault_of(backend, VARIANT) is None
    assert backend.loads == 2 * tried
    assert sorted(path.suffix for path in fresh.iterdir()) == [".json", ".json"]


def test_a_folder_that_cannot_be_written_means_a_trial_for_each_process(monkeypatch):
    _read_only(monkeypatch)
    backend = _Counting("nowhere")
    for _ in range(2):
        monkeypatch.setattr(certificate, "_known", {})
        assert certificate.fault_of(backend, VARIANT) is None
    assert backend.loads == 4


def test_a_damaged_verdict_is_made_again(fresh):
    assert verdicts.verdict(["a"], lambda: "wrong") == "wrong"
    (path,) = fresh.glob("*.json")
    for damage in ("", "{", "[]", "{}"):
        path.write_text(damage)
        assert verdicts.verdict(["a"], lambda: None) is None


def _die(folder, number):
    os.environ["TORCH_BF16_CACHE"] = folder
    verdicts.verdict(["deadly"], lambda: os.kill(os.getpid(), number))


def _killed(folder, number=signal.SIGKILL):
    """A process that a signal ends while it tries."""
    process = multiprocessing.get_context("spawn").Process(target=_die, args=(str(folder), number))
    process.start()
    process.join(60)
    assert process.exitcode == -number


def test_one_rank_that_was_killed_does_not_blame_what_it_tried(fresh, monkeypatch):
    """Launchers end ranks so when another one has failed."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    _killed(fresh, signal.SIGTERM)
    assert verdicts.verdict(["deadly"], lambda: None) is None
    assert [path.suffix for path in fresh.iterdir()] == [".json"]


def test_an_attempt_that_ended_without_a_verdict_is_nobodys_death(fresh):
    with contextlib.ExitStack() as stack:
        with verdicts._claim(fresh / "x.attempt"):
            # By another process, which will have the lock once the file is gone.
            opened = stack.enter_context(open(fresh / "x.attempt", "ab"))
            assert os.fstat(opened.fileno()).st_size > 0
        assert os.fstat(opened.fileno()).st_size == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_killed_a_process_or_two_ranks_is_not_tried_again(fresh, monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for _ in range(ranks):
        _killed(fresh)
    for _ in range(2):
        fault = verdicts.verdict(["deadly"], pytest.fail)
        assert "was killed; remove" in fault
    (path,) = fresh.glob("*.json")
    path.unlink()
    assert verdicts.verdict(["deadly"], lambda: None) is None


def _wait(folder, pipe):
    os.environ["TORCH_BF16_CACHE"] = folder

    def attempt():
        pipe.send("under way")
        return pipe.recv()

    pipe.send(verdicts.verdict(["shared"], attempt))


def test_two_processes_try_at_once_and_neither_waits(fresh):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_wait, args=(str(fresh), theirs))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == "under way"
    assert verdicts.verdict(["shared"], lambda: None) is None
    ours.send(None)
    assert ours.poll(60)
    assert ours.recv() is None
    process.join(60)
    assert process.exitcode == 0
    assert [path.suffix for path in fresh.iterdir()] == [".json"]


def _train(folder, backend, together, pipe):
    os.environ["TORCH_BF16_CACHE"] = folder
    backends._BACKENDS["cpu"] = backend
    together.wait(60)
    pipe.send(trained().float().tolist())


def _training(folder, *wrong):
    """What processes that train at once with these backends send, None where one was killed."""
    context = multiprocessing.get_context("spawn")
    together, processes = context.Barrier(len(wrong)), []
    for each in wrong:
        ours, theirs = context.Pipe(duplex=False)
        given = str(folder), each, together, theirs
        processes.append((ours, context.Process(target=_train, args=given)))
    for _, process in processes:
        process.start()
    for _, process in processes:
        process.join(120)
    return [ours.recv() if process.exitcode == 0 else None for ours, process in processes]


def test_two_processes_that_find_a_fault_at_once_go_on_with_the_right_bits(fresh):
    want = trained("eager").float().tolist()
    assert _training(fresh, Planted("rule"), Planted("rule")) == [want, want]
    # The wrong backend's, and eager's.
    faults = [fault for _, fault in verdicts.kept()]
    assert sorted(fault is None for fault in faults) == [False, True]


def test_training_that_a_kernel_has_killed_goes_on_with_the_right_bits(fresh):
    want = trained("eager").float().tolist()
    assert _training(fresh, Deadly()) == [None]
    assert _training(fresh, Deadly()) == [want]
    assert any("was killed; remove" in (fault or "") for _, fault in verdicts.kept())


def test_what_an_attempt_raises_is_no_verdict(fresh, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verdicts.verdict(["a"], interrupted)
    assert list(fresh.iterdir()) == []
    backend = Planted("nowhere")
    monkeypatch.setattr(backend, "load", _raise_memory)
    with pytest.raises(torch.OutOfMemoryError):
        certificate.fault_of(backend, VARIANT)
    assert list(fresh.iterdir()) == []


def test_what_could_not_be_compiled_is_tried_again_by_the_next_process(fresh, monkeypatch):
    assert "C compiler" in certificate.fault_of(_Failing(), VARIANT)
    assert "C compiler" in certificate.fault_of(_Failing(), VARIANT)
    assert list(fresh.iterdir()) == []
    monkeypatch.setattr(certificate, "_known", {})
    monkeypatch.setattr(_Failing, "load", choose(CPU, "eager").load)
    assert certificate.fault_of(_Failing(), VARIANT) is None


def test_what_made_the_device_unusable_is_not_tried_again(fresh, monkeypatch):
    monkeypatch.setattr(certificate, "_is_lost", lambda device: True)
    assert "unusable until the process ends" in certificate.fault_of(_Failing(), VARIANT)
    monkeypatch.setattr(certificate, "_known", {})
    monkeypatch.setattr(_Failing, "load", pytest.fail)
    assert "unusable until the process ends" in certificate.fault_of(_Failing(), VARIANT)


def test_an_earlier_error_of_the_device_blames_no_backend(fresh, monkeypatch):
    def synchronize(device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(certificate, "_is_lost", lambda device: True)
    elsewhere = dataclasses.replace(VARIANT, device=torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="device-side assert"):
        certificate.fault_of(_Failing(), elsewhere)
    assert certificate._known == {}
    assert list(fresh.iterdir()) == []


def test_each_model_of_gpu_gets_a_verdict_of_its_own(monkeypatch):
    eager, found = choose(CPU, "eager"), []
    for name in ("H100", "T4"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found.append(eager.fingerprint(torch.device("cuda", 0)))
    assert found[0] != found[1]


def _raise_memory(bucket):
    raise torch.OutOfMemoryError("out of memory")


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(certificate.cuda_graphs, "capturing", lambda devices: True)
    assert "CUDA graph" in certificate.fault_of(Planted("nowhere"), VARIANT)
    assert certificate._known == {}


def test_a_trial_leaves_random_numbers_and_gradient_mode_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    with torch.inference_mode():
        assert certificate.fault_of(choose(CPU, "cpu"), VARIANT) is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.is_grad_enabled()


def test_a_rule_whose_options_cannot_be_made_up_is_used_untried(caplog):
    def options(group):
        raise KeyError("mine")

    mine = dataclasses.replace(ADAMW, name="mine", options=options)
    variant = Variant(mine, (BF16_STOCHASTIC, FP32, FP32), torch.bfloat16, CPU)
    with caplog.at_level(logging.INFO, "torch_bf16"):
        assert certificate.fault_of(choose(CPU, "cpu"), variant) is None
    assert "cannot be tried" in caplog.text


@pytest.mark.parametrize("rule", RULES)
def test_most_weights_of_a_trial_stay_finite(rule):
    # Of numbers that are all NaN a fault shows nothing; a scale of NaN makes a whole block of them.
    found = [each for each in variants(rule) if each.formats[0].planes[0].block == 1]
    variant = next((v for v in found if any(each.block > 1 for each in v.formats)), found[0])
    weights = np.concatenate(Trial.of(variant).run(choose(CPU, "eager"), CPU)[0])
    floats = (weights.astype(np.uint32) << 8 * (4 - weights.itemsize)).view(np.float32)
    assert np.isfinite(floats).mean() > 0.95


def test_all_planes_of_a_trial_change():
    # A trial whose numbers stayed as they were would certify a kernel that does nothing.
    for variant in some_variants():
        trial = Trial.of(variant)
        before = digests_of([[t[i][j] for t in trial.planes]
                             for i, each in enumerate(variant.formats)
                             for j in range(len(each.planes))])  # fmt: skip
        assert all(a != b for a, b in zip(before, expected(variant), strict=True)), variant.name
