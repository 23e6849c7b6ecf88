"""What other launch parameters of the Triton step are worth, on the GPU at hand.

    python tests/proofs/tuning.py --models gpt2-124m llama-1b --json tuning.json
    python tests/proofs/tuning.py --compile sm_90

A candidate sets the warps of a program, elements per thread and turn, turns per program, and the
registers of a thread. It must compile and pass the variant's certificate. Then the candidates step
the same tensors in turn, AdamW over the matrices of a model, beside a copy of a large tensor:
printed are the median time of the launch alone, the ratio to what is used now in the same round,
and the bytes moved per second as a share of the copy's.

With ``--compile`` no GPU is needed: printed are the registers, spills, instructions per element and
resident warps of each candidate on a target; ``--verify`` runs the certificates of sm_* targets,
too, in tests/support/ptx. ``--rehearse`` goes through the timing on a CPU, where launches do
nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import triton_variants
from compiled_code import bytes_moved, measured
from triton_variants import OTHERS, TARGETS, formats_of

from torch_bf16.backends import _BACKENDS, StepInputs, Variant
from torch_bf16.backends.certificates import certificate
from torch_bf16.backends.triton import kernel, launch
from torch_bf16.engine.batch import Batch
from torch_bf16.recipe import RECIPES, Recipe
from torch_bf16.rules import ADAMW
from torch_bf16.tools.bench.clock import clock_for
from torch_bf16.tools.bench.entries import ours
from torch_bf16.tools.bench.models import MODELS, random_shapes
from torch_bf16.tools.bench.running import Copy
from torch_bf16.tools.machine import device_state

NAMED: dict[str, Recipe] = {**RECIPES, **{each.name: each for each in OTHERS}}
RECIPES_BY_DEFAULT = ("bf16-stochastic", "bf16-fp32-master", "8-bit moments")
ROUNDS, UNTIMED = 12, 2
# What a multiprocessor has: of sm_80, sm_90 and sm_100. Others hold fewer warps.
_REGISTERS, _WARPS, _PROGRAMS = 1 << 16, 64, 32


@dataclass(frozen=True)
class Candidate:
    """How the step is compiled and cut into programs.

    Attributes:
        warps: of a program.
        elements: of a thread in a turn.
        turns: of a program.
        registers: of a thread, at most; 0 for no limit, None for what is used now.
    """

    warps: int = 4
    elements: int = 8
    turns: int = 8
    registers: int | None = None

    @property
    def block(self) -> int:
        """Elements of a program in a turn."""
        return 32 * self.warps * self.elements

    def __str__(self) -> str:
        registers = {None: "as now", 0: "no limit"}.get(self.registers, self.registers)
        return f"{self.warps} warps x {self.elements}, {self.turns} turns, registers {registers}"


NOW = Candidate()
CANDIDATES = (
    NOW,
    *(replace(NOW, registers=number) for number in (64, 72, 80, 96, 104, 128, 0)),
    *(replace(NOW, turns=number) for number in (1, 2, 4, 16, 32)),
    *(replace(NOW, elements=4, registers=number) for number in (None, 40, 56, 64)),
    *(replace(NOW, elements=16, registers=number) for number in (None, 96, 128, 168, 0)),
    *(replace(NOW, warps=number) for number in (1, 2, 8)),
    Candidate(warps=8, turns=4, registers=64),
    Candidate(warps=2, turns=16, registers=96),
    Candidate(warps=2, turns=16, registers=128),
    Candidate(warps=1, turns=32, registers=128),
)


@contextmanager
def applied(candidate: Candidate) -> Iterator[None]:
    """Within, kernels are compiled and tensors cut by a candidate."""
    used = kernel.options

    def options(*asked: Any) -> dict[str, Any]:
        chosen = {**used(*asked), "num_warps": candidate.warps}
        if candidate.registers is not None:
            chosen.pop("maxnreg", None)
        return chosen | ({"maxnreg": candidate.registers} if candidate.registers else {})

    chunk = candidate.turns * candidate.block
    values = {
        kernel: {"BLOCK": candidate.block, "CHUNK": chunk},
        launch: {"CHUNK": chunk, "options": options},
        triton_variants: {"options": options},
    }
    before = {
        module: {name: getattr(module, name) for name in its} for module, its in values.items()
    }
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: dict[Any, dict[str, Any]]) -> None:
    for module, its in values.items():
        for name, value in its.items():
            setattr(module, name, value)
    kernel.constants.cache_clear()


def fault_of(variant: Variant) -> str | None:
    """Why a kernel, as it is compiled now, must not be used; None where its bits are right."""
    try:
        return certificate._load_kernels(_BACKENDS["triton"], certificate.Trial.of(variant))()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Tuning:
    """A model's matrices, and kernels of several candidates over them.

    Args:
        recipe: of their AdamW.
        shapes: of the matrices.
        device: where.
        certified: whether a candidate must pass the certificate first.
    """

    def __init__(
        self,
        recipe: Recipe,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        certified: bool,
    ) -> None:
        (entry,) = ours([recipe], "triton")
        self._optimizer: Any = entry.make([*shapes], device)
        self._optimizer.step()
        plan = self._optimizer._engine.plan
        (self._launch,) = plan._launches
        (self._scalars,) = plan.scalars(self._optimizer.param_groups, StepInputs())
        self._gradients = [row.member.parameter.grad for row in self._launch.rows]
        self._addresses = np.array([each.data_ptr() for each in self._gradients], np.int64)
        self._certified = certified
        self.variant: Variant = self._launch.batch.variant
        elements = sum(each.numel() for each in self._gradients)
        self.bytes = elements * sum(bytes_moved(self.variant))

    def batch(self, candidate: Candidate) -> tuple[Batch | None, str | None]:
        """The candidate's kernel over the matrices, or why there is none."""
        with applied(candidate):
            if self._certified and (fault := fault_of(self.variant)):
                return None, fault
            tasks = [row.task for row in self._launch.rows]
            try:
                batch = Batch(tasks, self._optimizer.recipe.seed, "triton")
                batch.compile(self._scalars.table.shape[1] - 2)
            except Exception as error:
                return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return batch, None

    def run(self, batch: Batch) -> None:
        """One launch."""
        batch.run(self._gradients, self._scalars, addresses=self._addresses)


def time_candidates(
    tuning: Tuning, candidates: Sequence[Candidate], device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """Times of all candidates that work, in turn within each round; faults of the others."""
    clock = clock_for(device)
    batches, faults = {}, {}
    for each in candidates:
        batch, fault = tuning.batch(each)
        if batch is None:
            faults[each] = fault
        else:
            batches[each] = batch
    copy = Copy((1 << 30) if device.type == "cuda" else (1 << 20), clock)
    seconds: dict[Candidate, list[float]] = {each: [] for each in batches}
    for number in range(UNTIMED + rounds):
        copy.run(clock, number >= UNTIMED)
        # Each round begins with another one: what follows a copy finds other things in the cache.
        first = number % len(batches)
        for each, batch in [*batches.items()][first:] + [*batches.items()][:first]:
            taken, _ = clock.time(lambda batch=batch: tuning.run(batch))
            if number >= UNTIMED:
                seconds[each].append(taken)
    rate = statistics.median(copy.rates)
    rows: list[dict[str, Any]] = [
        {**asdict(each), "fault": fault} for each, fault in faults.items()
    ]
    for each, times in seconds.items():
        ratios = sorted(one / other for one, other in zip(times, seconds[NOW], strict=True))
        middle = statistics.median(times)
        rows.append(
            {
                **asdict(each),
                "ms": 1e3 * middle,
                "of_now": [
                    ratios[len(ratios) // 4],
                    statistics.median(ratios),
                    ratios[-1 - len(ratios) // 4],
                ],
                "of_copy": tuning.bytes / middle / rate,
            }
        )
    return rows


def show_times(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for row in sorted(rows, key=lambda row: row.get("ms", np.inf)):
        name = str(Candidate(**{name: row[name] for name in asdict(NOW)}))
        if fault := row.get("fault"):
            print(f"  {name:48} {fault}")
            continue
        low, middle, high = row["of_now"]
        print(
            f"  {name:48} {row['ms']:8.3f} ms  {middle:5.3f} ({low:.3f} to {high:.3f}) of now  "
            f"{100 * row['of_copy']:5.1f} % of copy",
            flush=True,
        )


def matrix_variant(recipe: Recipe) -> Variant:
    """What AdamW runs for a matrix in bf16."""
    matrix = torch.empty(2, 64, dtype=torch.bfloat16)
    return Variant(ADAMW, formats_of(recipe, ADAMW, matrix), torch.bfloat16, torch.device("cuda"))


def show_compiled(target: str, recipes: Sequence[str], verify: bool) -> list[dict[str, Any]]:
    """What each candidate compiles to for a target."""
    if verify:
        from ptx import machine

        torch.set_num_threads(1)
        machine.install(int(target.removeprefix("sm_")))
    rows = []
    for name in recipes:
        print(f"\n{name}, {target}")
        for each in CANDIDATES:
            with applied(each):
                row: dict[str, Any] = {"recipe": name, **asdict(each)}
                try:
                    row |= measured(matrix_variant(NAMED[name]), target)
                except Exception as error:
                    row["fault"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if verify and "fault" not in row:
                    device = torch.device("cpu")
                    row["fault"] = fault_of(replace(matrix_variant(NAMED[name]), device=device))
            rows.append(row)
            text = f"  {each!s:48} "
            if "registers" in row:
                row["resident_warps"] = resident_warps(each.warps, row["registers"])
                text += (
                    f"{row['registers']:4} registers, {row['spills']} spills, "
                    f"{row['instructions']:6.1f} instructions, {row['resident_warps']:2} warps"
                )
            print(text, row.get("fault") or "", flush=True)
    return rows


def resident_warps(warps: int, registers: int) -> int:
    """Warps of as many programs as a multiprocessor holds at once."""
    per_warp = 32 * -(-registers // 8) * 8
    return warps * min(_REGISTERS // (per_warp * warps), _WARPS // warps, _PROGRAMS)


def main() -> int:
    parser = argparse.ArgumentParser(description="launch parameters of the Triton step")
    parser.add_argument("--models", nargs="+", default=["gpt2-124m", "llama-1b"], choices=[*MODELS])
    parser.add_argument("--recipes", nargs="+", default=RECIPES_BY_DEFAULT, choices=[*NAMED])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", choices=[*TARGETS], metavar="TARGET")
    parser.add_argument(
        "--verify", action="store_true", help="with --compile sm_*: certificates, too"
    )
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    record: dict[str, Any] = {"torch": torch.__version__}
    if options.compile:
        record["compiled"] = show_compiled(options.compile, options.recipes, options.verify)
    else:
        # With its number, which torch.cuda.set_device needs.
        device = torch.device("cpu" if options.rehearse else "cuda:0")
        models = {name: MODELS[name] for name in options.models}
        if options.rehearse:
            from host_time import stub_triton

            stub_triton()
            models = {"rehearsal": random_shapes(1 << 20, 12)}
        record["before"] = device_state(device)
        for model, shapes in models.items():
            matrices = [shape for shape in shapes if len(shape) > 1]
            for name in options.recipes:
                tuning = Tuning(NAMED[name], matrices, device, certified=not options.rehearse)
                rows = time_candidates(tuning, CANDIDATES, device, options.rounds)
                show_times(f"{model}, {name}", rows)
                record[f"{model}, {name}"] = rows
                if options.json:
                    options.json.write_text(json.dumps(record, indent=1) + "\n")
                del tuning
        record["after"] = device_state(device)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
