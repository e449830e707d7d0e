"""Memory of an engine that is freed while the engine sleeps, for example for a training step on the same GPU.

Tensors stay the same objects while their memory is freed and allocated again, so no weight or cache has to be
passed on anew. Addresses may change, so CUDA graphs are captured again. Compiled kernels stay.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Freed:
    """The freed memory of tensors.

    Args:
        tensors: all tensors that use the memory. Several may be views of the same memory.
        keep: copy the memory to the host, from which :meth:`restore` copies it back.
    """

    def __init__(self, tensors: Iterable[Tensor], keep: bool):
        different = {id(tensor): tensor for tensor in tensors if tensor.numel()}.values()
        # Memory is known by the address that it had.
        self._places = [
            (one, one.untyped_storage().data_ptr(), int(one.storage_offset()), one.shape, one.stride())
            for one in different
        ]
        memory = {address: tensor.untyped_storage() for tensor, address, *_ in self._places}
        self._sizes = {address: (one.nbytes(), one.device) for address, one in memory.items()}
        self._kept: dict[int, Tensor] = {}
        for address, one in memory.items() if keep else ():
            content = torch.empty(0, dtype=torch.uint8, device=one.device).set_(one)
            self._kept[address] = content.to("cpu", copy=True)
        for tensor, *_ in self._places:
            tensor.set_()  # type: ignore[call-overload]

    def restore(self) -> None:
        """Allocate the memory again. It is zero if it was not kept.

        After an error because of too little memory, it can be called again.
        """
        memory = {}
        for address, (size, device) in self._sizes.items():
            content = torch.zeros(size, dtype=torch.uint8, device=device)
            if address in self._kept:
                content.copy_(self._kept[address])
            memory[address] = content.untyped_storage()
        for tensor, address, *place in self._places:
            tensor.set_(memory[address], *place)
