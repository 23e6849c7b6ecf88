"""The shapes that the benchmark steps are those of the models it names."""

import pytest
import torch

from torch_bf16.tools.bench.models import MODELS, llama, random_shapes, shard


def count(shapes):
    return sum(torch.Size(shape).numel() for shape in shapes)


@pytest.mark.parametrize(
    ("model", "parameters", "tensors"),
    [
        # As the models' own repositories give them; the shard is an eighth of 8,030,261,248.
        ("gpt2-124m", 124_439_808, 148),
        ("llama-1b", 1_235_814_400, 146),
        ("llama-8b-shard", 1_003_782_656, 291),
    ],
)
def test_a_model_has_its_published_size(model, parameters, tensors):
    shapes = MODELS[model]
    assert (count(shapes), len(shapes)) == (parameters, tensors)


def test_an_untied_head_is_a_second_embedding():
    tied = llama(1, 8, 16, 4, vocabulary=32, tied=True)
    assert llama(1, 8, 16, 4, vocabulary=32, tied=False) == [*tied, (32, 8)]


def test_rank_0_of_a_shard_has_the_larger_part():
    assert shard([(10, 3), (8,), (1, 5)], 4) == [(3, 3), (2,), (1, 5)]


@pytest.mark.parametrize("shape", shard([(10, 3)], 4))
def test_a_shard_is_what_torch_chunk_cuts(shape):
    assert torch.zeros(10, 3).chunk(4)[0].shape == shape


def test_random_shapes_have_the_size_that_was_asked_for():
    shapes = random_shapes(50_000_000, 150)
    assert len(shapes) == 150
    assert sum(len(shape) == 1 for shape in shapes) == 50
    assert abs(count(shapes) - 50_000_000) < 768 * 100


def test_more_tensors_than_parameters_suffice_for_are_refused():
    assert count(random_shapes(150 * 768, 150)) == 150 * 768
    with pytest.raises(ValueError, match="give --parameters 115,200 or more, or fewer --tensors"):
        random_shapes(1000, 150)
