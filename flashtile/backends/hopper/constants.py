"""Constants of the host as the kernels know them."""

from triton.experimental.gluon import language as gl

from flashtile.backends.common import launch
from flashtile.backends.hopper import config
from flashtile.problems import common

WARPGROUP_ROWS = gl.constexpr(config.WARPGROUP_ROWS)
RAGGED_ROWS = gl.constexpr(launch.RAGGED_ROWS)
LOG2_E = gl.constexpr(common.LOG2_E)
LN_2 = gl.constexpr(1 / common.LOG2_E)
