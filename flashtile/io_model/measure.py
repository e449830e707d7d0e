"""A card's numbers measured on the machine at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashtile.hardware import machine
from flashtile.hardware.cards import Card, card_of_device


def measured_card(device: torch.device, dtypes: Sequence[str], rep: float = 25.0) -> Card:
    """The device with peaks that were reached here: a large matrix product in each dtype and a large copy.

    Sizes come from the driver, and the rest from the table where it knows the card; on a CPU, threads stand
    for SMs and there is no shared memory. Takes some seconds.

    Examples:
        >>> from flashtile.io_model import measured_card
        >>> card = measured_card(torch.device("cpu"), ["float32"], rep=1.0)
        >>> card.peak_tflops("float32") > 0 and card.bandwidth_gbps > 0
        True
    """
    from flashtile.hardware.timing import copy_ceiling, matmul_ceiling

    described = machine.describe_device(device)
    known = card_of_device(described["name"])
    on_gpu = device.type == "cuda"
    properties: Any = torch.cuda.get_device_properties(device) if on_gpu else None
    return Card(
        name=f"{described['name']}, measured",
        sm_count=described["sm_count"] if on_gpu else described["threads"],
        clock_mhz=known.clock_mhz if known is not None else 0,
        tflops={dtype: matmul_ceiling(dtype, device, 2, rep) for dtype in dtypes},
        bandwidth_gbps=copy_ceiling(device, 2, rep),
        memory_bytes=described["memory_bytes"] or 0,
        l2_bytes=properties.L2_cache_size if on_gpu else 0,
        shared_bytes=properties.shared_memory_per_multiprocessor if on_gpu else 0,
        l1_bytes=known.l1_bytes if known is not None else 0,
        capability=(properties.major, properties.minor) if on_gpu else (0, 0),
        device_name=described["name"],
        source="measured here: a matrix product and a copy",
    )
