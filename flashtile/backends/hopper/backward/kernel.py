"""Attention backward for Hopper: all three gradients in one kernel of five products, in Gluon.

After FlashAttention-2 (Dao 2023, arXiv:2307.08691, Algorithm 2) in FlashAttention-3's form (Shah et al. 2024,
arXiv:2407.08608, section 3 and appendix). A work tile is BLOCK_N keys of one key head: the outer loop of the
paper. Its program visits the query rows that see these keys, BLOCK_M in a step, in every query head of the
key head: the inner loop. If programs share the keys, each visits a part of the rows or of the heads
(``splits``). A step, with keys as rows:

    S^T = K Q^T     P^T = exp2(S^T - lse)     dV += P^T dO
    dP^T = V dO^T   dS^T = P^T (dP^T - delta)  dK += dS^T Q     dQ += dS K

P^T and dS^T are then in the registers from which dV and dK read their left operands. Only dS^T also goes to
shared memory, since dQ needs the keys of both consumers.

    producer       1 warp: Q, -lse, dO, -delta of the next steps; K and V once per work tile
    consumer 0, 1  1 warpgroup each: 64 keys, their dK and dV, and a half of dQ
      wgmma         [  S i  ][  dQ i-1  ][  dP i  ][   dV i   ][  dK i  ][ S i+1 ][   dQ i   ]
      registers              (   P i    ) dQ i-1 -> (  dS i  ) -lse i+1          (   P i+1   )
    accumulate_dq  1 warp: dq_accum += dQ i-1, in fp32, by TMA
    postprocess    2 warps: dQ of an earlier head from dq_accum to 16 bits; zeros for a later head

With ONE_BLOCK a sequence has no other keys, so dQ of a step is complete: consumers round it, accumulate_dq
stores it to dQ, and postprocess has nothing to do.

dQ lags one step behind, so that a consumer hardly waits for the other's half of dS^T, and the tensor cores
have work queued during the exponentials. Accumulators in flight from one iteration to the next would also do
that, but ptxas then serialises all products. What passes between partitions, and by which mbarrier:

    barrier             count  arrives                               waits
    q.full, do.full     bytes  TMA, with -lse or -delta              consumers: the step's product
    q.empty, do.empty   2      consumers: all products of the step   producer: TMA into the slot
    kv_full             1      TMA, or the producer if no row sees   consumers: the work tile's first S
                               the keys
    kv_empty            2      consumers: last dQ of the work tile   producer: TMA of the next K and V
    ds_full             2      consumers: a half of dS is stored     consumers: dQ, in the next step
    dq_full             1      consumer W: its half is stored        accumulate_dq: TMA addition
    dq_empty            1      accumulate_dq: TMA has read it        consumer W: the next half
    queue               3      consumers, accumulate_dq: index read  producer: the next but one index

dS has two slots, by the step's parity, and no empty barrier: before a consumer writes dS of step i, it has
waited for ds_full of step i - 1, at which the other arrives only after its dQ of step i - 2 is complete.

``i`` counts the program's steps and ``t`` its work tiles. In a work tile, ``g`` is a query head of the group,
``j`` a step of that head, and ``m`` the block of query rows that the step visits. ``W`` is the consumer. The
module is read from top to bottom: the kernel, the producer, a consumer's work tile, its loop over steps, a
step, its scores and dS, the loads and stores. The two partitions of dQ are in ``dq_accum``, which work tile
comes when in ``schedule``.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import bias as bias_tiles
from flashtile.backends.hopper import pipeline
from flashtile.backends.hopper.backward.dq_accum import (
    POSTPROCESS_WARPS,
    accum_of,
    accumulate_dq,
    in_register_order,
    make_chunks,
    postprocess,
)
from flashtile.backends.hopper.backward.schedule import (
    count_tiles,
    find_work_tile,
    gradient_head,
    group_size,
    has_rows,
    head_of_batch,
    in_order,
    own_row_blocks,
    own_rows,
    padded_row,
    query_head,
    row_block,
    row_list,
    step_block,
)
from flashtile.backends.hopper.compat import async_load, async_store, gluon
from flashtile.backends.hopper.inline_asm import pin_16_bit, to_16_bit, to_fp32
from flashtile.backends.hopper.layouts import (
    LOG2_E,
    RAGGED_ROWS,
    WARPGROUP_ROWS,
    accumulator_layout,
    column_parts,
    left_operand_layout,
    plus_columns,
    product_of_rows,
    store_part,
)
from flashtile.backends.hopper.masking import hide_by_window
from flashtile.backends.hopper.modifiers import (
    Modifiers,
    drop,
    function_arguments,
    generator_of,
    random_bits,
    tanh_of,
    visited_block,
)
from flashtile.backends.hopper.pipeline import make_channel
from flashtile.backends.hopper.work_tiles import slope_of


class BackwardNumbers(NamedTuple):
    """Floats of the launch, for scores in log2 units."""

    scale: Any
    """softmax_scale."""
    scale_log2: Any
    """softmax_scale * log2(e); softmax_scale with SCORE_MOD; not used with a soft-cap."""
    softcap_rate: Any
    """softmax_scale / softcap."""
    softcap_log2: Any
    """softcap * log2(e)."""
    zero: Any
    """0.0, as an argument because the compiler must not know its value (:func:`unknown_zeros`)."""
    keep_scale: Any = None
    """Factor of dropout, 1 / keep; ``scale`` includes it."""
    keep: Any = None
    """1 - dropout_p."""


class BackwardDescriptors(NamedTuple):
    """Descriptors of the tensors that a producer loads."""

    q: Any
    k: Any
    v: Any
    do: Any
    neg_lse: Any
    neg_delta: Any
    bias: Any
    """None without a bias."""


class Statistics(NamedTuple):
    """Two numbers of each query row (``common.preprocess``): -lse and -delta."""

    neg_lse: Any
    neg_delta: Any


class Shared(NamedTuple):
    """Shared memory of a program: channels, mbarriers, then tiles."""

    q: Any
    do: Any
    bias: Any
    """The channel of the bias, which uses the memory of ``ds``; 0 without a bias."""
    kv_full: Any
    kv_empty: Any
    ds_full: Any
    dq_full: Any
    dq_empty: Any
    k: Any
    v: Any
    neg_lse: Any
    """-lse of the rows in each slot of q."""
    neg_delta: Any
    """-delta of the rows in each slot of do."""
    ds: Any
    dq: Any
    gradient: Any


@gluon_kernel(do_not_specialize=("pointers",))
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, dq_add_desc, dq_accum_desc, dk_desc,
    dv_desc, bias_desc, dbias_desc, pointers, C: gl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dV.

    Grid: at most one program per multiprocessor; each takes work tiles from the work queue.
    ``dq_add_desc`` and ``dq_accum_desc`` describe the same memory, but with ONE_BLOCK the first describes dQ.
    Unused descriptors are None.
    """
    # All partitions read what the preprocess kernel writes: counters, -lse, -delta, the zeros of dq_accum.
    # Barriers before this wait, so that their set-up overlaps as well, were not measured.
    wait_for_preprocess()
    scalars = pointers.scalars
    accum = accum_of(scalars.sizes, pointers)
    dtype: gl.constexpr = q_desc.dtype
    # The two readers are the consumers. S needs only Q, and dP comes half a step later, so Q and dO have
    # barriers of their own. STAGES is at least 2: a consumer waits for the next Q before it frees this one.
    q = make_channel(q_desc, C.STAGES, 2, 1)
    do = make_channel(do_desc, C.STAGES, 2, 1)
    # K and V have one slot. At head_dim 128 the tiles of this kernel take 225 of 227 KiB. At head_dim 64 a
    # second slot changed the speed by a factor of 0.98 to 1.06.
    k = gl.allocate_shared_memory(dtype, [1] + k_desc.block_type.shape, k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1] + v_desc.block_type.shape, v_desc.layout)
    neg_lse = gl.allocate_shared_memory(
        gl.float32, [C.STAGES] + neg_lse_desc.block_type.shape, neg_lse_desc.layout
    )
    neg_delta = gl.allocate_shared_memory(
        gl.float32, [C.STAGES] + neg_delta_desc.block_type.shape, neg_delta_desc.layout
    )
    # dS has keys as rows, but keys as columns if it is stored as a bias's gradient. A bias arrives in the
    # memory of dS of the same step, which is written after the bias has been read.
    DS_ROWS: gl.constexpr = C.BLOCK_M if C.STORES_DS else C.BLOCK_N
    DS_COLUMNS: gl.constexpr = C.BLOCK_N if C.STORES_DS else C.BLOCK_M
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DS_ROWS, DS_COLUMNS], dtype)
    ds = gl.allocate_shared_memory(dtype, [2, DS_ROWS, DS_COLUMNS], ds_layout)
    bias = 0
    if C.HAS_BIAS:
        bias = bias_tiles.over_ds(C, bias_desc, ds)
    # A tile for each consumer: its half of dQ, in fp32 unless it is complete, and 64 columns of dK or dV,
    # which leave in such parts.
    dq_parts = gl.allocate_shared_memory(
        dq_add_desc.dtype, [2] + dq_add_desc.block_type.shape, dq_add_desc.layout
    )
    gradient = gl.allocate_shared_memory(dk_desc.dtype, [2] + dk_desc.block_type.shape, dk_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Each barrier counts partitions, and TMA's bytes as one. Partitions arrive once, not once a thread.
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(dq_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    shared = Shared(
        q, do, bias, kv_full, kv_empty, ds_full, dq_full, dq_empty, k, v, neg_lse, neg_delta, ds, dq_parts,
        gradient,
    )  # fmt: skip
    descs = BackwardDescriptors(q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc)
    # Read by the consumers and accumulate_dq. Postprocess warps take their work from a counter of their own.
    queue = pipeline.make_work_queue(3)
    chunks = 0
    if not C.ONE_BLOCK:
        chunks = make_chunks(dq_accum_desc)
    # The first partition runs in the kernel's own four warps; the two lists are those of the others.
    # Consumers have 240 registers a thread, the three others 24, as in the forward (``hopper.config``). These
    # three have four warps together: one warpgroup, the unit in which ``setmaxnreg`` counts. Partitions start
    # after a barrier of the whole program, so they all see the initialised mbarriers.
    gl.warp_specialize(
        [
            (consumer, (C, 0, queue, shared, dk_desc, dv_desc, pointers)),
            (consumer, (C, 1, queue, shared, dk_desc, dv_desc, pointers)),
            (producer, (C, queue, shared, descs, pointers)),
            (accumulate_dq, (C, queue, shared, dq_add_desc, dbias_desc, pointers, accum)),
            (postprocess, (
                C, chunks, dq_accum_desc, pointers, scalars.schedule, accum, scalars.numbers.scale
            )),
        ],
        [4, 1, 1, POSTPROCESS_WARPS],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS, C.PRODUCER_REGISTERS, C.PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def wait_for_preprocess():
    """Wait for the preprocess kernel: with programmatic dependent launch, programs start before it ends."""
    # The result is not used, but inline assembly must have one. ``tiles.wait_for_dependencies`` is the same
    # wait with another form of it, which gives this kernel other register numbers.
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(1)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


# The producer.


@gluon.jit
def producer(C: gl.constexpr, queue, shared, descs, pointers):
    """One warp that takes work tiles from the work queue and loads what they need.

    An index is taken before the last loads of a work tile, which hide the latency of the atomic. The queue
    passes it on; its two slots let the producer run one work tile ahead.
    """
    q, do, schedule = shared.q, shared.do, pointers.scalars.schedule
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc = descs
    num_tiles = count_tiles(C, pointers, schedule)
    i = 0
    t = 0
    tile_index = gl.atomic_add(pointers.counters, 1)
    pipeline.put(queue, t, tile_index)
    while tile_index < num_tiles:
        work = find_work_tile(C, tile_index, pointers, schedule)
        rows = own_rows(C, tile_index, work, pointers, schedule)
        following = tile_index  # a placeholder: the index is taken below, in this loop or after it
        # K and V have one slot: all products of tile t - 1. Tile 0 waits for the phase before the first,
        # which counts as complete.
        mbarrier.wait(shared.kv_empty, (t & 1) ^ 1)
        if rows.begin < rows.end:
            # One barrier for both, though S could start without V: two barriers were not measured.
            mbarrier.expect(shared.kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_key_block(C, k_desc, work, shared.kv_full, shared.k.index(0))
            load_key_block(C, v_desc, work, shared.kv_full, shared.v.index(0))
        else:  # nothing is multiplied, but the consumers wait for each work tile
            mbarrier.arrive(shared.kv_full, count=1)
        group = group_size(C, schedule)
        # All rows of a head, then of the next. All heads of a block of rows first, whose dQ lies together,
        # had 0.91 of the speed at head_dim 64 with 8 query heads per key head.
        for g in range(group):
            head = query_head(C, work, g, schedule)
            head_in_batch = head_of_batch(C, work, g, schedule)
            for j in range(rows.count):
                # Before the last loads, which wait for a slot: the atomic takes a microsecond. Taken after
                # them it cost a tenth of a call without a mask at a length of 512 (286 instead of 316
                # TFLOP/s).
                if (g == group - 1) & (j == rows.count - 1):
                    following = gl.atomic_add(pointers.counters, 1)
                    pipeline.put(queue, t + 1, following)
                m = row_block(C, rows, j)
                row = m * C.BLOCK_M
                padded = padded_row(C, work, row)
                slot = q.acquire(i)
                barrier = q.full.index(slot)
                # -lse and -delta come with the tiles of the same rows, so they need no barriers of their own.
                mbarrier.expect(barrier, q_desc.block_type.nbytes + neg_lse_desc.block_type.nbytes)
                load_rows(C, q_desc, work, row, head, barrier, q.tiles.index(slot))
                async_load(neg_lse_desc, [head_in_batch, padded], barrier, shared.neg_lse.index(slot))
                slot = do.acquire(i)
                barrier = do.full.index(slot)
                mbarrier.expect(barrier, do_desc.block_type.nbytes + neg_delta_desc.block_type.nbytes)
                load_rows(C, do_desc, work, row, head, barrier, do.tiles.index(slot))
                async_load(neg_delta_desc, [head_in_batch, padded], barrier, shared.neg_delta.index(slot))
                # Last: its slot holds dS of step i - 2, which dQ reads until the middle of step i - 1.
                if C.HAS_BIAS:
                    bias_tiles.load_key_tiles(C, shared.bias, bias_desc, work, head, row, i, schedule)
                i += 1
        if rows.begin >= rows.end:  # no loads to hide the atomic behind
            following = gl.atomic_add(pointers.counters, 1)
            pipeline.put(queue, t + 1, following)
        t += 1
        tile_index = following


# A consumer: its work tiles, and the steps of each.


@gluon.jit
def consumer(C: gl.constexpr, W: gl.constexpr, queue, shared, dk_desc, dv_desc, pointers):
    """Warpgroup W: compute dK and dV of keys 64 W to 64 W + 63 of every work tile."""
    ROWS: gl.constexpr = WARPGROUP_ROWS
    schedule, numbers = pointers.scalars.schedule, pointers.scalars.numbers
    dk_layout: gl.constexpr = accumulator_layout(C.BLOCK_D)
    dv_layout: gl.constexpr = accumulator_layout(C.BLOCK_DV)
    zeros = unknown_zeros(C, numbers)
    num_tiles = count_tiles(C, pointers, schedule)
    i = 0
    t = 0
    # The four warps look at the index and keep its slot of the queue until the gradients are stored: it is
    # read a second time below.
    tile_index = pipeline.peek(queue, t, 4)
    while tile_index < num_tiles:
        work = find_work_tile(C, tile_index, pointers, schedule)
        ranges = own_row_blocks(C, tile_index, work, schedule)
        mbarrier.wait(shared.kv_full, t & 1)
        dk = gl.full([ROWS, C.BLOCK_D], 0.0, gl.float32, dk_layout)
        dv = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, dv_layout)
        listed = row_list(C, work, pointers, schedule)
        modifiers = key_modifiers(C, W, work, 0, shared.bias, listed, pointers, schedule)
        if has_rows(C, ranges, listed):
            dk, dv, i = sum_gradients(C, W, i, work, ranges, modifiers, zeros, dk, dv, shared, pointers)
        else:  # the producer waits for each work tile, loaded or not
            mbarrier.arrive(shared.kv_empty, count=1)
        # Read and computed a second time: kept over the steps, these numbers would need registers.
        tile_index = pipeline.read(queue, t, 4)
        work = find_work_tile(C, tile_index, pointers, schedule)
        head = gradient_head(C, tile_index, work, schedule)
        if C.HAS_DROPOUT:  # the factor 1 / keep of P, applied once to the sum; dK's scale includes it
            dv = dv * numbers.keep_scale
        store_gradient(C, W, dv_desc, work, head, shared.gradient.index(W), dv, schedule)
        store_gradient(C, W, dk_desc, work, head, shared.gradient.index(W), dk * numbers.scale, schedule)
        queue.release(t)
        t += 1
        tile_index = pipeline.peek(queue, t, 4)
    tma.store_wait(0)  # the program's shared memory must not end before TMA has read it


@gluon.jit
def sum_gradients(
    C: gl.constexpr, W: gl.constexpr, i, work, ranges, modifiers, zeros, dk, dv, shared, pointers
):
    """Add the contributions of a work tile's rows to dK and dV of warpgroup W's keys.

    dQ of the rows is passed to ``accumulate_dq``. ``i`` counts steps. Returns (dk, dv, the new ``i``).
    """
    scalars = pointers.scalars
    schedule = scalars.schedule
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_M)
    rows = in_order(C, ranges, modifiers.blocks)

    # Prologue: the first step, which has no dQ of a step before. It has the mask even if its block needs
    # none, because a fourth copy of a step would be needed otherwise.
    start = row_of(C, shared.neg_lse.index(shared.q.wait(i)), s_layout) + zeros
    last = i + rows.count * group_size(C, schedule) - 1
    m = step_block(rows, 0)
    head = QueryHead(slope_of(C, work, query_head(C, work, 0, schedule), pointers, schedule), modifiers)
    state = step(
        C, W, True, C.MASKED, i, m, min(last - i, 1), work, head, StepState(dk, dv, start), shared, scalars
    )
    i += 1

    # Main loop, for each query head of the key head: blocks of rows that the mask cuts, then the others. They
    # are two loops, because the mask would cost registers and instructions in every step (causal, lengths of
    # 1024 and 16384: 261 -> 280 and 495 -> 557 TFLOP/s).
    for g in range(group_size(C, schedule)):
        slope = slope_of(C, work, query_head(C, work, g, schedule), pointers, schedule)
        # Generator and arguments of this head; those of the first are made a second time.
        of_head = key_modifiers(C, W, work, g, modifiers.bias, modifiers.blocks, pointers, schedule)
        head = QueryHead(slope, of_head)
        done = max(1 - g, 0)  # 1 for the first head, whose first step was the prologue
        if C.MASKED:
            for j in range(done, rows.masked):
                m = step_block(rows, j)
                state = step(
                    C, W, False, True, i, m, min(last - i, 1), work, head, state, shared, scalars
                )  # fmt: skip
                i += 1
            done = max(done, rows.masked)
        for j in range(done, rows.count):
            m = rows.full - rows.masked + j  # step_block of these steps, without its selection
            state = step(C, W, False, False, i, m, min(last - i, 1), work, head, state, shared, scalars)
            i += 1

    # Epilogue: dQ of the last step.
    before = i - 1
    mbarrier.wait(shared.ds_full.index(before & 1), (before >> 1) & 1)
    ds, k = shared.ds.index(before & 1), shared.k.index(0)
    dq = dq_product(C, W, ds, k.reshape([C.BLOCK_N, C.BLOCK_D]))
    dq = warpgroup_mma_wait(0, deps=[dq])
    # Before dQ is passed on: the next K and V load meanwhile. V was last read by dP of the last step.
    mbarrier.arrive(shared.kv_empty, count=1)
    pass_dq(C, W, shared, dq, before, scalars.numbers)
    return state.dk, state.dv, i


class StepState(NamedTuple):
    """Registers that one step passes to the next."""

    dk: Any
    dv: Any
    """dk and dv are the gradients of a warpgroup's keys, summed over the steps so far."""
    start: Any
    """-lse of the step's rows, the initial value of the accumulator of S^T."""


class QueryHead(NamedTuple):
    """Properties of a query head that the steps need."""

    slope: Any
    """ALiBi's slope, in log2 units."""
    modifiers: Any
    """:class:`~flashtile.backends.hopper.modifiers.Modifiers`."""


@gluon.jit
def step(
    C: gl.constexpr, W: gl.constexpr, FIRST: gl.constexpr, CUT: gl.constexpr, i, m, more, work, head, state,
    shared, scalars,
):  # fmt: skip
    """Compute step ``i``, for the rows of block ``m``, except its dQ. Also compute dQ of the step before.

    Products are issued in the order S, dQ of the step before, dP, dV, dK. wgmma completes in this order, so a
    wait that leaves n products in flight waits for all but the last n.

    FIRST: this is the first step of a work tile, so there is no step before. CUT: the mask may hide scores.
    ``more`` is 0 in the last step of a work tile, else 1. Returns the new state, whose ``start`` is -lse of
    the rows of step ``i + more``.
    """
    dtype: gl.constexpr = shared.k.dtype
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_M)
    ds_operand: gl.constexpr = left_operand_layout(accumulator_layout(C.BLOCK_D))
    p_operand: gl.constexpr = left_operand_layout(accumulator_layout(C.BLOCK_DV))
    q, do, modifiers, numbers = shared.q, shared.do, head.modifiers, scalars.numbers
    dk, dv, start = state
    # The index is always 0, but to the compiler it depends on the step. Otherwise the compiler would keep the
    # matrix descriptors of these tiles in 32 registers of every thread (spills of 376 -> 4 bytes, 555 -> 614
    # TFLOP/s at head_dim 128).
    k = shared.k.index(i >> 30).reshape([C.BLOCK_N, C.BLOCK_D])
    v = shared.v.index(i >> 30).reshape([C.BLOCK_N, C.BLOCK_DV])
    my_k = k.slice(W * ROWS, ROWS, 0)
    my_v = v.slice(W * ROWS, ROWS, 0)
    zeros = unknown_zeros(C, numbers)

    slot = q.wait(i)  # also the slot of dO: both rings have STAGES slots and one write a step
    q_tile = q.tiles.index(slot).reshape([C.BLOCK_M, C.BLOCK_D])
    do_tile = do.tiles.index(slot).reshape([C.BLOCK_M, C.BLOCK_DV])
    # The accumulator starts at -lse in units of raw products (an idea of ThunderKittens): the product does
    # the subtraction. With SCALED_SCORES, scores are more than scaled products, so the product starts at 0.
    scores = product_of_rows(my_k, q_tile, start, C.HEAD_DIM, not C.SCALED_SCORES)
    # Issued behind S, so that the tensor cores have dQ to do while this warpgroup computes P. Each of the two
    # slots of dS is filled every other step, so its phase is the parity of half the step's number.
    if not FIRST:
        before = i - 1
        mbarrier.wait(shared.ds_full.index(before & 1), (before >> 1) & 1)
        dq = dq_product(C, W, shared.ds.index(before & 1), k)
    # Random bits and the bias are brought while S and dQ are in flight.
    bits = 0
    if C.HAS_DROPOUT:
        bits = random_bits(modifiers.dropout, m * C.BLOCK_M, C.BLOCK_M, True, s_layout)
    added = 0
    if C.HAS_BIAS:
        added = bias_tiles.read_keys(C, W, modifiers.bias, i, s_layout)
    scores = warpgroup_mma_wait(0 if FIRST else 1, deps=[scores])  # dQ may stay in flight during P
    p, weights = probabilities(C, W, CUT, scores, added, m, slot, work, head, shared, scalars)
    # dS is computed from the rounded P, which the product dV needs anyway, in half the registers. With P in
    # fp32 until then, a thread spilled 888 bytes.
    weights = to_16_bit(weights, dtype)
    p = to_16_bit(p, dtype)
    if C.HAS_DROPOUT:
        p = drop(p, bits, modifiers.dropout, True)
    do.wait(i)  # only here: until now, dO could still be loading
    dp_start = row_of(C, shared.neg_delta.index(slot), s_layout) + zeros  # as S starts at -lse
    # ptxas would move the wait for dQ before the exponentials, and nothing would overlap (head_dim 64, no
    # mask, lengths of 512 to 16384: 259 to 413 instead of 309 to 540 TFLOP/s).
    p = pin_16_bit(p)
    if not FIRST:
        dq = warpgroup_mma_wait(0, deps=[dq])
    if C.HAS_BIAS:  # noqa: SIM102 - a constexpr condition needs an if of its own
        if i > 0:  # dQ has been read from dS of the step before, where the next bias goes
            modifiers.bias.release(i - 1)
    # With dropout dP starts at 0: delta is subtracted where P is dropped as well (score_gradients).
    dp = product_of_rows(my_v, do_tile, dp_start, C.HEAD_DIM_V, not C.HAS_DROPOUT)
    # S has keys as rows, so its registers are those of the left operand: the conversion moves nothing.
    dv = warpgroup_mma(gl.convert_layout(p, p_operand), do_tile, dv, is_async=True)
    if not FIRST:
        pass_dq(C, W, shared, dq, i - 1, numbers)  # during dP and dV
    dp = warpgroup_mma_wait(1, deps=[dp])  # dV may stay in flight during dS
    ds = score_gradients(C, p, weights, dp, bits, slot, modifiers, shared, numbers)
    # No empty barrier (module docstring). With a bias, these bytes held what other warps have read of it: the
    # compiler puts a barrier of the warpgroup between those loads and these stores.
    if C.STORES_DS:
        shared.ds.index(i & 1).slice(W * ROWS, ROWS, 1).permute((1, 0)).store(ds)
    else:
        shared.ds.index(i & 1).slice(W * ROWS, ROWS, 0).store(ds)
    fence_async_shared()  # wgmma and TMA read dS through the asynchronous proxy
    mbarrier.arrive(shared.ds_full.index(i & 1), count=1)
    dk = warpgroup_mma(gl.convert_layout(ds, ds_operand), q_tile, dk, is_async=True)
    # -lse of the next step, loaded during dK. The last step loads its own -lse again.
    start = row_of(C, shared.neg_lse.index(q.wait(i + more)), s_layout) + zeros
    # Nothing stays in flight: ptxas serialises products whose accumulators cross an iteration.
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    # dO was free after dV, but an earlier release would need a wait of its own. Q is read by dK. The loads of
    # -lse and -delta from these slots are complete as well: products have used their values.
    do.release(i)
    q.release(i)
    return StepState(dk, dv, start)


@gluon.jit
def unknown_zeros(C: gl.constexpr, numbers):
    """Return a zero for each of a warpgroup's keys, [64, 1] in the layout of S, unknown to the compiler.

    The accumulators of S and dP start at one number for each query row plus these zeros. If all keys had
    copies of one register, the compiler would copy them after the fence that precedes the product, which
    costs a wait.
    """
    layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(C.BLOCK_M))
    keys = gl.arange(0, WARPGROUP_ROWS, layout=layout)
    return ((keys + 1).to(gl.float32) * numbers.zero)[:, None]


@gluon.jit
def dq_product(C: gl.constexpr, W: gl.constexpr, ds, k):
    """Start the product dS K for warpgroup W's half of dQ, and return its accumulator.

    With BLOCK_M 64 the half has half of the columns, because a warpgroup's product has at least 64 rows. With
    BLOCK_M 128 it has 64 of the rows. The product is asynchronous: wait for it before the accumulator is
    used.
    """
    COLUMNS: gl.constexpr = C.BLOCK_D // 2 if C.BLOCK_M == WARPGROUP_ROWS else C.BLOCK_D
    # The product ignores these zeros: dQ of each step is added up in memory, not in registers.
    zero = gl.full([WARPGROUP_ROWS, COLUMNS], 0.0, gl.float32, accumulator_layout(COLUMNS))
    ds_q = ds if C.STORES_DS else ds.permute((1, 0))
    if C.BLOCK_M == WARPGROUP_ROWS:
        half = k.slice(W * (C.BLOCK_D // 2), C.BLOCK_D // 2, 1)
        return warpgroup_mma(ds_q, half, zero, use_acc=False, is_async=True)
    else:
        rows = ds_q.slice(W * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
        return warpgroup_mma(rows, k, zero, use_acc=False, is_async=True)


@gluon.jit
def pass_dq(C: gl.constexpr, W: gl.constexpr, shared, dq, i, numbers):
    """Pass warpgroup W's half of dQ of step ``i`` to the warp that adds it to ``dq_accum``, or stores it."""
    # TMA has read dQ of the step before. A consumer has one buffer, so the phase is the parity of the step.
    mbarrier.wait(shared.dq_empty.index(W), (i & 1) ^ 1)
    if C.ONE_BLOCK:
        store_part(dq * numbers.scale, shared.dq.index(W))
    else:
        shared.dq.index(W).store(in_register_order(dq))
        fence_async_shared()  # TMA reads dQ through the asynchronous proxy
    mbarrier.arrive(shared.dq_full.index(W), count=1)


# From raw products to P, and from dP to dS, with keys as rows.


@gluon.jit
def key_modifiers(C: gl.constexpr, W: gl.constexpr, work, g, bias, blocks, pointers, schedule):
    """Return the :class:`Modifiers` for the keys of warpgroup W and one query head.

    ``g`` is the index of the query head among the heads that share the key head. ``bias`` is the channel that
    brings tiles of the bias. ``blocks`` is the result of ``schedule.row_list`` for the work tile.
    """
    generator = 0
    arguments = 0
    if C.HAS_MODS:
        arguments = function_arguments(work, query_head(C, work, g, schedule), pointers.captured)
    if C.HAS_DROPOUT:
        # Counted over all sequences, so that each has random numbers of its own.
        head = (work.sequence * schedule.num_heads + work.head) * group_size(C, schedule) + g
        first = work.tile_in_head * C.BLOCK_N + W * WARPGROUP_ROWS
        generator = generator_of(head, first, pointers, schedule)
    return Modifiers(bias, generator, arguments, blocks)


@gluon.jit
def row_of(C: gl.constexpr, statistics, layout: gl.constexpr):
    """Load one number for each of BLOCK_M query rows from shared memory to registers, as [1, BLOCK_M]."""
    return gl.expand_dims(statistics.reshape([C.BLOCK_M]).load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def probabilities(
    C: gl.constexpr, W: gl.constexpr, CUT: gl.constexpr, s, added, m, slot, work, head, shared, scalars
):  # fmt: skip
    """Return (P, weights), computed from ``s``, the raw products of keys and the rows of block ``m``.

    ``weights`` is P times the derivative of the soft-cap or SCORE_MOD, so that dS = weights * (dP - delta).
    ``added`` has the values of the bias.
    """
    s_layout: gl.constexpr = s.type.layout
    slope, modifiers = head
    numbers = scalars.numbers
    softcap_grad = 1.0
    if C.SCALED_SCORES:
        s, softcap_grad = scores_and_derivative(C, W, s, m, work, slope, numbers, s_layout, modifiers)
        if C.HAS_BIAS:
            s = s + bias_tiles.in_log2(added)
        neg_lse = row_of(C, shared.neg_lse.index(slot), s_layout)
        p = exponentials(C, s, neg_lse)
    elif C.HAS_BIAS:
        p = gl.exp2(s * numbers.scale_log2 + bias_tiles.in_log2(added))
    else:  # ``s`` is Q K^T - lse / softmax_scale: one multiplication is left before the exponential
        p = gl.exp2(s * numbers.scale_log2)
    # Rows past the last query have -lse = -inf (``common.preprocess``), so their P is 0 without a mask. Only
    # their bias may have any value.
    if C.HAS_BIAS:
        p = bias_tiles.hide_rows(C, p, m, work, s_layout)
    if CUT:
        p = mask_keys(C, W, p, m, work, scalars.schedule, s_layout, modifiers)
    return p, weights_of(C, p, softcap_grad)


@gluon.jit
def score_gradients(C: gl.constexpr, p, weights, dp, bits, slot, modifiers, shared, numbers):
    """Return dS in 16 bits. ``p`` is P after dropout. ``dp`` is dP - delta; with dropout it is only dP."""
    dtype: gl.constexpr = p.dtype
    s_layout: gl.constexpr = dp.type.layout
    # With r = 1 / keep, dS = P (r D dP - delta) = r (P D dP - P keep delta), D being 0 where P is dropped.
    # The last factor r is in ``scale``. delta is subtracted where P is dropped as well.
    if C.HAS_DROPOUT:
        neg_delta = row_of(C, shared.neg_delta.index(slot), s_layout) * numbers.keep
        kept = p
        if C.SOFTCAP:  # otherwise weights are P before dropout, and ``p`` are those that were kept
            kept = drop(weights, bits, modifiers.dropout, True)
        return to_16_bit(to_fp32(kept) * dp + to_fp32(weights) * neg_delta, dtype)
    else:
        return to_16_bit(to_fp32(weights) * dp, dtype)


@gluon.jit
def exponentials(C: gl.constexpr, s, neg_lse):
    """Return P of scores in log2 units and keys as rows, not yet masked."""
    p = gl.exp2(s + neg_lse)
    if C.GUARD_SCORES:  # SCORE_MOD may return NaN for rows past the end
        p = gl.where(neg_lse == float("-inf"), 0.0, p)
    return p


@gluon.jit
def weights_of(C: gl.constexpr, p, softcap_grad):
    """Return P times the derivative of the soft-cap or SCORE_MOD, so that dS = weights * (dP - delta)."""
    weights = p * softcap_grad
    if C.GUARD_FACTORS:  # the derivative may be infinite or NaN where a score is hidden
        weights = gl.where(p == 0.0, 0.0, weights)
    return weights


@gluon.jit
def scores_and_derivative(
    C: gl.constexpr, W: gl.constexpr, s, m, work, slope, numbers, s_layout: gl.constexpr, modifiers=0
):  # fmt: skip
    """Return (scores in log2 units, their derivative), computed from the raw products ``s``, Q K^T.

    The scores are the scaled products after a soft-cap and ALiBi, or after SCORE_MOD. The derivative is with
    respect to the scaled products. SCORE_MOD takes scores in natural units, so with SCORE_MOD
    ``numbers.scale_log2`` is softmax_scale.
    """
    s, softcap_grad = soft_cap(C, s, numbers)
    if C.LISTED:
        m, _ = visited_block(C, modifiers.blocks, m)
    if C.SCORE_MOD is not None:
        keys, rows = positions(C, W, m, work, s_layout)
        own = modifiers.functions
        s, own_grad = C.SCORE_MOD(s, own.sequence, own.head, rows - own.offset, keys, own.captured)
        s, softcap_grad = s * LOG2_E, own_grad
    if C.ALIBI:
        keys = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, s_layout)).to(gl.float32)
        first_key = work.tile_in_head * C.BLOCK_N + W * WARPGROUP_ROWS
        between = (m * C.BLOCK_M + work.seqlen_k - work.seqlen_q - first_key).to(gl.float32)
        s = s - slope * gl.abs(plus_columns(between - keys, C.BLOCK_M, s_layout))
    return s, softcap_grad


@gluon.jit
def soft_cap(C: gl.constexpr, s, numbers):
    """Return (scores, softcap_grad) of raw products Q K^T.

    Scores are in log2 units, or in natural units if a SCORE_MOD follows. softcap_grad is the derivative of
    the capped score with respect to the scaled product. Without a soft-cap it is 1.0.
    """
    softcap_grad = 1.0
    if C.SOFTCAP:
        tanh = tanh_of(s, numbers.softcap_rate, False)
        s = tanh * numbers.softcap_log2
        softcap_grad = 1 - tanh * tanh
    else:
        s = s * numbers.scale_log2
    return s, softcap_grad


@gluon.jit
def mask_keys(C: gl.constexpr, W: gl.constexpr, p, m, work, schedule, s_layout: gl.constexpr, modifiers=0):
    """Return P with 0 for keys that a row does not see."""
    is_full = False
    if C.LISTED:
        m, is_full = visited_block(C, modifiers.blocks, m)
    keys, rows = positions(C, W, m, work, s_layout)
    if C.MASK_MOD is not None:
        own = modifiers.functions
        seen = C.MASK_MOD(own.sequence, own.head, rows - own.offset, keys, own.captured)
        p = gl.where(seen | is_full, p, 0.0)
    if not C.EVEN_N:
        p = gl.where(keys < work.seqlen_k, p, 0.0)
    return hide_by_window(C, p, keys, rows, schedule.mask)


@gluon.jit
def positions(C: gl.constexpr, W: gl.constexpr, m, work, s_layout: gl.constexpr):
    """Return (positions of warpgroup W's keys, [keys, 1], positions of the rows of block ``m``, [1, rows]).

    Positions are aligned so that the last query of the sequence has the position of the last key.
    """
    keys = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, s_layout))
    rows = gl.arange(0, C.BLOCK_M, layout=gl.SliceLayout(0, s_layout))
    keys += work.tile_in_head * C.BLOCK_N + W * WARPGROUP_ROWS
    return keys[:, None], (rows + (m * C.BLOCK_M + work.seqlen_k - work.seqlen_q))[None, :]


# Loads and stores by TMA.


@gluon.jit
def load_rows(C: gl.constexpr, desc, work, row, head, barrier, tile, column=0):
    """Load BLOCK_M rows of q or dO by TMA, from ``column`` on; rows past the last query arrive as zeros."""
    # The coordinates of ``tma.ragged_view``, here and below: TMA sees the end of the tensor where the
    # sequence ends, although other sequences follow in memory.
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        async_load(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_q + row, head, column], barrier, tile)
    else:
        async_load(desc, [work.sequence, row, head, column], barrier, tile)


@gluon.jit
def load_key_block(C: gl.constexpr, desc, work, barrier, tile, column=0):
    """Load the work tile's block of keys or values by TMA, from ``column`` on; rows past the last key arrive
    as zeros."""
    row = work.tile_in_head * C.BLOCK_N
    head = work.head_kv
    if C.VARLEN or C.SEQUSED:
        end = work.start_k + work.seqlen_k
        async_load(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_k + row, head, column], barrier, tile)
    else:
        async_load(desc, [work.sequence, row, head, column], barrier, tile)


@gluon.jit
def store_gradient(
    C: gl.constexpr, W: gl.constexpr, desc, work, head, tile, gradient, schedule, start=0
):  # fmt: skip
    """Store the gradient of warpgroup W's keys of a head by TMA, through one tile of shared memory.

    Each store writes as many columns as the block of ``desc`` has. The first column of ``gradient`` is column
    ``start`` of the head. Rows past the last key are not written.
    """
    PART: gl.constexpr = desc.block_type.shape[-1]
    parts = column_parts(gradient, PART)  # in parts, because shared memory has room for 64 columns
    for n in gl.static_range(gradient.shape[1] // PART):
        tma.store_wait(0)  # the tile may still hold the previous part
        store_part(parts[n], tile)
        row = work.tile_in_head * C.BLOCK_N + W * WARPGROUP_ROWS
        if C.VARLEN or C.SEQUSED:
            end = work.start_k + work.seqlen_k
            if C.SEQUSED and not C.VARLEN:  # dK and dV have no gaps between sequences, unlike k
                end = work.sequence * schedule.seqlen_k + work.seqlen_k
            coordinate = RAGGED_ROWS - work.seqlen_k + row
            async_store(desc, [RAGGED_ROWS, end, coordinate, head, start + n * PART], tile)
        else:
            async_store(desc, [work.sequence, row, head, start + n * PART], tile)
