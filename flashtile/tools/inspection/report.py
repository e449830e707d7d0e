"""Reports on kernels compiled ahead of time: registers, spills, shared memory, tensor-core use.

They can be made on any machine, because Triton's compiler needs no GPU. Every number is read from the binary
that a launch would load from Triton's disk cache, or from the PTX of that binary.

Spills are counted as ptxas counts them: the bytes moved by each instruction to or from local memory. On AMD's
GPUs they are bytes of scratch memory, counted the same way. Accesses to an indexed local array would count as
spills, but attention kernels have no such array. A binary without a stack has no spills and is not
disassembled, since disassembly can take as long as compilation.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KIB = 1024
HOPPER = "sm_90a"
"""The architecture of the kernels in ``backends/hopper``."""


@dataclass(frozen=True)
class Architecture:
    """A GPU's architecture: its name for the compiler, CUDA's compute capability (0 for AMD), bytes of shared
    memory that a block may use, and threads per warp."""

    name: str
    capability: int
    shared_limit: int
    warp_size: int = 32

    @property
    def amd(self) -> bool:
        return self.name.startswith("gfx")


ARCHITECTURES = {
    name: Architecture(name, capability, kib * KIB)
    for name, capability, kib in (
        ("sm_80", 80, 163),
        ("sm_86", 86, 99),
        ("sm_87", 87, 163),
        ("sm_89", 89, 99),
        ("sm_90a", 90, 227),
        ("sm_100a", 100, 227),
        ("sm_103a", 103, 227),
        ("sm_120a", 120, 99),
    )
} | {
    name: Architecture(name, 0, kib * KIB, warp_size)
    for name, kib, warp_size in (("gfx942", 64, 64), ("gfx950", 160, 64), ("gfx1201", 64, 32))
}


def architecture(name: str) -> Architecture:
    """Return the architecture called ``name``, such as "sm_90a" ("sm_90" is the same to Triton).

    Raises:
        ValueError: ``name`` is not one of :data:`ARCHITECTURES`.
    """
    for candidate in (name, f"{name}a"):
        if candidate in ARCHITECTURES:
            return ARCHITECTURES[candidate]
    raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {name!r}")


@dataclass(frozen=True)
class CompileCase:
    """One kernel with all that decides its binary.

    Args:
        name: name of the kernel and its configuration, unique among the cases.
        kernel: a ``@triton.jit`` or Gluon function.
        signature: Triton's type ("*bf16", "i32", "fp32", a tensor descriptor's) of each argument that is not
            constant. Pointers are assumed to be aligned to 16 bytes, as torch's allocations are. A structure
            is a NamedTuple of types. A field that is not a string is the value of a constant: None for a
            tensor that the call lacks, 1 for a stride that a launch specialises to 1.
        constants: value of each ``tl.constexpr`` argument and of each pointer that is None.
        divisible_by_16: names of integer arguments that a launch specialises as multiples of 16. For a
            structure this applies to all its integers.
        options: further compiler options, such as ``maxnreg``.
        tensor_cores: whether its products must run on the tensor cores.
    """

    name: str
    kernel: Any
    signature: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    divisible_by_16: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    tensor_cores: bool = True

    def compile(self, target: Architecture) -> Any:
        """Compile for an architecture, or load the binary from Triton's disk cache.

        Raises:
            TypeError: ``kernel`` is not a Triton kernel, as under TRITON_INTERPRET=1.
            ValueError: ``signature`` and ``constants`` do not name each argument of the kernel exactly once.
        """
        from flashtile.backends import compat
        from flashtile.backends.common.keys import source_of

        if not compat.is_compilable(self.kernel):
            raise TypeError(
                f"{self.name}: kernel must be a triton.jit function, got {type(self.kernel).__name__}; "
                "with TRITON_INTERPRET=1 there is nothing to compile"
            )
        names = list(self.kernel.arg_names)
        if sorted(names) != sorted([*self.signature, *self.constants]):
            differing = sorted(set(names) ^ {*self.signature, *self.constants}) or sorted(
                {*self.signature} & {*self.constants}
            )
            raise ValueError(
                f"{self.name}: signature and constants must name each argument of the kernel once; "
                f"they differ in {', '.join(differing)}"
            )
        signature: dict[str, Any] = {name: self.signature.get(name, "constexpr") for name in names}
        constants: dict[Any, Any] = dict(self.constants)
        attributes: dict[tuple[int, ...], list] = {}
        for i, name in enumerate(names):
            for path, kind in _fields(signature[name], (i,)):
                if not isinstance(kind, str):
                    constants[path] = kind
                elif kind.startswith("*") or (name in self.divisible_by_16 and kind.startswith("i")):
                    attributes[path] = [["tt.divisibility", 16]]
        signature = {name: _types(kind) for name, kind in signature.items()}
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages} | self.options
        backend, arch = ("hip", target.name) if target.amd else ("cuda", target.capability)
        source = source_of(self.kernel, signature, constants, attributes)
        return compat.compile_for(backend, arch, target.warp_size, source, options)


def _fields(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield (path, value) of each leaf of nested tuples. A value that is not a tuple is a single leaf."""
    if isinstance(value, tuple):
        for i, field_value in enumerate(value):
            yield from _fields(field_value, (*path, i))
    else:
        yield path, value


def _types(value: Any) -> Any:
    """Return a type, or a structure of types, with every constant in it replaced by "constexpr"."""
    if isinstance(value, tuple):
        return type(value)(*map(_types, value))
    return value if isinstance(value, str) else "constexpr"


@dataclass(frozen=True)
class CompileReport:
    """Resources of a compiled case. Sizes are in bytes, ``registers`` per thread, ``threads`` per block."""

    name: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    threads: int
    tensor_core: dict[str, int]
    """Tensor-core instructions by PTX's name (mma, wgmma, tcgen05), or AMD's (mfma, wmma)."""
    lost_barriers: int
    """Number of initialised mbarriers that no partition uses, so the compiler reuses their memory for a tile.
    A GPU that switches between processes may write such a barrier's state back over the tile."""
    shared_limit: int
    expects_tensor_cores: bool
    seconds: float
    """Time to compile, or to load from Triton's disk cache."""

    @property
    def violations(self) -> list[str]:
        """Violations of the architecture's limits, and what the compiler lost; empty if there are none."""
        found = []
        if self.shared > self.shared_limit:
            found.append(f"{self.shared} bytes of shared memory, {self.arch} has {self.shared_limit}")
        if self.expects_tensor_cores and not self.tensor_core:
            found.append("no tensor-core instruction")
        if self.lost_barriers:
            found.append(f"{self.lost_barriers} mbarriers initialised that no partition has")
        return found


def report(case: CompileCase, arch: str) -> CompileReport:
    """Compile one case for ``arch`` ("sm_90a") and read its binary.

    Raises:
        ValueError: ``arch`` is unknown, or the case does not fit its kernel.
        RuntimeError: this release of Triton cannot compile the case, or the disassembler failed.
    """
    import triton
    from triton.errors import TritonError

    target = architecture(arch)
    begin = time.perf_counter()
    try:
        compiled = case.compile(target)
    except (TritonError, RuntimeError) as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise RuntimeError(
            f"{case.name} cannot be compiled for {target.name} with Triton {triton.__version__}: {reason}"
        ) from error
    seconds = time.perf_counter() - begin
    used = used_on_amd(compiled.asm["amdgcn"]) if target.amd else _used_on_nvidia(compiled.asm)
    return CompileReport(
        name=case.name,
        arch=target.name,
        **used,
        shared=compiled.metadata.shared,
        lost_barriers=_lost_barriers(compiled.asm["ttgir"]),
        shared_limit=target.shared_limit,
        expects_tensor_cores=case.tensor_cores,
        seconds=seconds,
    )


def reports(cases: Iterable[CompileCase], arch: str, jobs: int | None = None) -> Iterator[CompileReport]:
    """Yield the reports of all cases, in order, each as soon as it is ready.

    Threads suffice, because Triton's passes, LLVM and ptxas run without the GIL.

    Args:
        jobs: number of cases that are compiled at a time; None is the number of CPU cores.
    """
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        yield from pool.map(lambda case: report(case, arch), cases)


def _used_on_nvidia(asm: dict[str, Any]) -> dict[str, Any]:
    usage = cuobjdump("-res-usage", asm["cubin"])
    stack = _largest(r"\bSTACK:(\d+)", usage)
    opcodes = Counter(_opcodes(cuobjdump("-sass", asm["cubin"])) if stack else ())
    return {
        "registers": _largest(r"\bREG:(\d+)", usage),
        "spill_stores": _local_bytes("STL", opcodes),
        "spill_loads": _local_bytes("LDL", opcodes),
        "stack": stack,
        "threads": _largest(r"\.(?:req|max)ntid\s+(\d+)", asm["ptx"]),
        "tensor_core": dict(Counter(re.findall(r"\b(mma|wgmma|tcgen05)\.(?:mma|sync)", asm["ptx"]))),
    }


def used_on_amd(assembly: str) -> dict[str, Any]:
    """Return the resources that the compiler states at the end of an AMD kernel's assembly.

    Spills are bytes of scratch memory, AMD's counterpart of local memory. Names of instructions that access
    scratch memory end with a width, such as _dword or _dwordx4; on gfx12, with _b32 or _b128.
    """

    def scratch(direction: str) -> int:
        words = re.findall(rf"\bscratch_{direction}_(?:dword(?:x(\d))?|b(\d+))\b", assembly)
        return sum(int(bits) // 8 if bits else 4 * int(times or 1) for times, bits in words)

    return {
        "registers": _largest(r"\.vgpr_count:\s+(\d+)", assembly),
        "spill_stores": scratch("store"),
        "spill_loads": scratch("load"),
        "stack": _largest(r"\.private_segment_fixed_size:\s+(\d+)", assembly),
        "threads": _largest(r"\.max_flat_workgroup_size:\s+(\d+)", assembly),
        "tensor_core": dict(Counter(re.findall(r"\bv_(mfma|wmma)_", assembly))),
    }


def cuobjdump(option: str, cubin: bytes) -> str:
    """Run CUDA's disassembler on a binary: "-res-usage" prints its resources, "-sass" its instructions.

    Raises:
        RuntimeError: the disassembler failed.
    """
    from flashtile.backends import compat

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [compat.cuobjdump_path(), option, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} {option} failed: {done.stderr.strip()}")
    return done.stdout


def _opcodes(sass: str) -> Iterator[str]:
    """Yield each instruction's opcode with its modifiers, such as ``HGMMA.64x128x16.F32.BF16``."""
    for match in re.finditer(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE):
        yield match[1]


_BYTES_OF_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def _local_bytes(opcode: str, opcodes: Counter[str]) -> int:
    """Return the number of bytes that ``opcode`` (STL or LDL) moves.

    Instructions without a width modifier move 4 bytes.
    """
    total = 0
    for full, count in opcodes.items():
        base, *modifiers = full.split(".")
        if base == opcode:
            total += count * next((_BYTES_OF_WIDTH[m] for m in modifiers if m in _BYTES_OF_WIDTH), 4)
    return total


def _lost_barriers(ttgir: str) -> int:
    """Count the mbarriers that are initialised before the partitions start and that no partition captures."""
    start = re.search(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    if start is None:  # a kernel without partitions loses no barrier
        return 0
    captured = set(start[1].split(", "))
    array_of = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", ttgir))
    initialised = re.findall(r"ttng\.init_barrier (%\w+),", ttgir)
    return sum(array_of.get(barrier, barrier) not in captured for barrier in initialised)


def _largest(pattern: str, text: str) -> int:
    values = [int(value) for value in re.findall(pattern, text)]
    if not values:
        raise RuntimeError(f"no match of {pattern} in the disassembler's output: {text[:200]!r}")
    return max(values)
