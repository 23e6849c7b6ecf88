"""The CPU kernels on an arm64 processor that need not be here: cross-compiled, and emulated.

Numba's IR is taken before it is optimised, so ``NUMBA_OPT=0`` has to be set before Numba is
imported. Needs Unicorn, an emulator whose floating-point arithmetic is exact, and pyelftools.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import unicorn
from cross_compiled import cross_compile, without_cache
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from unicorn import arm64_const as arm64

from torch_bf16.backends.cpu import threads
from torch_bf16.backends.cpu.job import share

__all__ = ["on_arm64"]

_IMAGE, _STACK, _RETURN = 0x1000_0000, 0x2000_0000, 0x3000_0000
_ROOM, _PAGE = 1 << 20, 1 << 12
_ALLOCATED = 2  # SHF_ALLOC of ELF
# From "ELF for the Arm 64-bit Architecture": how many bits an address within its page is shifted
# by, and the relocations of an address's page and of branches.
_IN_PAGE = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}
_OF_PAGE, _BRANCHES = 275, (282, 283)


class _Function:
    """A function of one argument, an address, in the object code of an arm64 processor."""

    def __init__(self, code: bytes, name: str) -> None:
        image, entry = _linked(ELFFile(io.BytesIO(code)), name)
        self._entry = entry
        self._uc = uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        uc.ctl_set_cpu_model(arm64.UC_CPU_ARM64_MAX)
        for place, size in ((_IMAGE, _ROOM), (_STACK, _ROOM), (_RETURN, _PAGE)):
            uc.mem_map(place, size)
        uc.mem_write(_IMAGE, bytes(image))
        # Floating-point numbers do not trap.
        uc.reg_write(arm64.UC_ARM64_REG_CPACR_EL1, 3 << 20)
        kinds = unicorn.UC_HOOK_MEM_READ_UNMAPPED | unicorn.UC_HOOK_MEM_WRITE_UNMAPPED
        uc.hook_add(kinds, _share_memory)

    def __call__(self, argument: int) -> None:
        uc = self._uc
        uc.reg_write(arm64.UC_ARM64_REG_X0, argument)
        uc.reg_write(arm64.UC_ARM64_REG_SP, _STACK + _ROOM - 64)
        uc.reg_write(arm64.UC_ARM64_REG_LR, _RETURN)
        uc.emu_start(self._entry, _RETURN)


@contextmanager
def on_arm64(cpu: str) -> Iterator[None]:
    """Run all kernels of the CPU backend as an arm64 processor does, one thread each.

    Args:
        cpu: the processor that they are compiled for, one of ``cross_compiled.TARGETS`` without
            SVE, which the emulator lacks.
    """
    run_here = threads.run

    def run(work: Any, job: np.ndarray, max_threads: int) -> None:
        share(job, 1)
        _function(work.compiled, cpu)(job.ctypes.data)

    without_cache()
    threads.run = run
    try:
        yield
    finally:
        threads.run = run_here


# Of few: each emulator takes megabytes.
@functools.lru_cache(maxsize=4)
def _function(dispatcher: Any, cpu: str) -> _Function:
    (compiled,) = dispatcher.overloads.values()
    machine, module = cross_compile(compiled.library.get_llvm_str(), cpu, reloc="static")
    return _Function(machine.emit_object(module), compiled.fndesc.llvm_cfunc_wrapper_name)


def _share_memory(uc: Any, kind: int, address: int, size: int, value: int, data: Any) -> bool:
    """Let the emulator see this process's memory, at the same addresses, page by page."""
    for page in {address & -_PAGE, (address + size - 1) & -_PAGE}:
        if page < _PAGE:
            return False
        uc.mem_map_ptr(page, _PAGE, unicorn.UC_PROT_READ | unicorn.UC_PROT_WRITE, page)
    return True


def _linked(elf: ELFFile, name: str) -> tuple[bytearray, int]:
    """The image of an object file at its place in memory, and the address of a function."""
    image, places = bytearray(), {}
    for number, section in enumerate(elf.iter_sections()):
        if section["sh_flags"] & _ALLOCATED and section["sh_size"]:
            image += bytes(-len(image) % max(section["sh_addralign"], 1))
            places[number] = _IMAGE + len(image)
            image += section.data()
    symbols: Any = elf.get_section_by_name(".symtab")

    def address_of(symbol: Any) -> int:
        section = symbol["st_shndx"]
        if section not in places:
            raise NotImplementedError(f"the kernel calls {symbol.name}")
        return places[section] + symbol["st_value"]

    for section in elf.iter_sections():
        if isinstance(section, RelocationSection) and section["sh_info"] in places:
            for each in section.iter_relocations():
                place = places[section["sh_info"]] + each["r_offset"]
                target = address_of(symbols.get_symbol(each["r_info_sym"])) + each["r_addend"]
                at = place - _IMAGE
                (word,) = struct.unpack_from("<I", image, at)
                word |= _field(each["r_info_type"], place, target)
                struct.pack_into("<I", image, at, word)
    return image, address_of(symbols.get_symbol_by_name(name)[0])


def _field(kind: int, place: int, target: int) -> int:
    """The bits of an instruction at ``place`` that say where ``target`` is."""
    if kind in _IN_PAGE:
        return (target % _PAGE >> _IN_PAGE[kind]) << 10
    if kind in _BRANCHES:
        return (target - place >> 2) & (1 << 26) - 1
    if kind == _OF_PAGE:
        pages = target // _PAGE - place // _PAGE
        return (pages & 3) << 29 | (pages >> 2 & (1 << 19) - 1) << 5
    raise NotImplementedError(f"relocation {kind} of arm64")
