"""Adapters of published Triton kernels for forward mode that belong to no package.

They are files of research repositories. An adapter imports its file only if a checkout of the repository is
on ``PYTHONPATH``. Its kernel is called directly, so only the forward pass can be measured.
"""

from __future__ import annotations

import importlib
import inspect
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.inputs import Inputs
from benchmarks.suite.peers import Peer, PeerCall
from benchmarks.suite.workload import Workload


class PublishedKernel(Peer):
    """A kernel that computes out and its tangent, called without autograd."""

    device_type = "cuda"
    heads_first = True
    """Whether its layout is (batch, heads, seqlen, head_dim)."""
    multiple = 1
    """Sequence lengths must be multiples of this number, because it does not check bounds."""

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if workload.group_size > 1:
            return "takes as many heads of k and v as of q"
        if workload.varlen:
            return "takes no packed sequences"
        if workload.torch_dtype.itemsize != 2:
            return "takes 16-bit tensors"
        if workload.seqlen_q % self.multiple or workload.seqlen_k % self.multiple:
            return f"takes sequence lengths that are multiples of {self.multiple}"
        if workload.causal and not self.takes_causal(self._module()):
            return "takes no causal mask"
        return None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        module = self._module()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if q.requires_grad:
                raise NotImplementedError("is called for its forward pass only")
            out, tangent = self.pair(module, (q, k, v, *tangents), workload.causal)
            return out - tangent

        # It needs contiguous tensors or copies them, which is not timed.
        call = PeerCall(attend, heads_first=self.heads_first, contiguous=True)
        tangents = tuple(map(call.arrange, inputs.tangents))
        return call

    def _module(self) -> Any:
        assert self.needs is not None
        return importlib.import_module(self.needs[0])

    def takes_causal(self, module: Any) -> bool:
        """Return whether the kernel in ``module`` takes a causal mask."""
        return False

    def pair(self, module: Any, tensors: tuple[Tensor, ...], causal: bool) -> tuple[Tensor, Tensor]:
        """Return out and its tangent for q, k and v, then their tangents."""
        raise NotImplementedError


class Rcm(PublishedKernel):
    """The kernel of NVIDIA's rCM, in ``rcm/utils/`` of github.com/NVlabs/rcm.

    It took a causal mask until commit e0517ca. Importing it needs flash_attn and einops, which only its
    backward pass calls.
    """

    name = "rcm"
    needs = ("rcm.utils.flash_attention_jvp_triton", "attention")

    def takes_causal(self, module: Any) -> bool:
        return "causal" in inspect.signature(module._attention.forward).parameters

    def pair(self, module: Any, tensors: tuple[Tensor, ...], causal: bool) -> tuple[Tensor, Tensor]:
        return module.attention(*tensors, causal) if causal else module.attention(*tensors)


class MinScm(PublishedKernel):
    """The kernel of issue 1672 of FlashAttention, in github.com/Ryu1845/min-sCM.

    The grid is this adapter's. The published launch has programs for blocks of 64 rows, whichever block its
    autotuner chooses: with blocks of 16 rows, three quarters of the rows are not computed.
    """

    name = "min-scm"
    needs = ("standalone_multihead_jvp_test", "_flash_attention_jvp_multihead_kernel")

    def pair(self, module: Any, tensors: tuple[Tensor, ...], causal: bool) -> tuple[Tensor, Tensor]:
        batch, heads, rows, head_dim = tensors[0].shape
        results = torch.empty_like(tensors[0]), torch.empty_like(tensors[0])

        def grid(tile: dict[str, int]) -> tuple[int, int]:
            return batch * heads, -(-rows // tile["BLOCK_M"])

        kernel = module._flash_attention_jvp_multihead_kernel
        all_strides = strides(*tensors, *results)
        kernel[grid](*tensors, *results, *all_strides, batch, heads, rows, head_dim, head_dim**-0.5)
        return results


class Tvm(PublishedKernel):
    """The kernel of Terminal Velocity Matching, in ``jvp_utils/`` of github.com/lumalabs/tvm.

    It is that of :class:`MinScm` with one tile and a grid for it.
    """

    name = "tvm"
    needs = ("jvp_utils.ryu_triton", "flash_attention_jvp_multihead_triton_kernel_wrapper")

    def pair(self, module: Any, tensors: tuple[Tensor, ...], causal: bool) -> tuple[Tensor, Tensor]:
        return module.flash_attention_jvp_multihead_triton_kernel_wrapper(*tensors)[:2]


class Dmf(PublishedKernel):
    """The kernel of Decoupled MeanFlow, in ``models/`` of github.com/kyungmnlee/dmf, with its tile."""

    name = "dmf"
    needs = ("models.triton_utils", "_attn_fwd_dual")
    heads_first = False
    multiple = 128

    def pair(self, module: Any, tensors: tuple[Tensor, ...], causal: bool) -> tuple[Tensor, Tensor]:
        q, k = tensors[:2]
        batch, rows, heads, head_dim = q.shape
        lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)
        results = torch.empty_like(q), torch.empty_like(q)
        module._attn_fwd_dual[rows // 128, batch * heads, 1](
            *tensors, lse, *results, head_dim**-0.5, *strides(*tensors, *results), heads, rows, k.shape[1],
            head_dim, block_q=128, block_kv=128, num_stages=2, num_warps=8,
        )  # fmt: skip
        return results


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of all tensors, one after the other."""
    return tuple(chain.from_iterable(tensor.stride() for tensor in tensors))


def published() -> tuple[PublishedKernel, ...]:
    """Return a new adapter of each kernel."""
    return Rcm(), MinScm(), Tvm(), Dmf()
