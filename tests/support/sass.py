"""Reading NVIDIA machine code: what a compiled kernel executes for one element."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^(\.L\w+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L\w+)\)")


@dataclass
class Code:
    """A kernel's instructions in order, and the place of each label."""

    instructions: list[str]
    labels: dict[str, int]
    resources: dict[str, int]

    @classmethod
    def of(cls, cubin: bytes, folder: Path) -> "Code":
        (folder / "kernel.cubin").write_bytes(cubin)
        # Its analysis of the data flow takes a third of the time, and adds nothing to the listing.
        listing = _asked(["nvdisasm", "-c", "-ndf"], folder / "kernel.cubin")
        usage = _asked(["cuobjdump", "-res-usage"], folder / "kernel.cubin")
        found = {key: int(number) for key, number in re.findall(r"([A-Z]+):(\d+)", usage)}
        code = cls([], {}, {})
        for line in listing.splitlines():
            if label := _LABEL.match(line):
                code.labels[label[1]] = len(code.instructions)
            elif instruction := _INSTRUCTION.search(line):
                code.instructions.append(instruction[1])
        spills = [text for text in code.instructions if opcode(text).startswith(("LDL", "STL"))]
        code.resources = {
            "registers": found["REG"], "spills": len(spills),
            "stack": found["STACK"] + found["LOCAL"], "shared": found["SHARED"],
        }  # fmt: skip
        return code

    def loops(self) -> list[list[str]]:
        """The opcodes of each loop, from its label to the branch back, without slow paths."""
        found = []
        for end, text in enumerate(self.instructions):
            target = _BRANCH.search(text)
            if target and self.labels.get(target[1], end + 1) <= end:
                body = self.usual(self.labels[target[1]], end + 1)
                found.append([opcode(text) for text in body])
        return found

    def usual(self, first: int, last: int) -> list[str]:
        """Instructions ``first .. last - 1``, without what branches to slow paths skip.

        Division and square root have one where a number is subnormal, Inf, NaN or, for the root, 0.
        """
        found, number = [], first
        while number < last:
            found.append(self.instructions[number])
            target = _BRANCH.search(found[-1])
            number += 1
            behind = self.labels.get(target[1], 0) if target else 0
            if any("slowpath" in each for each in self.instructions[number:behind]):
                number = behind
        return found


def _asked(command: list[str], file: Path) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / command[0]
    return subprocess.run(
        [tool, *command[1:], file], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def opcode(instruction: str) -> str:
    """``LDG.E.128`` of ``@!P0 LDG.E.128 R4, ...``."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def bytes_stored(name: str) -> int:
    """What a thread stores to global memory by one instruction."""
    if not name.startswith("STG"):
        return 0
    width = re.search(r"\.(?:U?(8|16)|64|128)\b", name)
    return 4 if not width else int(re.sub(r"\D", "", width[0])) // 8


def kind(name: str) -> str:
    """``float`` of an opcode that computes in fp32, ``special`` of an approximation, and so on."""
    base = name.split(".")[0]
    if base == "MUFU":
        return "special"
    if base in ("BRA", "BSSY", "BSYNC", "CALL", "RET", "EXIT", "BAR", "WARPSYNC", "NOP", "YIELD"):
        return "control"
    if base.startswith(("LD", "ST", "SHFL", "ATOM")):
        return "memory"
    return "float" if base.startswith("F") else "integer"
