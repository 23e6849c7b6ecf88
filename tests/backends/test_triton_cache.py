"""What one process has compiled, the next one reads from Triton's cache."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")

import triton
from forked_scripts import call_in_fork
from triton_variants import all_variants, compiled, compiled_prepare


def compile_and_print_what_was_found():
    hits = []

    def listener(*, cache_hit, **rest):
        hits.append(cache_hit)

    triton.knobs.compilation.listener = listener
    variants = all_variants()
    for name in ("sgd_bf16_stochastic_bfloat16", "sgd_bf16_plus_16_bfloat16"):
        compiled(variants[name], "sm_90")
        compiled_prepare(variants[name].rule, "sm_90")
    print(json.dumps(hits))


def test_a_process_compiles_nothing_that_another_one_has_compiled(tmp_path):
    where = {"folder": tmp_path, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    found = [
        json.loads(call_in_fork(compile_and_print_what_was_found, **where).splitlines()[-1])
        for _ in range(2)
    ]
    # One `prepare` serves both variants.
    assert found == [[False, False, False, True], [True] * 4]
