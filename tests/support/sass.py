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

    @classmethod
    def of(cls, cubin: bytes, folder: Path) -> "Code":
        (folder / "kernel.cubin").write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        listing = subprocess.run(
            [tool, "-c", folder / "kernel.cubin"],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        code = cls([], {})
        for line in listing.splitlines():
            if label := _LABEL.match(line):
                code.labels[label[1]] = len(code.instructions)
            elif instruction := _INSTRUCTION.search(line):
                code.instructions.append(instruction[1])
        return code

    def loops(self) -> list[list[str]]:
        """The bodies of all loops, each from its label to the branch back."""
        return [
            self.blocks(self.labels[target[1]], end + 1)
            for end, text in enumerate(self.instructions)
            if (target := _BRANCH.search(text)) and self.labels.get(target[1], end + 1) <= end
        ]

    def blocks(self, first: int, last: int) -> list[list[str]]:
        """Instructions ``first .. last - 1``, cut at labels and behind branches."""
        starts = set(self.labels.values())
        blocks: list[list[str]] = [[]]
        for number in range(first, last):
            if number in starts:
                blocks.append([])
            blocks[-1].append(self.instructions[number])
            if opcode(self.instructions[number]).split(".")[0] in ("BRA", "EXIT", "RET"):
                blocks.append([])
        return [block for block in blocks if block]


def opcode(instruction: str) -> str:
    """``LDG.E.128`` of ``@!P0 LDG.E.128 R4, ...``."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def usual(blocks: list[list[str]]) -> list[str]:
    """Opcodes without the blocks that call a slow path.

    Division and square root branch off where a number is subnormal, Inf, NaN or, for the root, 0.
    """
    return [
        opcode(text)
        for block in blocks
        if not any(opcode(text).startswith("CALL") for text in block)
        for text in block
    ]
