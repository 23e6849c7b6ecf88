"""The registers of many lanes."""

import functools
import re
import struct

import numpy as np

from .arithmetic import F32, TYPES, U32, U64, compute, operand_types

_WIDTHS = {"%p": np.bool_, "%rs": np.uint16, "%r": U32, "%rd": U64}


class Registers:
    """Bits by the names of registers: an array with a number for each lane.

    Args:
        n: number of lanes.
        known: the bits of what is no register and has a name.
        approximations: what ``rcp`` and ``rsqrt`` give.
    """

    def __init__(self, n, known, approximations):
        self._n, self._known, self._approximations = n, known, approximations
        self._bits = {}
        # Most instructions run in the same lanes as the one before.
        self._lanes, self._in_all = None, False

    def compute(self, each, lanes):
        """Carry out an instruction that knows registers alone, in some lanes."""
        if each.name.startswith("mov") and "{" in "".join(each.operands):
            self._repack(each.name, each.operands, lanes)
            return
        kinds, (to, *operands) = operand_types(each.name), each.operands
        values = [self.value(text, kind) for text, kind in zip(operands, kinds, strict=False)]
        self.write(to, compute(each.name, values, self._approximations), lanes)

    def value(self, text, kind):
        """An operand as numbers of a type; longer registers give their lower part."""
        kind = np.dtype(kind)
        if (register := self._bits.get(text)) is not None:
            if register.dtype == kind:
                return register
            if register.itemsize != kind.itemsize:
                register = register.astype(f"u{kind.itemsize}")
            return register.view(kind)
        if text in self._known:
            return np.asarray(self._known[text]).astype(f"u{kind.itemsize}").view(kind)
        return np.asarray(_immediate(text, kind))

    def write(self, text, result, lanes):
        """Give a register a result, in some lanes."""
        result = np.asarray(result)
        if result.dtype != np.bool_:
            result = result.view(f"u{result.itemsize}")
        # Registers are replaced and never changed, so that two may share an array.
        result = result.astype(_width(text) or result.dtype, copy=False)
        if result.shape != (self._n,):
            result = np.broadcast_to(result, self._n)
        if lanes is not self._lanes:
            self._lanes, self._in_all = lanes, lanes.all()
        if not self._in_all:
            before = self._bits.get(text)
            if before is None:
                # What other lanes have not written is no number that a kernel could count on.
                before = U64(0xA5A5A5A5A5A5A5A5).astype(result.dtype)
            result = np.where(lanes, result, before)
        self._bits[text] = result

    def _repack(self, name, operands, lanes):
        """``mov`` from several registers into one, or back."""
        to, source = operands
        parts = re.findall(r"[^{},\s]+", to if "{" in to else source)
        size = np.dtype(TYPES[name.removeprefix("mov.")]).itemsize
        piece = size // len(parts)
        if "{" in source:
            for each in parts:
                if each.startswith("%"):
                    # LLVM leaves a half that nobody reads unwritten.
                    self._bits.setdefault(each, np.full(self._n, 0xA5A5A5A5, U32))
            pieces = [np.broadcast_to(self.value(each, f"u{piece}"), self._n) for each in parts]
            packed = np.ascontiguousarray(np.stack(pieces, axis=1)).view(f"u{size}")
            self.write(to, packed.reshape(-1), lanes)
            return
        pieces = np.ascontiguousarray(self._bits[source]).view(f"u{piece}")
        for place, part in enumerate(parts):
            if part != "_":
                self.write(part, pieces[place :: len(parts)], lanes)


@functools.cache
def _width(text):
    """The type of a register's bits; None of what is none."""
    prefix = re.match(r"%[a-z]+", text)
    return _WIDTHS[prefix[0]] if prefix else None


def _immediate(text, kind):
    if text.startswith("0f"):
        return np.array(int(text[2:], 16), U32).view(F32)
    if text.startswith("0d"):
        return np.array(struct.unpack(">d", bytes.fromhex(text[2:]))[0], np.float64)
    if kind == np.bool_:
        return np.array(bool(int(text)))
    number = int(text.rstrip("U"), 0) % (1 << 8 * kind.itemsize)
    return np.array(number, f"u{kind.itemsize}").view(kind)
