"""Communication between the ranks that share a sequence, and checks that they make the same call.

Messages are sent as bytes, so that every backend of torch.distributed supports every dtype. NCCL sends
messages on its own stream, so a message that is posted before a matrix product overlaps with the product.
With gloo, every wait ends after ``timeout``. With NCCL, the watchdog ends the process after the group's own
timeout (``init_process_group(timeout=)``).
"""

from __future__ import annotations

import ast
import contextlib
import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flashtile.torch_private import flattened, store_of

TIMEOUT = 600.0
"""Default time that a rank waits for the others, in seconds."""

AGREEMENTS = 256
"""Number of calls that a group of GPUs remembers. The ranks do not compare these calls' arguments again."""


class Message(NamedTuple):
    """Tensors to or from one rank, as bytes."""

    peer: int
    buffer: Tensor


class Pending:
    """Messages in transit."""

    def __init__(
        self, ranks: Ranks, works: list[tuple[int, Any]], messages: Sequence[Message], timeout: float
    ) -> None:
        self._ranks, self._works, self._timeout = ranks, works, timeout
        self._messages = messages  # keeps their memory alive until they are sent

    def wait(self) -> None:
        """Wait until all messages have arrived. On a GPU the current stream waits, and the host does not.

        Raises:
            RuntimeError: a rank has ended, or has not answered within the timeout.
        """
        on_gpu = any(buffer.is_cuda for _, buffer in self._messages)
        for peer, work in self._works:
            self._ranks.wait(work, [peer], self._timeout, on_gpu)
        self._works, self._messages = [], ()


class Ranks:
    """A process group with the exchanges that context parallelism needs. Its ranks are numbered from 0."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._global = dist.get_process_group_ranks(group)
        self._store = store_of(group)
        self._round = 0
        self._agreed: dict[str, dict[str, tuple[Any, ...]]] = {}

    def post(
        self,
        sent: Sequence[Message],
        received: Sequence[Message],
        timeout: float,
        before: Callable[[], None] | None = None,
    ) -> Pending:
        """Start sending and receiving messages, and return them as Pending. Empty messages are left out.

        ``before`` is called first. On a GPU, messages do not wait for the kernels that it launches.
        """
        operations, peers = [], []
        for kind, messages in ((dist.isend, sent), (dist.irecv, received)):
            for peer, buffer in messages:
                if buffer.numel():
                    operations.append(dist.P2POp(kind, buffer, self._global[peer], self.group))
                    peers.append(peer)
        aside = _aside(operations[0].tensor.device) if operations and before else contextlib.nullcontext()
        if before is not None:
            before()
        if not operations:
            return Pending(self, [], (), timeout)
        with aside:
            works = self._run(lambda: dist.batch_isend_irecv(operations), peers, timeout)
        # NCCL returns one work object for the whole batch.
        named = peers if len(works) == len(peers) else peers[:1] * len(works)
        return Pending(self, list(zip(named, works, strict=True)), (*sent, *received), timeout)

    def all_to_all(self, sent: Sequence[Tensor], sizes: Sequence[int], timeout: float) -> list[Tensor]:
        """Send ``sent[rank]`` bytes to each rank, and receive ``sizes[rank]`` bytes from each."""
        outgoing = torch.cat(list(sent))
        incoming = outgoing.new_empty(sum(sizes))
        if self.size > 1:
            splits = list(sizes), [t.numel() for t in sent]
            self._collective(dist.all_to_all_single, timeout, incoming, outgoing, *splits)
        else:
            incoming = outgoing
        return list(incoming.split(list(sizes)))

    def gather(self, x: Tensor, lengths: Sequence[int], timeout: float) -> list[Tensor]:
        """Gather the ``x`` of every rank into a list. Entry ``rank`` has the shape (lengths[rank], ...)."""
        # Padded, because some backends of torch.distributed gather only parts of equal size.
        rest, longest = tuple(x.shape[1:]), max(lengths)
        own = x
        if x.shape[0] < longest:
            own = x.new_zeros((longest, *rest))
            own[: x.shape[0]] = x
        whole = self.stack(own, timeout)
        return [part[:length] for part, length in zip(whole, lengths, strict=True)]

    def stack(self, x: Tensor, timeout: float) -> Tensor:
        """Stack every rank's ``x`` to (ranks, ...). The shape of ``x`` must be equal on all ranks."""
        if self.size == 1:
            return x.unsqueeze(0)
        flat = as_bytes([x])
        every = flat.new_empty(self.size * flat.numel())
        if flat.numel():
            # Newer releases of torch have renamed this function.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            self._collective(gather, timeout, every, flat)
        return from_bytes(every, [((self.size, *x.shape), x.dtype)])[0]

    def _collective(self, function: Any, timeout: float, into: Tensor, *others: Any) -> None:
        """Call ``function(into, *others)``, a collective of torch.distributed, and wait for its end."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        work = self._run(lambda: function(into, *others, group=self.group, async_op=True), peers, timeout)
        self.wait(work, peers, timeout, into.is_cuda)

    def wait(self, work: Any, peers: Sequence[int], timeout: float, on_gpu: bool) -> None:
        if work is None:
            return
        if on_gpu:
            work.wait()  # the stream waits; with a timeout the host would wait
        else:
            self._run(lambda: work.wait(timedelta(seconds=timeout)), peers, timeout)

    def agree(
        self,
        same: dict[str, Any],
        own: dict[str, Any],
        timeout: float,
        device: torch.device,
        error: str | None = None,
    ) -> dict[str, tuple[Any, ...]]:
        """Check that all ranks have equal values in ``same``, and return every rank's values of ``own``.

        If ``error`` is given, it is sent to the other ranks, which raise it as well.

        The ranks exchange these values over the group's store, without the GPUs. If ``device`` is the CPU,
        every call exchanges its values. If ``device`` is a GPU, a call whose values all ranks have already
        exchanged once does not exchange them again, unless FLASHTILE_DEBUG=1.

        Raises:
            ValueError: ranks differ in a value; the message lists the value of each rank.
            RuntimeError: some ranks have not answered within ``timeout``.
        """
        record = repr((same, own, error))
        always = device.type != "cuda" or os.environ.get("FLASHTILE_DEBUG", "0") == "1"
        if not always and record in self._agreed:
            return self._agreed[record]
        records = self._exchange(record, timeout)
        for rank, (_, _, refusal) in enumerate(records):
            if refusal is not None:
                raise ValueError(f"rank {rank} refuses the call: {refusal}")
        for name in same:
            values = [of_rank.get(name) for of_rank, _, _ in records]
            if any(other != values[0] for other in values):
                listed = ", ".join(f"rank {rank} has {other!r}" for rank, other in enumerate(values))
                raise ValueError(f"the ranks disagree on {name}: {listed}; all ranks must have the same")
        result = {name: tuple(of_rank[name] for _, of_rank, _ in records) for name in own}
        if not always:
            if not self._agreed and self.size > 1:
                # NCCL connects the ranks at their first collective, in which all must take part.
                dist.all_reduce(torch.zeros(1, device=device), group=self.group)
            if len(self._agreed) >= AGREEMENTS:
                self._agreed.pop(next(iter(self._agreed)))
            self._agreed[record] = result
        return result

    def refuse(self, error: Exception, timeout: float, device: torch.device) -> None:
        """Send an error of this rank's arguments to the other ranks, which raise it as well."""
        with contextlib.suppress(ValueError, RuntimeError):
            self.agree({}, {}, timeout, device, str(error))

    def _exchange(self, record: str, timeout: float) -> list[tuple[Any, Any, str | None]]:
        """Send this rank's record to the others, and return the records of all ranks, parsed."""
        if self.size == 1:
            return [ast.literal_eval(record)]
        number, self._round = self._round, self._round + 1
        self._store.set(self._key(number, self.rank), record)
        keys = [self._key(number, rank) for rank in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=timeout))
            said = [self._store.get(key).decode() for key in keys]
        except Exception as error:
            missing = [rank for rank, key in enumerate(keys) if not self._is_there(key)]
            raise self._silent(missing, timeout) from error
        # All ranks have begun this round, so they have read the records of earlier rounds.
        if number >= 2:
            self._store.delete_key(self._key(number - 2, self.rank))
        return [ast.literal_eval(text) for text in said]

    def _key(self, number: int, rank: int) -> str:
        return f"flashtile/{number}/{rank}"

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except Exception:  # the rank that hosts the store has ended
            return False

    def _run(self, function: Any, peers: Sequence[int], timeout: float) -> Any:
        try:
            return function()
        except RuntimeError as error:
            raise self._silent(peers, timeout) from error

    def _silent(self, peers: Sequence[int], timeout: float) -> RuntimeError:
        named = ", ".join(map(str, sorted(set(peers)))) or "some"
        return RuntimeError(
            f"rank {self.rank} of {self.size} got no message from rank {named} within {timeout:g} s: that "
            "rank has ended, has raised an error, or makes another call (all ranks must make the same calls "
            "in the same order)"
        )


class Alone(Ranks):
    """A group of one rank, without communication."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


_known: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()


def ranks_of(group: Any = None, mesh: Any = None) -> Ranks:
    """Return the :class:`Ranks` of a group, or of all ranks of a mesh. Each group has one such object."""
    if mesh is not None:
        check_mesh(group, mesh)
        group = mesh.get_group() if mesh.ndim == 1 else flattened(mesh).get_group()
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group needs torch.distributed: call torch.distributed.init_process_group first")
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed process group, got {type(group).__name__}")
    if group not in _known:
        _known[group] = Ranks(group)
    return _known[group]


def check_mesh(group: Any, mesh: Any) -> None:
    """Check that ``mesh`` is a DeviceMesh that contains this rank, and that ``group`` is None."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}")
    if group is not None:
        raise ValueError("group must be None if mesh is given, got both")
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh must have mesh_dim_names if it has several dimensions, got none for {tuple(mesh.shape)}: "
            "call init_device_mesh(..., mesh_dim_names=...)"
        )
    if mesh.get_coordinate() is None:
        raise ValueError("mesh must contain this rank, got a mesh of other ranks")


_streams: dict[torch.device, Any] = {}


def _aside(device: torch.device) -> Any:
    """Return the context of a stream that waits for the work that the current stream of a GPU has so far."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    _streams[device].wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(_streams[device])


Spec = tuple[tuple[int, ...], torch.dtype]


def as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors to one flat uint8 tensor. Pass the widest dtype first, so that all are aligned."""
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def from_bytes(buffer: Tensor, specs: Sequence[Spec]) -> list[Tensor]:
    """Return views of the tensors that :func:`as_bytes` has concatenated."""
    parts = buffer.split([num_bytes([spec]) for spec in specs])
    return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, specs, strict=True)]


def num_bytes(specs: Sequence[Spec]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
