"""Finds out whether a change of kernels changes their machine code.

``dump`` compiles the compile cases of a checkout for NVIDIA architectures and writes a digest of each. This
needs no GPU. ``compare`` lists the cases that differ:

    PYTHONPATH=OLD python scripts/compare_machine_code.py dump old.json --only forward dkdv
    PYTHONPATH=NEW python scripts/compare_machine_code.py dump new.json --only forward dkdv
    python scripts/compare_machine_code.py compare old.json new.json --renamed prepare=preprocess

The exit code of ``compare`` is 1 if a case differs. Kernels are compiled without line numbers, because ptxas
orders instructions differently if line numbers change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCHITECTURES = ("sm_80", "sm_90a")
INSTRUCTION_BYTES = 16


def machine_code(cubin: bytes) -> bytes:
    """Return the instructions of a kernel: the .text section of its binary, a 64-bit ELF file.

    Raises:
        ValueError: the binary has no such section.
    """
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    names_start = sections[names][4]
    for name, _, _, _, start, length in sections:
        if cubin.startswith(b".text.", names_start + name):
            return cubin[start : start + length]
    raise ValueError("the binary has no machine code")


def dump(path: Path, only: list[str], jobs: int) -> None:
    """Write {architecture: {case: {sha256, instructions, shared}}} of the flashtile that Python imports.

    ``only`` has parts of the cases' names (empty: all cases), and ``jobs`` cases are compiled at a time.
    """
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    from flashtile.tools.inspection.cases import every_case
    from flashtile.tools.inspection.report import CompileCase, architecture

    def digest(case: CompileCase) -> tuple[str, dict[str, str | int]]:
        compiled = case.compile(target)
        code = machine_code(compiled.asm["cubin"])
        return case.name, {
            "sha256": hashlib.sha256(code).hexdigest(),
            "instructions": len(code) // INSTRUCTION_BYTES,
            "shared": compiled.metadata.shared,
        }

    digests = {}
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(jobs) as pool:
        os.environ["TRITON_CACHE_DIR"] = cache
        for arch in ARCHITECTURES:
            target = architecture(arch)
            cases = every_case(arch)
            wanted = [case for case in cases if not only or any(part in case.name for part in only)]
            digests[arch] = dict(pool.map(digest, wanted))
    path.write_text(json.dumps(digests, indent=1))


def differences(old: dict, new: dict, renamed: list[list[str]]) -> Iterator[str]:
    """Yield a line for each case that only one dump has, or whose machine code differs.

    ``renamed`` has pairs (before, after) to replace in the names of the old dump.
    """
    for arch in sorted({*old, *new}):
        ours, theirs = dict(new.get(arch, {})), {}
        for name, row in old.get(arch, {}).items():
            for before, after in renamed:
                name = name.replace(before, after)
            theirs[name] = row
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs:
                yield f"{arch} {name}: only in the {'old' if name in theirs else 'new'} dump"
            elif ours[name] != theirs[name]:
                fields = [key for key in ours[name] if ours[name][key] != theirs[name].get(key)]
                changes = (f"{key} {theirs[name].get(key)} -> {ours[name][key]}" for key in fields)
                yield f"{arch} {name}: {', '.join(changes)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("dump", help="compile the cases and write their digests")
    write.add_argument("path", type=Path)
    write.add_argument("--only", nargs="+", default=[], help="parts of the names of the cases (default: all)")
    write.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases compiled at a time")
    compare = commands.add_parser("compare", help="list the cases that differ")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    compare.add_argument(
        "--renamed",
        nargs="+",
        default=[],
        metavar="OLD=NEW",
        help="parts of names that the new dump has changed",
    )
    arguments = parser.parse_args()
    if arguments.command == "dump":
        dump(arguments.path, arguments.only, arguments.jobs)
        return 0
    old, new = (json.loads(path.read_text()) for path in (arguments.old, arguments.new))
    renamed = [pair.split("=", 1) for pair in arguments.renamed]
    found = list(differences(old, new, renamed))
    print("\n".join([*found, f"{sum(map(len, new.values()))} cases, {len(found)} differ"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
