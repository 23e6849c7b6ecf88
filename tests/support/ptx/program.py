"""PTX as a list of instructions: what Triton hands to NVIDIA's assembler, or inline text."""

import re
from dataclasses import dataclass, replace

_COMMENT = re.compile(r"//[^\n]*")
_SKIPPED = re.compile(r"\s+|[{}]|\.loc[^\n]*\n|\.(?:reg|pragma)[^;]*;")
_LABEL = re.compile(r"(\$?\w+):")
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.]*)\s*([^;]*);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: ``"add.rn.f32"``.
        operands: as they are written, the destination first.
        guard: the predicate without which a lane leaves it out, or nothing.
        negated: whether the lanes that have the guard leave it out.
        target: of a branch: the number of the instruction to go on with.
    """

    name: str
    operands: tuple[str, ...]
    guard: str = ""
    negated: bool = False
    target: int = -1


@dataclass(frozen=True)
class Program:
    """Instructions in order, and the names of a kernel's parameters."""

    instructions: list[Instruction]
    parameters: list[str]

    @classmethod
    def of_kernel(cls, text: str) -> "Program":
        """The one kernel of a module."""
        # Triton 3.8 writes out which shared memory it means: that of the program itself.
        text = _COMMENT.sub("", text).replace(".shared::cta", ".shared")
        entry = re.search(r"\.entry\s+\w+\(([^)]*)\)[^{]*", text)
        assert entry, "there is no kernel"
        return cls(
            _instructions(_body(text[entry.end() :])), re.findall(r"\w+_param_\d+", entry[1])
        )

    @classmethod
    def of_inline(cls, text: str) -> "Program":
        """Inline text, its arguments ``$0``, ``$1`` and so on."""
        return cls(_instructions(text), [])


def _body(text: str) -> str:
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[1:place]
    raise AssertionError("the kernel does not end")


def _instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    labels: list[tuple[str, int]] = []
    place = 0
    while place < len(text):
        if skipped := _SKIPPED.match(text, place):
            place = skipped.end()
        elif label := _LABEL.match(text, place):
            labels.append((label[1], len(found)))
            place = label.end()
        else:
            statement = _STATEMENT.match(text, place)
            assert statement, text[place : place + 80]
            negated, guard, name, rest = statement.groups()
            operands = tuple(_OPERAND.findall(rest))
            found.append(Instruction(name, operands, guard or "", bool(negated)))
            place = statement.end()
    return [_with_target(number, each, labels) for number, each in enumerate(found)]


def _with_target(number: int, each: Instruction, labels: list[tuple[str, int]]) -> Instruction:
    if not each.name.startswith("bra"):
        return each
    places = [place for name, place in labels if name == each.operands[0]]
    # Inline text brings the same label each time, and jumps forward.
    target = places[0] if len(places) == 1 else min(p for p in places if p > number)
    return replace(each, target=target)
