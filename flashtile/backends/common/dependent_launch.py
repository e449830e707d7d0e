"""Programmatic dependent launch (compute capability 9.0 and up): a kernel's programs come in before the
kernel before it has ended.

What such a kernel does before :func:`wait_for_dependencies` overlaps with that kernel, so it may only read
what nobody writes. Every kernel launched so has to wait: one that does not would let the next one read what
is not written yet. Both do nothing in a kernel that is launched as usual.
"""

import triton
import triton.language as tl

CAPABILITY = (9, 0)


@triton.jit
def wait_for_dependencies():
    """Wait until the kernels before this one have ended and what they wrote can be seen."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def launch_dependents():
    """Let the next kernel's programs in, once all programs of this one have said so or ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch(pointers):
    """Ask for the lines of these addresses, to lie in the L2 cache when they are read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
