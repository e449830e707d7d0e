"""Adapters of the contestants for attention and masks: flashtile and its peers.

An adapter says why its contestant cannot run here or refuses a workload. It also turns a workload into a
function of q, k and v in the contestant's layout. Masks, views, compilation and contexts are prepared before
timing. All contestants read the same memory, (batch, seqlen, heads, head_dim). Contestants that expect
(batch, heads, seqlen, head_dim) get transposed views of it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.inputs import Inputs
from benchmarks.suite.mods import MODS, Functions
from benchmarks.suite.workload import Workload
from flashtile import masks
from flashtile.api import attention as functional
from flashtile.hardware import machine
from flashtile.problems.common import UNLIMITED
from flashtile.problems.masking import positions
from flashtile.reference import attention as reference

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PeerCall:
    """The attention function of one contestant (a measured implementation) for one workload.

    Args:
        attend: (q, k, v) -> out, in the contestant's layout.
        enter: returns the context manager in which ``attend`` runs; it is entered outside of the timed
            region.
        heads_first: whether the layout is (batch, heads, seqlen, head_dim), with batch 1 for packed
            sequences.
        contiguous: whether tensors are contiguous in this layout.
        copies: a version of ``attend`` for each copy of the KV cache, which a CUDA graph calls in turn; () if
            there is only one copy.
    """

    attend: Attend
    enter: Callable[[], AbstractContextManager] = nullcontext
    heads_first: bool = False
    contiguous: bool = False
    copies: tuple[Attend, ...] = ()

    def arrange(self, tensor: Tensor) -> Tensor:
        """Return an input in the contestant's layout, a view unless it has to be contiguous."""
        if not self.heads_first:
            return tensor
        view = (tensor[None] if tensor.dim() == 3 else tensor).transpose(1, 2)
        return view.contiguous() if self.contiguous else view

    def restore(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Convert a result back to the layout of the inputs. ``like`` is one of the inputs."""
        if not self.heads_first:
            return tensor
        tensor = tensor.transpose(1, 2)
        return tensor[0] if like.dim() == 3 else tensor


class Peer:
    """Adapter of a contestant: whether it can run, which workloads it refuses, and how it is called."""

    name: str
    ours = False
    """Whether the contestant is flashtile, with which the peers are compared."""
    device_type: str | None = None
    """Device type that the contestant runs on; None means any."""
    needs: tuple[str, str] | None = None
    """(module, name) that must be importable; None means nothing."""

    def unavailable(self, device: torch.device) -> str | None:
        """Return why the contestant cannot run on this device; None if it can."""
        if self.device_type not in (None, device.type):
            return f"runs on {self.device_type}, not on {device.type}"
        return None if self.needs is None else _import_error(*self.needs)

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        """Return why the contestant does not take a workload; None if it does.

        None is also returned where only a call can show that the contestant refuses the workload.
        """
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        """Do everything that is not timed, and return the call to time."""
        raise NotImplementedError


class Flashtile(Peer):
    """flashtile with the backend that dispatch chooses, or with a named one."""

    ours = True
    label = "flashtile"
    """Name of the contestant if no backend is named."""

    def __init__(self, backend: str | None = None) -> None:
        self.name = self.label if backend is None else f"{self.label}:{backend}"
        self._backend = backend

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        return self._call(workload, inputs)

    def prepare_with_dropout(self, workload: Workload, inputs: Inputs, p: float) -> PeerCall:
        """Return the call with dropout. Its result is random, so it is timed without a check."""
        return self._call(workload, inputs, dropout_p=p)

    def _call(self, workload: Workload, inputs: Inputs, **more: Any) -> PeerCall:
        more["backend"] = self._backend
        if workload.mod:
            return PeerCall(partial(functional.attention, **_functions(workload, inputs), **more))
        function: Any = functional.flash_attn_func
        if workload.varlen:
            function = functional.flash_attn_varlen_func
        return PeerCall(partial(function, **options(workload, inputs), **more))


class Standard(Peer):
    """Standard attention without a fused kernel: all scores are stored, in the dtype of the inputs."""

    name = "standard"
    STORED_COPIES = 5
    """Number of tensors as large as the scores: scores, masked scores, probabilities, and two gradients."""

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if device.type != "cpu":
            return None  # a GPU raises an error that can be caught if its memory is too small
        scores = max(seqlen_q * seqlen_k for seqlen_q, seqlen_k in workload.sequences) * workload.num_heads_q
        scores *= 1 if workload.varlen else workload.batch
        needed = scores * workload.torch_dtype.itemsize * self.STORED_COPIES
        available = machine.free_memory()
        if available is not None and needed > available / 2:
            return f"needs about {needed >> 20} MiB, more than half of the free {available >> 20} MiB"
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        attends = {pair: _standard(workload, *pair, inputs) for pair in set(workload.sequences)}
        if workload.lengths is None:
            return PeerCall(attends[workload.seqlen_q, workload.seqlen_k], heads_first=True)
        lengths_q, lengths_k = zip(*workload.lengths, strict=True)

        def attend(*qkv: Tensor) -> Tensor:
            lengths = (lengths_q, lengths_k, lengths_k)
            pieces = zip(*(t.split(length, 2) for t, length in zip(qkv, lengths, strict=True)), strict=True)
            found = zip(workload.sequences, pieces, strict=True)
            return torch.cat([attends[pair](*piece) for pair, piece in found], 2)

        return PeerCall(attend, heads_first=True)


class LoopsOfFlash1(Peer):
    """FlashAttention-1's loop order as a Triton kernel, forward only.

    The outer loop is over keys, and the inner loop is over queries. FlashAttention-2 swapped the two loops,
    and its paper reports about twice the speed.
    """

    name, device_type = "flash1-loops", "cuda"
    needs = ("triton", "jit")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if workload.varlen or workload.window_left != UNLIMITED or workload.changes_scores:
            return "takes dense calls without window, soft-cap, ALiBi and sink"
        if max(workload.head_dim, workload.head_dim_v or 0) > 128 or workload.torch_dtype.itemsize > 4:
            return "takes head sizes up to 128 and no float64"
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        from benchmarks.suite.flash1 import Flash1Launch

        launch = Flash1Launch(workload.causal, workload.head_dim**-0.5)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if q.requires_grad:
                raise NotImplementedError("has no backward pass")
            return launch(q, k, v)

        return PeerCall(attend)


class Sdpa(Peer):
    """torch's ``scaled_dot_product_attention`` restricted to one of its backends."""

    def __init__(self, name: str, backend: str, device_type: str) -> None:
        self.name, self.device_type = name, device_type
        self._backend = backend

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if workload.varlen:
            return "takes no variable-length batch"
        if workload.window_left != UNLIMITED or workload.changes_scores:
            return "takes no window, soft-cap, ALiBi or sink without a stored mask or scores"
        if workload.causal and workload.seqlen_q != workload.seqlen_k:
            return "its causal mask is aligned to the upper left"
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        attend = partial(
            torch.nn.functional.scaled_dot_product_attention,
            is_causal=workload.causal, enable_gqa=workload.group_size > 1,
        )  # fmt: skip
        backend = getattr(SDPBackend, self._backend)
        return PeerCall(attend, enter=lambda: sdpa_kernel(backend), heads_first=True)


class TorchVarlen(Peer):
    """torch's own ``varlen_attn`` (2.10 and newer), for variable-length batches."""

    name, device_type = "torch-varlen", "cuda"
    needs = ("torch.nn.attention.varlen", "varlen_attn")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if not workload.varlen:
            return "takes variable-length batches only"
        return "takes no soft-cap, ALiBi or sink" if workload.changes_scores else None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        known = inspect.signature(varlen_attn).parameters
        options: dict[str, Any] = {}
        if "window_size" in known:
            options["window_size"] = (workload.window_left, workload.window_right)
        elif workload.window_left != UNLIMITED:
            raise NotImplementedError("takes no window")
        elif workload.causal:
            options["is_causal"] = True
        if workload.group_size > 1 and "enable_gqa" in known:
            options["enable_gqa"] = True
        offsets = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, workload.seqlen_q, workload.seqlen_k)
        return PeerCall(lambda q, k, v: varlen_attn(q, k, v, *offsets, **options))


class FlexAttention(Peer):
    """torch's FlexAttention, compiled for each shape, with block masks that are built before timing."""

    def __init__(self, compiled: bool = True, flash: bool = False) -> None:
        """Create the contestant.

        Without compilation, FlexAttention stores the scores and runs on any device. ``flash`` selects its
        FlashAttention-4 backend, for which torch translates score_mod and mask_mod to CuTe.
        """
        self.name = "flex-fa4" if flash else "flex"
        self._compiled, self._flash = compiled, flash
        self.device_type = "cuda" if compiled else None
        module = "flash_attn.cute" if flash else "torch.nn.attention.flex_attention"
        self.needs = (module, "flash_attn_func" if flash else "flex_attention")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        return "takes no sink" if workload.sink else None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        from torch.nn.attention import flex_attention as flex

        attend: Callable[..., Any] = flex.flex_attention
        if self._compiled:
            # Each shape is compiled on its own. Without a reset, torch would stop at its recompilation limit.
            torch.compiler.reset()
            attend = torch.compile(attend, dynamic=False)
        options: dict[str, Any] = {"enable_gqa": workload.group_size > 1}
        if self._flash:
            options["kernel_options"] = {"BACKEND": "FLASH"}
        options["score_mod"], mask = _flex_functions(workload, inputs)
        if mask is not None:
            rows, keys = (tensor.shape[0 if workload.varlen else 1] for tensor in (inputs.q, inputs.k))
            options["block_mask"] = flex.create_block_mask(
                mask, None, None, rows, keys, device=inputs.q.device
            )
        enter = _retainable_graphs if self._compiled else nullcontext
        return PeerCall(partial(attend, **options), enter, heads_first=True)


class FlashAttention(Peer):
    """Adapter of Dao-AILab's FlashAttention-2, -3 and -4, which differ in a few names and conventions."""

    device_type = "cuda"

    def __init__(
        self, name: str, module: str, unlimited: int | None, alibi: str | None = None, sink: str | None = None
    ) -> None:
        """Create the contestant.

        Args:
            name: name of the contestant.
            module: module of the package to import.
            unlimited: value of the package's window_size for a side without a limit.
            alibi, sink: names of the package's arguments for ALiBi slopes and sinks; None if it has none.
        """
        self.name, self.needs = name, (module, "flash_attn_func")
        self._module, self._unlimited = module, unlimited
        self._alibi, self._sink = alibi, sink

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if workload.alibi and self._alibi is None:
            return "takes no ALiBi"
        return "takes no sink" if workload.sink and self._sink is None else None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        attend = self.function(workload, inputs)
        return PeerCall(lambda q, k, v: first_of(attend(q, k, v)))

    def function(self, workload: Workload, inputs: Inputs) -> Callable[..., Any]:
        """Return the package's attention function with the workload's options applied."""
        module = importlib.import_module(self._module)
        given = options(workload, inputs)
        if workload.alibi:
            given[str(self._alibi)] = given.pop("alibi_slopes")
        if workload.sink:
            given[str(self._sink)] = given.pop("sink").to(workload.torch_dtype)
        if workload.window_left == UNLIMITED:
            del given["window_size"]
        else:
            given["window_size"] = (workload.window_left, 0 if workload.causal else self._unlimited)
        if not workload.softcap:
            del given["softcap"]
        return partial(module.flash_attn_varlen_func if workload.varlen else module.flash_attn_func, **given)


def options(workload: Workload, inputs: Inputs) -> dict[str, Any]:
    """Return the workload's options as keyword arguments of flashtile, named as in FlashAttention-2."""
    window_size = (workload.window_left, UNLIMITED)
    given = {"causal": workload.causal, "window_size": window_size, "softcap": workload.softcap}
    if workload.alibi:
        given["alibi_slopes"] = inputs.alibi_slopes
    if workload.sink:
        given["sink"] = inputs.sink
    if not workload.varlen:
        return given
    return given | {
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "max_seqlen_q": workload.seqlen_q,
        "max_seqlen_k": workload.seqlen_k,
    }


def _functions(workload: Workload, inputs: Inputs) -> dict[str, Any]:
    """Return a workload's score_mod and block mask as arguments of ``flashtile.attention``."""
    device, length = inputs.q.device, workload.seqlen_q
    score_mod, mask_mod = MODS[workload.mod](length, workload.num_heads_q, device)
    given: dict[str, Any] = {} if score_mod is None else {"score_mod": score_mod}
    if mask_mod is not None:
        given["block_mask"] = masks.create_block_mask(mask_mod, None, None, length, length, device)
    return given


def first_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def hidden_scores(
    workload: Workload, inputs: Inputs, lengths: tuple[int, int] | None = None
) -> Tensor | None:
    """Return (seqlen_q, seqlen_k) bool, True for scores that the mask hides; None if it hides none.

    ``lengths`` is (seqlen_q, seqlen_k) of one sequence; the default is that of the workload.
    """
    if workload.window_left == workload.window_right == UNLIMITED:
        return None
    seqlens = lengths or (workload.seqlen_q, workload.seqlen_k)
    seen = workload.masking.visible(positions(*seqlens), range(seqlens[1]), inputs.q.device)
    return None if bool(seen.all()) else ~seen


def repeated(tensor: Tensor, workload: Workload) -> Tensor:
    """Repeat keys or values (batch, heads_kv, seqlen_k, head_dim) for each query head."""
    group = workload.group_size
    return tensor if group == 1 else tensor.repeat_interleave(group, 1)


def _standard(workload: Workload, seqlen_q: int, seqlen_k: int, inputs: Inputs) -> Attend:
    """Return standard attention with its mask and bias, for tensors (batch, heads, seqlen, head_dim)."""
    empty = bias = None
    if inputs.alibi_slopes is not None:
        bias = reference.alibi_bias(inputs.alibi_slopes, seqlen_q, seqlen_k, inputs.q.dtype)
    hidden = hidden_scores(workload, inputs, (seqlen_q, seqlen_k))
    if hidden is not None and bool(hidden.all(-1).any()):
        empty = hidden.all(-1, keepdim=True)
    attend = partial(
        reference.standard, softmax_scale=workload.head_dim**-0.5, hidden=hidden, empty=empty,
        bias=bias, softcap=workload.softcap, sink=inputs.sink,
    )  # fmt: skip
    return lambda q, k, v: attend(q, k, v)[0]


def _retainable_graphs() -> AbstractContextManager:
    """Return a context in which torch.compile keeps the tensors saved for the backward pass.

    The benchmark repeats the backward pass on one graph. torch must therefore not reuse the memory of the
    saved tensors.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    return config.patch(donated_buffer=False) if hasattr(config, "donated_buffer") else nullcontext()


def _flex_functions(workload: Workload, inputs: Inputs) -> Functions:
    """Return the workload's mask, soft-cap and ALiBi as functions of FlexAttention.

    ``mask_mod`` is None if every query attends to every key.
    """
    if workload.mod:
        return MODS[workload.mod](workload.seqlen_q, workload.num_heads_q, inputs.q.device)
    score_mod = masks.softcap(workload.softcap) if workload.softcap else None
    shift = workload.seqlen_k - workload.seqlen_q
    if inputs.alibi_slopes is not None:
        score_mod = masks.alibi(inputs.alibi_slopes, shift)
    window = (workload.window_left, workload.window_right)
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        sees_all = window == (UNLIMITED, UNLIMITED)
        return Functions(score_mod, None if sees_all else masks.window(*window, shift))
    sequence_q, position_q = _positions(inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.q.shape[0])
    sequence_k, position_k = _positions(inputs.cu_seqlens_k, inputs.cu_seqlens_k, inputs.k.shape[0])
    visible = masks.window(*window)

    def within(b, h, i, j):
        return (sequence_q[i] == sequence_k[j]) & visible(b, h, position_q[i], position_k[j])

    return Functions(score_mod, within)


def _positions(cu_seqlens: Tensor, cu_seqlens_k: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the sequence and the position of each token of a packed batch, two tensors (total,).

    Positions are aligned such that the last token of a sequence is at the position of its last key.
    """
    lengths, lengths_k = cu_seqlens.diff(), cu_seqlens_k.diff()
    sequence = torch.repeat_interleave(
        torch.arange(len(lengths), device=cu_seqlens.device), lengths, output_size=total
    )
    first = (cu_seqlens[:-1] - (lengths_k - lengths))[sequence]
    return sequence, torch.arange(total, device=cu_seqlens.device) - first


def _import_error(module: str, name: str) -> str | None:
    """Return why ``from module import name`` fails; None if it succeeds."""
    try:
        getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # a broken build of a peer may raise any error
        return (
            f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    return None
