"""Constants that host and kernels share, as constexpr, and the register layouts of a warpgroup's products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.common import launch
from flashtile.backends.hopper import config
from flashtile.problems import common

WARPGROUP_ROWS = gl.constexpr(config.WARPGROUP_ROWS)
RAGGED_ROWS = gl.constexpr(launch.RAGGED_ROWS)
LOG2_E = gl.constexpr(common.LOG2_E)
LN_2 = gl.constexpr(1 / common.LOG2_E)


@gluon.constexpr_function
def accumulator_layout(columns, k=16):
    """Return the layout of an accumulator [64, columns]; ``k`` is the K of one wgmma instruction."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, k])


@gluon.constexpr_function
def left_operand_layout(accumulator, k_width=2):
    """Return the layout of wgmma's left operand in registers; ``k_width`` of its columns share a register."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator, k_width=k_width)
