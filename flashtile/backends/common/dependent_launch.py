"""Programmatic dependent launch (compute capability 9.0 and up): a kernel's programs start before the
previous kernel has ended.

Code before :func:`wait_for_dependencies` overlaps with the previous kernel, so it may only read memory that
no kernel writes. Every kernel that is launched this way has to wait: otherwise the kernel after it could read
memory that an earlier kernel has not written yet. In a kernel that is launched as usual, these functions do
nothing.
"""

import triton.language as tl

from flashtile.backends.common.deferred import triton

CAPABILITY = (9, 0)


@triton.jit
def wait_for_dependencies():
    """Wait until the previous kernels have ended and their writes are visible."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def launch_dependents():
    """Let the next kernel start, once all programs of this kernel have called this function or ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines of these addresses to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
