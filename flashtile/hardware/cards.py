"""GPUs by their limits: arithmetic throughput, memory bandwidth, and memory sizes.

The numbers are the vendors' own, at the boost clock, for dense (not sparse) tensor-core products that
accumulate in fp32. Kernels reach less: a large matrix product reaches 60 to 80 % of the peak of an H100,
because the clock falls under load. :func:`flashtile.io_model.measured_card` measures a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KIB, MIB, GIB = 2**10, 2**20, 2**30

_VOLTA = "NVIDIA Tesla V100 GPU Architecture whitepaper (WP-08608-001), table 1"
_TURING = "NVIDIA Turing GPU Architecture whitepaper (WP-09183-001), appendix C"
_AMPERE = "NVIDIA A100 Tensor Core GPU Architecture whitepaper, tables 1 and 4"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, tables 2 and 11"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, tables 1 and 3"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet; SMs and caches as in the H100 whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendices A to D"
_L40S = "NVIDIA L40S GPU datasheet; caches as in the Ada whitepaper (AD102)"
_BLACKWELL = "NVIDIA Blackwell (HGX B200) datasheet; L2 and SMs as CUDA reports them"


@dataclass(frozen=True)
class Card:
    """A GPU of :data:`CARDS`, or a device measured by :func:`flashtile.io_model.measured_card`.

    Args:
        name: common name.
        sm_count: number of streaming multiprocessors.
        clock_mhz: boost clock; 0 if unknown.
        tflops: peak of dense products by dtype, in 10^12 operations per second (a multiply-add is two).
        bandwidth_gbps: memory bandwidth in 10^9 bytes per second.
        memory_bytes, l2_bytes: sizes of memory and L2 cache.
        shared_bytes: bytes of shared memory of one SM, the SRAM that holds tiles of attention.
        l1_bytes: bytes of the memory of one SM that L1 cache and shared memory share; 0 if unknown.
        capability: CUDA's compute capability; (0, 0) for a device that is not an NVIDIA GPU.
        device_name: end of the name that the driver reports.
        source: source of the numbers.

    Examples:
        >>> from flashtile.io_model import find_card
        >>> card = find_card("h100")
        >>> round(card.ridge("bfloat16"))  # FLOPs per byte above which a call is compute-bound
        295
    """

    name: str
    sm_count: int
    clock_mhz: float
    tflops: Mapping[str, float] = field(hash=False)
    bandwidth_gbps: float
    memory_bytes: int
    l2_bytes: int
    shared_bytes: int
    l1_bytes: int
    capability: tuple[int, int]
    device_name: str
    source: str

    def peak_tflops(self, dtype: str) -> float:
        """Return the peak throughput of products in ``dtype``, in TFLOP/s.

        Raises:
            ValueError: the peak of the card in this dtype is unknown.
        """
        if dtype not in self.tflops:
            raise ValueError(f"dtype on {self.name} must be one of {', '.join(self.tflops)}, got {dtype!r}")
        return self.tflops[dtype]

    def ridge(self, dtype: str) -> float:
        """Return the FLOPs per byte at the ridge of the roofline (Williams et al. 2009).

        At the ridge, arithmetic and memory accesses take the same time.
        """
        return self.peak_tflops(dtype) * 1e3 / self.bandwidth_gbps

    @property
    def register_bytes(self) -> int:
        """Bytes of registers of one SM: 65,536 registers of 32 bits on every GPU of CARDS; 0 on CPUs."""
        return 256 * KIB if self.shared_bytes else 0

    @property
    def sram_bytes(self) -> int:
        """Bytes of shared memory of all SMs."""
        return self.sm_count * self.shared_bytes

    @property
    def sram_gbps(self) -> float:
        """Bandwidth of all shared memories in 10^9 bytes/s, at 128 bytes per clock and SM; 0 if unknown."""
        return self.sm_count * 128 * self.clock_mhz * 1e-3


def _tensor(half: float, tf32: float, fp32: float, fp64: float, fp8: float | None = None) -> dict[str, float]:
    """Return the peak TFLOP/s of a GPU by dtype, for GPUs from Ampere on.

    "float32" has the peak of the fp32 units, because flashtile never rounds fp32 to tf32. "tf32" is for
    kernels that compute an fp32 product as three tf32 products.
    """
    peaks = {"float16": half, "bfloat16": half, "tf32": tf32, "float32": fp32, "float64": fp64}
    return peaks if fp8 is None else {**peaks, "float8_e4m3fn": fp8, "float8_e5m2": fp8}


CARDS: dict[str, Card] = {
    "v100": Card(
        "V100 SXM2 32GB", 80, 1530, {"float16": 125.0, "float32": 15.7, "float64": 7.8},
        900, 32 * GIB, 6 * MIB, 96 * KIB, 128 * KIB, (7, 0), "V100-SXM2-32GB", _VOLTA,
    ),
    "t4": Card(
        "T4", 40, 1590, {"float16": 65.0, "float32": 8.1, "float64": 0.25},
        320, 16 * GIB, 4 * MIB, 64 * KIB, 96 * KIB, (7, 5), "Tesla T4", _TURING,
    ),
    "a100-40gb": Card(
        "A100 SXM4 40GB", 108, 1410, _tensor(312.0, 156.0, 19.5, 19.5),
        1555, 40 * GIB, 40 * MIB, 164 * KIB, 192 * KIB, (8, 0), "A100-SXM4-40GB", _AMPERE,
    ),
    "a100": Card(
        "A100 SXM4 80GB", 108, 1410, _tensor(312.0, 156.0, 19.5, 19.5),
        2039, 80 * GIB, 40 * MIB, 164 * KIB, 192 * KIB, (8, 0), "A100-SXM4-80GB", _AMPERE,
    ),
    "rtx3090": Card(
        "GeForce RTX 3090", 82, 1695, _tensor(71.0, 35.6, 35.6, 0.56),
        936, 24 * GIB, 6 * MIB, 100 * KIB, 128 * KIB, (8, 6), "GeForce RTX 3090", _GA102,
    ),
    "rtx4090": Card(
        "GeForce RTX 4090", 128, 2520, _tensor(165.2, 82.6, 82.6, 1.29, fp8=330.3),
        1008, 24 * GIB, 72 * MIB, 100 * KIB, 128 * KIB, (8, 9), "GeForce RTX 4090", _ADA,
    ),
    "l4": Card(
        "L4", 58, 2040, _tensor(121.0, 60.5, 30.3, 0.47, fp8=242.5),
        300, 24 * GIB, 48 * MIB, 100 * KIB, 128 * KIB, (8, 9), "NVIDIA L4", _ADA,
    ),
    "l40s": Card(
        "L40S", 142, 2520, _tensor(362.1, 183.1, 91.6, 1.43, fp8=733.0),
        864, 48 * GIB, 96 * MIB, 100 * KIB, 128 * KIB, (8, 9), "L40S", _L40S,
    ),
    "h100-pcie": Card(
        "H100 PCIe 80GB", 114, 1755, _tensor(756.0, 378.0, 51.2, 51.2, fp8=1513.0),
        2000, 80 * GIB, 50 * MIB, 228 * KIB, 256 * KIB, (9, 0), "H100 PCIe", _HOPPER,
    ),
    "h100": Card(
        "H100 SXM5 80GB", 132, 1830, _tensor(989.4, 494.7, 66.9, 66.9, fp8=1978.9),
        3350, 80 * GIB, 50 * MIB, 228 * KIB, 256 * KIB, (9, 0), "H100 80GB HBM3", _HOPPER,
    ),
    "h200": Card(
        "H200 SXM 141GB", 132, 1830, _tensor(989.4, 494.7, 66.9, 66.9, fp8=1978.9),
        4800, 141 * GIB, 50 * MIB, 228 * KIB, 256 * KIB, (9, 0), "NVIDIA H200", _H200,
    ),
    "b200": Card(
        "B200 SXM 180GB", 148, 1965, _tensor(2250.0, 1125.0, 75.0, 37.0, fp8=4500.0),
        7700, 180 * GIB, 126 * MIB, 228 * KIB, 256 * KIB, (10, 0), "NVIDIA B200", _BLACKWELL,
    ),
}  # fmt: skip
"""Known GPUs by the name for ``flashtile explain --card``."""


def find_card(name: str) -> Card:
    """Return the card of that name in :data:`CARDS`, ignoring case.

    Raises:
        ValueError: there is no such card.

    Examples:
        >>> from flashtile.io_model import find_card
        >>> find_card("H100").sm_count
        132
    """
    card = CARDS.get(name.lower())
    if card is None:
        raise ValueError(f"card must be one of {', '.join(CARDS)}, got {name!r}")
    return card


def card_of_device(device_name: str) -> Card | None:
    """Return the entry of :data:`CARDS` for a GPU that the driver calls ``device_name``, or None.

    Examples:
        >>> from flashtile.io_model import card_of_device
        >>> card_of_device("NVIDIA H100 80GB HBM3").name
        'H100 SXM5 80GB'
        >>> card_of_device("some other GPU") is None
        True
    """
    return next((card for card in CARDS.values() if device_name.endswith(card.device_name)), None)
