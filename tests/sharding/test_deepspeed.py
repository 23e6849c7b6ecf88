"""DeepSpeed's ZeRO: the bits of plain training, resumed bit for bit, and what is refused."""

from __future__ import annotations

import pytest
from deepspeed_cases import CASES, bits, everything
from deepspeed_cases import alone as run_alone
from deepspeed_ranks import WITH_DEEPSPEED, on_fresh_ranks
from deepspeed_stall import NEAREST, OURS
from deepspeed_training import model

from torch_bf16.tools.estimate.optimizers import optimizer_spec
from torch_bf16.tools.estimate.precisions import precisions
from torch_bf16.tools.estimate.shapes import shapes_of
from torch_bf16.tools.estimate.zero import zero_rows

pytestmark = WITH_DEEPSPEED


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks has found."""
    folder = tmp_path_factory.mktemp("zero")
    return on_fresh_ranks(folder, 2, everything, folder)


@pytest.mark.parametrize("case", CASES)
def test_zero_gives_the_bits_of_plain_training(found, case):
    for rank in found:
        assert rank["bits"][case] == rank["bits"]["plain"]


@pytest.mark.parametrize("case", ["engine", "pipeline"])
def test_without_zero_it_does_so_without_attach(found, case):
    for rank in found:
        assert rank["without ZeRO"][case] == rank["bits"]["plain"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank has found."""
    folder = tmp_path_factory.mktemp("alone")
    return on_fresh_ranks(folder, 1, run_alone, folder)[0]


def test_so_it_does_on_one_rank(alone):
    assert len({*alone["bits"].values()}) == 1


def test_so_it_does_on_four(tmp_path):
    for rank in on_fresh_ranks(tmp_path, 4, bits, CASES, True):
        assert len({*rank.values()}) == 1, rank


def test_small_steps_go_as_far_as_with_fp32_masters(alone):
    found = alone["small steps"]
    assert abs(found[NEAREST]) < 0.1
    assert found[OURS] == pytest.approx(1, abs=0.05)


def test_vectors_can_share_a_group_with_matrices_where_they_are_treated_alike(found):
    zero, plain = found[0]["like matrices"]
    assert zero == plain


def test_its_description_says_who_holds_that(found):
    said = "; ZeRO-1 divides that among 2 processes, and DeepSpeed adds up and clips gradients in"
    assert said in found[0]["described"]


def test_a_model_that_was_made_in_shards_draws_the_same_noise(found):
    zero, plain = found[0]["made sharded"]
    assert zero == plain


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(found, alone):
    for rank in [*found, alone]:
        for case, (whole, cut) in rank["resumed"].items():
            assert cut == whole, case


def test_states_take_four_bytes_and_the_master_none(found):
    for rank in found:
        for each in rank["sizes"].values():
            assert each["bytes"] == 4 * each["elements"]
            assert each["aliased"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_estimate_counts_what_each_rank_keeps(found, stage):
    """Within 2 %: DeepSpeed pads."""
    shapes = shapes_of(model(), "model")
    estimates = zero_rows(shapes, optimizer_spec("AdamW"), precisions(), len(found))
    rows = {each["precision"]: each for each in estimates}
    for rank in found:
        estimated = rows["bf16-stochastic"][f"stage_{stage}"]
        assert estimated == pytest.approx(rank["kept"][stage], rel=0.02)


def test_each_flat_tensor_is_planned_for_once(found):
    for rank in found:
        for each in rank["sizes"].values():
            assert each["plans"] == each["flats"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("unattached ZeRO-1", "torch_bf16.attach(engine)"),
        ("unattached ZeRO-3", "torch_bf16.attach(engine)"),
        ("flags", '"bf16_master_weights_and_grads": true'),
        ("fp32 sums", '"grad_accum_dtype": "fp32" (in data_types)'),
        ("stage 0", "without ZeRO, delete the section bf16"),
        ("no ZeRO", "an engine without ZeRO, whose AdamW steps over the parameters themselves"),
        ("torch", "found an AdamW"),
        ("mixed", "torch_bf16.separate_vectors(optimizer)"),
        ("int8", "int8 moments cannot be kept under DeepSpeed"),
        ("keep_fp32", "keep_fp32=('1',)"),
        ("complex", "parameter 'wave' is complex, and DeepSpeed"),
        ("accumulate", "accumulate='bf16_stochastic'"),
        ("Adafactor", "Adafactor cannot step under DeepSpeed"),
        ("own step", "Adadelta cannot step under DeepSpeed: it looks at whole matrices, or has a"),
        ("Muon", "Muon cannot step under DeepSpeed: it looks at whole matrices"),
        ("cautious", "cautious and update_clipping are not possible under DeepSpeed"),
        ("schedule-free", "AdamWScheduleFree cannot be evaluated under DeepSpeed"),
        ("no engine", "engine, *_ = deepspeed.initialize(...)"),
        ("told", "gradient_clipping"),
        ("graphed", "DeepSpeed takes each of its steps"),
        ("release", "gradients cannot be released: DeepSpeed"),
        ("sums", "cannot be accumulated in 'fp32': DeepSpeed"),
        ("recipe", "Resume with the recipe that was saved"),
        ("experts", "layers of deepspeed.moe"),
        ("pipeline", "a PipelineEngine with ZeRO"),
        ("mpu", "tensor parallelism over 2 ranks"),
        ("right", "nothing was refused"),
    ],
)
def test_what_cannot_be_is_refused_by_name(found, case, said):
    assert said in found[0]["refusals"][case]
