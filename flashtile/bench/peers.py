"""Contestants: flashtile and its peers, each behind one adapter.

An adapter says why it cannot run here, why it does not take a workload, and prepares a workload into a
callable on tensors in its own layout. Masks, views, compilation and contexts are prepared outside of what
is timed. All contestants read the same memory, (batch, seqlen, heads, head_dim); heads-first ones get
transposed views of it.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from flashtile import reference
from flashtile.attn import functional
from flashtile.bench.workloads import Inputs, Workload
from flashtile.problem import UNLIMITED

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Call:
    """One contestant's attention for one workload.

    Args:
        attend: (q, k, v) -> out, in the contestant's layout.
        enter: a context to run it in; entered around the timed region, not in it.
        heads_first: the layout is (batch, heads, seqlen, head_dim), batch 1 for variable length.
    """

    attend: Attend
    enter: Callable[[], AbstractContextManager] = nullcontext
    heads_first: bool = False

    def arrange(self, tensor: Tensor) -> Tensor:
        """The contestant's view of (batch, seqlen, heads, head_dim) or (total, heads, head_dim)."""
        if not self.heads_first:
            return tensor
        return (tensor[None] if tensor.dim() == 3 else tensor).transpose(1, 2)

    def restore(self, tensor: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`arrange` for a result beside ``like``."""
        if not self.heads_first:
            return tensor
        tensor = tensor.transpose(1, 2)
        return tensor[0] if like.dim() == 3 else tensor


class Peer(Protocol):
    """What the runner needs of a contestant."""

    name: str
    ours: bool
    """Whether it is flashtile, which the others are compared with."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run on this device; None if it can."""

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        """Why it does not take a workload; None if it does, or if only trying will tell."""

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        """Everything that is not timed."""


class Flashtile:
    """flashtile: the backend that dispatch chooses, or one asked for by name."""

    ours = True

    def __init__(self, backend: str | None = None) -> None:
        self.name = "flashtile" if backend is None else f"flashtile:{backend}"
        self._backend = backend

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        options: dict[str, Any] = {
            "causal": workload.causal,
            "window_size": (workload.window_left, UNLIMITED),
            "softcap": workload.softcap,
            "backend": self._backend,
        }
        if not workload.varlen:
            return Call(partial(functional.flash_attn_func, **options))
        return Call(partial(functional.flash_attn_varlen_func, **offsets(workload, inputs), **options))


class Standard:
    """Standard attention, as models wrote it before: every score stored, in the dtype of the inputs."""

    name, ours = "standard", False
    STORED_COPIES = 5
    """Scores, masked scores, probabilities and, backward, the gradients of two of them."""

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if device.type != "cpu":
            return None  # running out of a GPU's memory is an error that can be caught
        scores = max(seqlen_q * seqlen_k for seqlen_q, seqlen_k in workload.sequences) * workload.num_heads_q
        scores *= 1 if workload.varlen else workload.batch
        needed = scores * workload.torch_dtype.itemsize * self.STORED_COPIES
        available = _available_memory()
        if available is not None and needed > available / 2:
            return f"needs about {needed >> 20} MiB, more than half of the free {available >> 20} MiB"
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        hidden = {
            pair: None if _sees_all(workload) else ~_visible(workload, *pair, inputs.q.device)
            for pair in set(workload.sequences)
        }
        if workload.lengths is None:
            (mask,) = hidden.values()
            return Call(partial(_standard, workload=workload, hidden=mask), heads_first=True)
        lengths_q, lengths_k = ([pair[side] for pair in workload.lengths] for side in (0, 1))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pieces = zip(
                workload.sequences,
                q.split(lengths_q, 2),
                k.split(lengths_k, 2),
                v.split(lengths_k, 2),
                strict=True,
            )
            return torch.cat(
                [_standard(*qkv, workload=workload, hidden=hidden[pair]) for pair, *qkv in pieces], 2
            )

        return Call(attend, heads_first=True)


class Sdpa:
    """torch's ``scaled_dot_product_attention`` held to one of its backends."""

    ours = False

    def __init__(self, name: str, backend: str, device_type: str) -> None:
        self.name = name
        self._backend = backend
        self._device_type = device_type

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != self._device_type:
            return f"runs on {self._device_type}, not on {device.type}"
        from torch.nn.attention import SDPBackend

        return (
            None if hasattr(SDPBackend, self._backend) else f"torch {torch.__version__} has no such backend"
        )

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if workload.varlen:
            return "takes no variable-length batch"
        if workload.window_left != UNLIMITED or workload.softcap:
            return "takes no window or soft-cap without a stored mask or scores"
        if workload.causal and workload.seqlen_q != workload.seqlen_k:
            return "its causal mask is aligned to the upper left"
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        options: dict[str, Any] = {"is_causal": workload.causal}
        if workload.group_size > 1:
            options["enable_gqa"] = True
        attend = partial(torch.nn.functional.scaled_dot_product_attention, **options)
        backend = getattr(SDPBackend, self._backend)
        return Call(attend, enter=lambda: sdpa_kernel(backend), heads_first=True)


class TorchVarlen:
    """torch's own ``varlen_attn`` (2.10 and newer), for variable-length batches."""

    name, ours = "torch-varlen", False

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"runs on cuda, not on {device.type}"
        return _import_error("torch.nn.attention.varlen", "varlen_attn")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if not workload.varlen:
            return "takes variable-length batches only"
        return "takes no soft-cap" if workload.softcap else None

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
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
        return Call(lambda q, k, v: varlen_attn(q, k, v, *offsets, **options))


class FlexAttention:
    """torch's FlexAttention compiled for each shape, masks as block masks built beforehand."""

    name, ours = "flex", False

    def __init__(self, compiled: bool = True) -> None:
        """Eager, it stores the scores and runs on any device."""
        self._compiled = compiled

    def unavailable(self, device: torch.device) -> str | None:
        if self._compiled and device.type != "cuda":
            return f"is measured on cuda, not on {device.type}"
        return _import_error("torch.nn.attention.flex_attention", "flex_attention")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        from torch.nn.attention import flex_attention as flex

        attend: Callable[..., Any] = flex.flex_attention
        if self._compiled:
            # Every shape is compiled anew; without a reset they add up to torch's limit of recompilations.
            torch.compiler.reset()
            attend = torch.compile(attend, dynamic=False)
        options: dict[str, Any] = {"enable_gqa": workload.group_size > 1}
        if workload.softcap:
            softcap = workload.softcap
            options["score_mod"] = lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
        mask = _flex_mask(workload, inputs)
        if mask is not None:
            rows, keys = (tensor.shape[0 if workload.varlen else 1] for tensor in (inputs.q, inputs.k))
            options["block_mask"] = flex.create_block_mask(
                mask, None, None, rows, keys, device=inputs.q.device
            )
        enter = _retainable_graphs if self._compiled else nullcontext
        return Call(partial(attend, **options), enter, heads_first=True)


class FlashAttention:
    """Dao-AILab's packages: FlashAttention-2, -3 and -4, which differ in module, window and results."""

    ours = False

    def __init__(self, name: str, module: str, unlimited: int | None) -> None:
        self.name = name
        self._module = module
        self._unlimited = unlimited

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"runs on cuda, not on {device.type}"
        return _import_error(self._module, "flash_attn_func")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        attend = self.function(workload, inputs)
        return Call(lambda q, k, v: first_of(attend(q, k, v)))

    def function(self, workload: Workload, inputs: Inputs) -> Callable[..., Any]:
        """The package's function with the workload's options."""
        module = importlib.import_module(self._module)
        options: dict[str, Any] = {"causal": workload.causal}
        if workload.window_left != UNLIMITED:
            right = 0 if workload.causal else self._unlimited
            options["window_size"] = (workload.window_left, right)
        if workload.softcap:
            options["softcap"] = workload.softcap
        if workload.varlen:
            return partial(module.flash_attn_varlen_func, **offsets(workload, inputs), **options)
        return partial(module.flash_attn_func, **options)


def peers() -> tuple[Peer, ...]:
    """Every peer, new: in the order of the tables."""
    return (
        Sdpa("sdpa-flash", "FLASH_ATTENTION", "cuda"),
        Sdpa("sdpa-cudnn", "CUDNN_ATTENTION", "cuda"),
        Sdpa("sdpa-efficient", "EFFICIENT_ATTENTION", "cuda"),
        Sdpa("sdpa-cpu", "FLASH_ATTENTION", "cpu"),
        FlexAttention(),
        TorchVarlen(),
        FlashAttention("fa2", "flash_attn", UNLIMITED),
        FlashAttention("fa3", "flash_attn_interface", UNLIMITED),
        FlashAttention("fa4", "flash_attn.cute", None),
        Standard(),
    )


def contestants(
    names: Sequence[str],
    backends: Sequence[str],
    device: torch.device,
    *,
    ours: Callable[[str | None], Sequence[Peer]] = lambda backend: [Flashtile(backend)],
    others: Callable[[], Sequence[Peer]] = peers,
) -> list[Peer]:
    """flashtile (or each of its backends that is named), then the peers.

    Args:
        names: of peers; empty takes all that are available on ``device``, ``["none"]`` none.
        backends: of flashtile; empty lets dispatch choose for each call.
        ours: flashtile with a backend.
        others: the peers.

    Raises:
        ValueError: a name that no peer or backend has, or a named peer that cannot run here.
    """
    from flashtile.problem import PREFERENCE

    known = {peer.name: peer for peer in others()} if list(names) != ["none"] else {}
    for name in names if known else ():
        if name not in known:
            raise ValueError(f"peer must be one of {', '.join(known)}, got {name!r}")
        reason = known[name].unavailable(device)
        if reason is not None:
            raise ValueError(f"peer {name!r} cannot run here: {reason}")
    for backend in backends:
        if backend not in PREFERENCE:
            raise ValueError(f"backend must be one of {', '.join(PREFERENCE)}, got {backend!r}")
    return [contestant for backend in backends or (None,) for contestant in ours(backend)] + [
        peer for name, peer in known.items() if (name in names if names else peer.unavailable(device) is None)
    ]


def offsets(workload: Workload, inputs: Inputs) -> dict[str, Any]:
    """The variable-length arguments that all FlashAttention functions share."""
    return {
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "max_seqlen_q": workload.seqlen_q,
        "max_seqlen_k": workload.seqlen_k,
    }


def first_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def _sees_all(workload: Workload) -> bool:
    return not workload.causal and workload.window_left == UNLIMITED


def _visible(workload: Workload, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    return reference.visible(seqlen_q, seqlen_k, workload.window_left, workload.window_right, device)


def _standard(q: Tensor, k: Tensor, v: Tensor, *, workload: Workload, hidden: Tensor | None) -> Tensor:
    """On (batch, heads, seqlen, head_dim); ``hidden`` (seqlen_q, seqlen_k) is True for keys not seen."""
    if workload.group_size > 1:
        k, v = (t.repeat_interleave(workload.group_size, 1) for t in (k, v))
    scores = (q * workload.head_dim**-0.5) @ k.transpose(-1, -2)
    if workload.softcap:
        scores = workload.softcap * torch.tanh(scores / workload.softcap)
    if hidden is None:
        return torch.softmax(scores, -1) @ v
    probabilities = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    if workload.seqlen_q > workload.seqlen_k or workload.varlen:  # rows that see no key are NaN
        probabilities = probabilities.masked_fill(hidden, 0.0)
    return probabilities @ v


def _retainable_graphs() -> AbstractContextManager:
    """torch.compile in it keeps what a backward pass saved, which is run many times on one graph."""
    config: Any = importlib.import_module("torch._functorch.config")
    return config.patch(donated_buffer=False) if hasattr(config, "donated_buffer") else nullcontext()


def _flex_mask(workload: Workload, inputs: Inputs) -> Callable[..., Tensor] | None:
    """A FlexAttention ``mask_mod``; None where every query sees every key."""
    left, causal = workload.window_left, workload.causal
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        sequence_q, position_q = _positions(inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.q.shape[0])
        sequence_k, position_k = _positions(inputs.cu_seqlens_k, inputs.cu_seqlens_k, inputs.k.shape[0])

        def within(b, h, i, j):
            seen = sequence_q[i] == sequence_k[j]
            if causal:
                seen = seen & (position_k[j] <= position_q[i])
            return seen & (position_k[j] >= position_q[i] - left) if left != UNLIMITED else seen

        return within
    if _sees_all(workload):
        return None
    shift = workload.seqlen_k - workload.seqlen_q

    def visible(b, h, i, j):
        position = i + shift
        if not causal:
            return j >= position - left
        return (j <= position) & (j >= position - left) if left != UNLIMITED else j <= position

    return visible


def _positions(cu_seqlens: Tensor, cu_seqlens_k: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(total,) each: a token's sequence, and its position among the sequence's keys, aligned at the end."""
    lengths, lengths_k = cu_seqlens.diff(), cu_seqlens_k.diff()
    sequence = torch.repeat_interleave(
        torch.arange(len(lengths), device=cu_seqlens.device), lengths, output_size=total
    )
    first = (cu_seqlens[:-1] - (lengths_k - lengths))[sequence]
    return sequence, torch.arange(total, device=cu_seqlens.device) - first


def _import_error(module: str, name: str) -> str | None:
    """Why ``from module import name`` fails; None if it does not."""
    try:
        getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # a broken build of a peer raises anything
        return (
            f"cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    return None


def _available_memory() -> int | None:
    """Bytes of free main memory, where the system tells."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
