"""CUDA binaries without what only debuggers and profilers read, which is most of their bytes."""

from __future__ import annotations

import struct

_DEBUG = (b".nv_debug_", b".debug_line", b".rela.nv_debug_", b".rela.debug_line")
"""Beginnings of the names of sections with source lines and the text of PTX."""
_ALIGNMENT = 128
"""No section or segment of a CUDA binary needs a higher alignment, in bytes."""


def without_debug_sections(cubin: bytes) -> bytes:
    """Return a CUDA binary whose sections of source lines and PTX text are empty.

    The sections remain in the table of sections, so indices of sections stay valid. All other sections and
    the segments keep their bytes and their alignment. Bytes that are not a 64-bit ELF file are returned as
    they are.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        return cubin
    (segments, sections) = struct.unpack_from("<QQ", cubin, 32)
    (segment_size, num_segments, section_size, num_sections, names) = struct.unpack_from("<5H", cubin, 54)
    headers = [sections + i * section_size for i in range(num_sections)]
    (first_name,) = struct.unpack_from("<Q", cubin, headers[names] + 24)
    written, holes = bytearray(cubin), []
    for header in headers:
        (name,) = struct.unpack_from("<I", cubin, header)
        if cubin.startswith(_DEBUG, first_name + name):
            offset, size = struct.unpack_from("<QQ", cubin, header + 24)
            struct.pack_into("<Q", written, header + 32, 0)
            holes.append((offset, size // _ALIGNMENT * _ALIGNMENT))

    def moved(offset: int) -> int:
        return offset - sum(size for start, size in holes if start < offset)

    fields = [32, 40, *(segments + i * segment_size + 8 for i in range(num_segments))]
    for field in (*fields, *(header + 24 for header in headers)):
        struct.pack_into("<Q", written, field, moved(*struct.unpack_from("<Q", cubin, field)))
    for start, size in sorted(holes, reverse=True):
        del written[start : start + size]
    return bytes(written)
