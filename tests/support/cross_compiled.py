"""The CPU kernels' machine code for processors that need not be here.

Numba compiles for the machine that it runs on. So its LLVM IR is taken before it is optimised,
which Numba does with ``NUMBA_OPT=0``, in a process of its own; then Numba's own passes run on it
for another processor.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TARGETS = {
    "haswell": "x86_64-unknown-linux-gnu",
    "znver3": "x86_64-unknown-linux-gnu",
    "neoverse-n1": "aarch64-unknown-linux-gnu",
    "neoverse-v1": "aarch64-unknown-linux-gnu",
    "apple-m1": "aarch64-unknown-linux-gnu",
}
"""Processors and their triples: AVX2, NEON, SVE of 256 bits, NEON."""


def cross_compiled(moments: dict[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    """The assembly of AdamW over bf16 weights, stochastic, for each of :data:`TARGETS`.

    For some formats of both moments, by the names of these.
    """
    environment = {**os.environ, "NUMBA_OPT": "0", "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(moments)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def loops(assembly: str) -> list[list[str]]:
    """The instructions of each loop, shortest first, as ``"mnemonic operands"``."""
    lines = assembly.split("\n")
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".L")}
    found = []
    for end, line in enumerate(lines):
        jump = re.match(r"\t(?:j|b)\S*\s+(?:\S+, )*(\.L\w+)", line)
        begin = labels.get(jump[1]) if jump else None
        if begin is not None and begin < end:
            body = [each for each in lines[begin:end] if re.match(r"\t[^.]", each)]
            found.append([" ".join(each.split()) for each in body])
    return sorted(found, key=len)


def _main(moments: str) -> None:
    without_cache()
    found = {}
    for name, formats in json.loads(moments).items():
        ir, found[name] = _ir(*formats), {}
        for cpu in TARGETS:
            machine, module = cross_compile(ir, cpu)
            found[name][cpu] = machine.emit_assembly(module)
    print(json.dumps(found))


def without_cache() -> None:
    """Let the CPU backend compile everything: what is read from Numba's cache has no IR."""
    import numba

    from torch_bf16.backends.cpu import cache

    njit = numba.njit

    class WithoutCache:
        @staticmethod
        def njit(*arguments, cache=False, **options):
            return njit(*arguments, **options)

    cache.numba = WithoutCache


def _ir(exp_avg: str, exp_avg_sq: str) -> str:
    import torch

    from torch_bf16 import rules
    from torch_bf16.backends.bucket import Variant
    from torch_bf16.backends.cpu import kernel
    from torch_bf16.recipe import Recipe

    recipe = Recipe(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    roles = ("weights", "exp_avg", "exp_avg_sq")
    formats = tuple(recipe.format_of(role, (64, 64)) for role in roles)
    variant = Variant(rules.ADAMW, formats, torch.bfloat16, torch.device("cpu"))
    (compiled,) = kernel.compile_step(variant, 7).compiled.overloads.values()
    return compiled.library.get_llvm_str()


def cross_compile(ir: str, cpu: str, reloc: str = "pic") -> tuple[Any, Any]:
    """LLVM's machine and optimised module for one of :data:`TARGETS`, from unoptimised IR."""
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = TARGETS[cpu]
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, opt=3, reloc=reloc, codemodel="small"
    )
    ir = re.sub('target triple = ".*"', f'target triple = "{triple}"', ir)
    ir = re.sub('target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', ir)
    module = llvm.parse_assembly(ir)
    codegen = copy.copy(cpu_target.target_context.codegen())
    codegen._tm = machine
    for options in ({"slp_vectorize": False, "cost": "cheap"}, {"slp_vectorize": True}):
        passes, builder = codegen._module_pass_manager(opt=3, loop_vectorize=True, **options)
        passes.run(module, builder)
    return machine, module


if __name__ == "__main__":
    _main(*sys.argv[1:])
