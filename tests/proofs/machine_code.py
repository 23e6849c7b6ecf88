"""What the Triton kernels compile to, for GPUs that need not be there.

python tests/proofs/machine_code.py FOLDER            measure with the Triton that is imported
python tests/proofs/machine_code.py FOLDER --table    write FOLDER/README.md of what is there

The variants are those of a recipe for each byte count under AdamW and SGD, and one of each other
rule, with bf16 gradients. All that certificates ship, 648 of them, would take hours. With another
Triton:

pip install --target build/triton --no-deps triton==3.6.0
PYTHONPATH=build/triton:kernels python tests/proofs/machine_code.py FOLDER
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import triton
from compiled_code import measured
from triton_variants import TARGETS, all_variants, one_variant_of_each_other_rule

from torch_bf16.rules import ADAM, SGD_NESTEROV

KINDS = ("float", "integer", "special", "memory", "control")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if chosen.table:
        records = [json.loads(each.read_text()) for each in chosen.folder.glob("triton-*.json")]
        records.sort(key=lambda record: record["triton"])
        (chosen.folder / "README.md").write_text("\n".join(table(records)) + "\n")
        return 0
    return measure(chosen.folder / f"triton-{triton.__version__}.json", chosen.targets)


def measure(file, targets):
    found = {**all_variants(), **one_variant_of_each_other_rule()}
    chosen = {
        name: each
        for name, each in found.items()
        if each.gradient_dtype == torch.bfloat16 and each.rule not in (ADAM, SGD_NESTEROV)
    }
    record = json.loads(file.read_text()) if file.exists() else {"targets": {}}
    record["triton"] = triton.__version__
    for target in targets:
        begin = time.perf_counter()
        record["targets"][target] = {
            name: measured(variant, target) for name, variant in chosen.items()
        }
        file.write_text(_json(record))
        print(f"{target}: {len(chosen)} variants, {time.perf_counter() - begin:.0f} s", flush=True)
    return 0


def _json(record):
    """A line for each variant."""
    targets = [
        f'  "{target}": {{\n'
        + ",\n".join(f'    "{name}": {json.dumps(row)}' for name, row in rows.items())
        + "\n  }"
        for target, rows in record["targets"].items()
    ]
    first = f'{{"triton": "{record["triton"]}", "targets": {{\n'
    return first + ",\n".join(targets) + "\n}}\n"


def table(records):
    yield "# Machine code"
    yield ""
    yield "Compiled without a GPU by `python tests/proofs/machine_code.py`, which says which"
    yield "variants these are. Registers of a thread and accesses to its stack; widths of its other"
    yield "accesses in bits, and how many there are for a block; instructions per element of a"
    yield "whole block, without the slow paths of division and root: fp32 arithmetic, integer,"
    yield "approximations of the hardware, memory and control."
    for record in records:
        for target, rows in record["targets"].items():
            spilled = [name for name, row in rows.items() if row["spills"]]
            spills = f"spills: {', '.join(spilled)}" if spilled else "nothing spills"
            yield f"\n## {target}, Triton {record['triton']}: {spills}\n"
            yield (
                "| variant | registers | spills | loads | stores | all | "
                + " | ".join(KINDS)
                + " |"
            )
            yield "|---" * (6 + len(KINDS)) + "|"
            yield from (_row(name, row) for name, row in rows.items())


def _row(name, row):
    kinds = " | ".join(f"{row['kinds'].get(kind, 0):.1f}" for kind in KINDS)
    loads, stores = (
        ", ".join(f"{bits}: {number}" for bits, number in row[each].items())
        for each in ("loads", "stores")
    )
    return (
        f"| `{name.removesuffix('_bfloat16')}` | {row['registers']} | {row['spills']} | {loads} | "
        f"{stores} | {row['instructions']:.1f} | {kinds} |"
    )


if __name__ == "__main__":
    sys.exit(main())
