"""accelerate.local_sgd averages weights every few steps, by less than a bf16 spacing each time."""

import local_sgd_on_ranks as on_ranks
import pytest


# Of 2048 weights rounded stochastically the mean scatters by 2 %.
@pytest.mark.parametrize(
    ("mode", "off"), [("no", 0.01), ("bf16-stochastic", 0.08), ("bf16-fp32-master", 0.01)]
)
def test_local_sgd_moves_as_far_as_in_fp32(ranks, mode, off):
    first, second = ranks(2, on_ranks.trained, mode)
    assert first[1] == second[1]
    matrix, vector, scale = first[0]
    assert scale == 0.5
    assert matrix == pytest.approx(64e-5 * 1.5, rel=off)
    assert vector == pytest.approx(64e-5, rel=0.1)
