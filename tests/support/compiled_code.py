"""What a variant's machine code for a device does with a whole block, in numbers."""

import re
import tempfile
from collections import Counter
from pathlib import Path

import gcn
import sass
from triton_variants import TARGETS, compiled


def bytes_moved(variant):
    """(read, written) for each element; scales, of which few threads hold one, left out."""
    written = sum(p.dtype.itemsize for f in variant.formats for p in f.planes if p.block == 1)
    return variant.gradient_dtype.itemsize + written, written


def measured(variant, target):
    """Registers, spills, widths of accesses in bits, and instructions per element by kind.

    Of the loop over whole blocks, which is the one that stores the most; slow paths left out.
    """
    kernel = compiled(variant, target)
    if TARGETS[target].backend == "hip":
        assembly = kernel.asm["amdgcn"]
        found, bodies = gcn.resources(assembly), gcn.loops(assembly)
        stored_by, kind = gcn.bytes_stored, gcn.kind
    else:
        with tempfile.TemporaryDirectory() as folder:
            code = sass.Code.of(kernel.asm["cubin"], Path(folder))
        found, bodies = code.resources, code.loops()
        stored_by, kind = sass.bytes_stored, sass.kind
    body = max(bodies, key=lambda texts: sum(map(stored_by, texts)))
    # Some threads store a scale for each number in blocks, too.
    scales = sum(4 for each in variant.formats if each.block > 1)
    elements = (sum(map(stored_by, body)) - scales) / bytes_moved(variant)[1]
    kinds = Counter(map(kind, body))
    return {
        **found,
        "elements": elements,
        "loads": _widths(body, r"LDG|(global|buffer)_load"),
        "stores": _widths(body, r"STG|(global|buffer)_store"),
        "instructions": round(len(body) / elements, 2),
        "kinds": {name: round(number / elements, 2) for name, number in sorted(kinds.items())},
    }


def _widths(body, name):
    found = Counter(_bits(text) for text in body if re.match(name, text))
    return {str(bits): number for bits, number in sorted(found.items(), reverse=True)}


def _bits(text):
    words = re.search(r"dwordx(\d)", text)
    if words:
        return 32 * int(words[1])
    size = re.search(r"(?:\.|_[bu])(8|16|32|64|96|128)\b", text.split()[0])
    return (
        int(size[1])
        if size
        else {"ushort": 16, "short": 16, "ubyte": 8, "byte": 8}.get(
            text.split()[0].rpartition("_")[2], 32
        )
    )
