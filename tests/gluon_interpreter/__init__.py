"""Interprets flashtile's Gluon kernels without a GPU, including barriers and asynchronous operations.

In a block ``with interpreted(seed):``, launched kernels run as Python functions on tensors in the CPU's
memory. Programs and their partitions are threads, of which one runs at a time. The seed decides which thread
runs and when TMA copies complete. So a run can be repeated, and other seeds give other orders.

A kernel that relies on undefined behaviour raises a :class:`KernelError`. ``clocks`` checks accesses to
shared memory, and ``global_clocks`` TMA accesses to global memory. ``barriers`` checks mbarriers,
``products`` the use of wgmma results in flight, and ``global_memory`` addresses. If no thread can go on, a
:class:`DeadlockError` is raised.

Registers, layouts, synchronisation between the warps of a partition, and time are not interpreted.
Ahead-of-time compilation and runs on a GPU test these.
"""

from gluon_interpreter.edits import Edited
from gluon_interpreter.errors import DeadlockError, KernelError
from gluon_interpreter.launch import Interpreter, interpreted

__all__ = ["DeadlockError", "Edited", "Interpreter", "KernelError", "interpreted"]
