"""What one process has compiled, the next one reads from Triton's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import json
import triton
from triton_variants import all_variants, compiled, compiled_prepare
hits = []
def listener(*, cache_hit, **rest):
    hits.append(cache_hit)
triton.knobs.compilation.listener = listener
variants = all_variants()
for name in (
    "adamw_bf16_stochastic_bf16_nearest_bf16_stochastic_bfloat16",
    "adamw_bf16_plus_16_fp32_fp32_bfloat16",
):
    compiled(variants[name], "sm_90")
    compiled_prepare(variants[name].rule, "sm_90")
print(json.dumps(hits))
"""


def test_a_process_compiles_nothing_that_another_one_has_compiled(tmp_path):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    found = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", COMPILE],
                cwd=Path(__file__).parents[1] / "support",
                env=environment,
                capture_output=True,
                text=True,
                timeout=240,
                check=True,
            ).stdout
        )
        for _ in range(2)
    ]
    # One `prepare` serves both variants.
    assert found == [[False, False, False, True], [True] * 4]
