"""Our Gluon kernels on a machine without a GPU, barriers and asynchrony included.

``with interpreted(seed):`` runs the kernels that are launched within as Python functions, on tensors in the
CPU's memory. Programs and their partitions are threads, of which one runs at a time. A seed decides which,
and when TMA's copies land: so a run can be repeated, and other seeds give other orders.

What a GPU does not define is a :class:`KernelError`. ``clocks`` is about accesses to shared memory,
``global_clocks`` about TMA's to global memory, ``barriers`` about mbarriers, ``products`` about sums in
flight, ``global_memory`` about addresses. Nobody able to go on is a :class:`DeadlockError`.

Not interpreted are registers, the layouts of tiles, what warps of a partition owe one another, and time:
ahead-of-time compilation and a card show these.
"""

from gluon_interpreter.edits import Edited
from gluon_interpreter.errors import DeadlockError, KernelError
from gluon_interpreter.launch import Interpreter, interpreted

__all__ = ["DeadlockError", "Edited", "Interpreter", "KernelError", "interpreted"]
