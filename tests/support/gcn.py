"""Reading AMD's assembly: what a compiled kernel executes for one element."""

import re

_LABEL = re.compile(r"^(\.LBB\w+):")
_BRANCH = re.compile(r"^s_c?branch\w*\s+(\.LBB\w+)")


def loops(assembly: str) -> list[list[str]]:
    """The instructions of each loop, from its label to the branch back. There are no slow paths."""
    labels, instructions = {}, []
    for line in assembly.splitlines():
        text = line.partition(";")[0].strip()
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif line.startswith("\t") and text and not text.startswith("."):
            instructions.append(text)
    found = []
    for end, text in enumerate(instructions):
        target = _BRANCH.match(text)
        if target and labels.get(target[1], end + 1) <= end:
            found.append(instructions[labels[target[1]] : end + 1])
    return found


def resources(assembly: str) -> dict[str, int]:
    """Registers of a thread, those of a wave that are spilled, bytes of shared memory."""

    def number(name):
        return int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1])

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "stack": number("private_segment_fixed_size"),
        "shared": number("group_segment_fixed_size"),
    }


def bytes_stored(text: str) -> int:
    """What a thread stores to global memory by one instruction."""
    found = re.match(r"(?:global|buffer)_store_(?:dwordx(\d)|b(\d+)|(dword|short|byte))", text)
    if not found:
        return 0
    words, bits, name = found.groups()
    if words or bits:
        return 4 * int(words) if words else int(bits) // 8
    return {"dword": 4, "short": 2, "byte": 1}[name]


def kind(text: str) -> str:
    name = text.split()[0]
    if re.match(r"s_(c?branch|setpc|swappc|waitcnt|wait_|nop|delay|clause|barrier)", name):
        return "control"
    if re.match(r"v_(rcp|rsq|sqrt)", name):
        return "special"
    if name.startswith(("global_", "ds_", "buffer_", "scratch_", "s_load")):
        return "memory"
    return "float" if re.match(r"v_.*f(32|16)", name) else "integer"
