# mypy: ignore-errors
# (Device code is a language of its own: Triton's compiler checks it.)
"""V^T for the e4m3 forward: [heads, blocks * columns, keys], block by block of keys, in the order of keys that `fp8` asks for.

`beside_kernel` is a launch of a few CTAs, each of which takes a multiprocessor for itself. The forward begins on the others
meanwhile, and waits for a head's V^T by a flag (`await_values`). Its warps have roles:

    role        warps   work
    loader      1       copies chunks of V in (TMA)
    transposer  16      turns a chunk's bytes, by registers alone, and stores them
    flagger     1       says so: a release waits for all stores, and the next chunk need not wait for it

A chunk has as many blocks as make 256 columns. Chunks go to the CTAs in turn, heads one after the other, as the forward's tiles
want them. A flag counts the blocks of a head that are there; the forward sets it back.

    barrier               arrivals      says
    ring.full, empty      TMA bytes, 1  a chunk is there; it is in registers
    stored.full, empty    1, 1          it is stored; its flag is raised

V^T is written by threads and read by TMA: both sides have a fence between the proxies, beside release and acquire.

`transpose_kernel`, a launch of all multiprocessors for which the forward waits, is for a V that TMA cannot read.
"""

import triton
import triton.language as tl

from strobe.kernels.common.channel import Channel, make_barriers
from strobe.kernels.common.dependent_launch import take_program_turn, take_turn
from strobe.kernels.common.descriptors import coordinates
from strobe.kernels.common.flags import await_flag, fence_async_global
from strobe.kernels.common.tile_scheduler import sequence
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tensor_descriptor,
    tma_load,
)
from strobe.kernels.portable.primitives import sequence as sequence_of_program

WARPS = gl.constexpr(16)
"""Warps that turn bytes: each has 16 columns of a block."""

COLUMNS = gl.constexpr(256)
"""Columns that the blocks of a chunk have together."""

STAGES = gl.constexpr(4)
"""Chunks in the ring, of 32 KiB."""


@gluon.jit
def await_values(flags, pair, n, TILE: gl.constexpr):
    """Wait until V^T of a batch entry's key head is there, all blocks of its n keys, for TMA to read."""
    await_flag(flags + pair, (n + TILE - 1) // TILE, 0)
    fence_async_global()


# ---- bytes


@gluon.constexpr_function
def bytes_of(keys, columns):
    """Bytes of [keys, columns], of which each thread has four keys of 16 columns: words of V^T. A warp has the words of 128
    keys, so that its stores are of whole lines."""
    warps = [[0, 1 << e] for e in range(4, columns.bit_length() - 1)] + [[1 << e, 0] for e in range(7, keys.bit_length() - 1)]
    registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [8, 0]], [[2, 0], [4, 0], [16, 0], [32, 0], [64, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [keys, columns])


TURNED = gl.constexpr(
    "{ .reg .b32 a, b, c, d; "
    "prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362; "
    "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }"
)
"""Four columns of four keys, a register a key, as four words, a register a column."""


@gluon.jit
def words_of(x):
    """[keys, columns] bytes as [keys / 4, columns] words: of each 16 keys those that the operand's lane b has, 2b, 2b + 1,
    2b + 8 and 2b + 9, make its b-th word."""
    x = x.reshape([x.shape[0] // 16, 2, 4, 2, x.shape[1]]).permute(0, 2, 4, 1, 3)
    even, odd = x.split()
    first, third = even.split()
    second, fourth = odd.split()
    x = gl.inline_asm_elementwise(TURNED, "=&r,=&r,=&r,=&r,r,r,r,r", [first, second, third, fourth], dtype=gl.int32,
                                  is_pure=True, pack=4)  # fmt: skip
    return x.reshape([x.shape[0] * 4, x.shape[2]])


# ---- beside the forward


@aggregate
class Transposition:
    """What every role takes. v: descriptor of blocks. n, total: as in `sequence`. blocks: of V^T that a head has. chunks: of a
    head of the longest sequence; all: of all heads together. blocks_in: the ring, by blocks."""

    v: tensor_descriptor
    v_t: gl.tensor
    flags: gl.tensor
    cu_kv: (gl.tensor, gl.constexpr)
    used_kv: (gl.tensor, gl.constexpr)
    n: gl.tensor
    total: (gl.tensor, gl.constexpr)
    blocks: gl.tensor
    heads: gl.tensor
    chunks: gl.tensor
    all: gl.tensor
    blocks_in: gl.shared_memory_descriptor
    ring: Channel
    stored: Channel
    TILE: gl.constexpr
    BLOCKS: gl.constexpr


@aggregate
class Chunk:
    """Blocks [begin, end) of a key head, in a sequence of n keys from row `start` on."""

    batch: gl.tensor
    head: gl.tensor
    start: (gl.tensor, gl.constexpr)
    n: gl.tensor
    begin: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, start, n, begin, end):
        self.batch = batch
        self.head = head
        self.start = start
        self.n = n
        self.begin = begin
        self.end = end


@gluon.jit
def divided(x, by):
    """x // by of numbers that are not negative: fewer instructions than of any."""
    return (x.to(gl.uint32) // by.to(gl.uint32)).to(gl.int32)


@gluon.jit
def chunk_of(T, c):
    """The c-th chunk. It has no block if its sequence is shorter."""
    pair = divided(c, T.chunks)
    batch = divided(pair, T.heads)
    start, n = sequence(T.cu_kv, T.used_kv, batch, T.n, T.total)
    begin = (c - pair * T.chunks) * T.BLOCKS
    return Chunk(batch, pair - batch * T.heads, start, n, begin, gl.minimum(begin + T.BLOCKS, (n + T.TILE - 1) // T.TILE))


@gluon.jit
def loader(T):
    g = gl.to_tensor(0)
    for c in tl.range(gl.program_id(0), T.all, gl.num_programs(0)):
        chunk = chunk_of(T, c)
        if chunk.begin < chunk.end:
            full = T.ring.acquire(g)
            mbarrier.expect(full, T.BLOCKS * T.v.block_type.nbytes)
            for b in gl.static_range(T.BLOCKS):
                place = coordinates(T.v, chunk.start, chunk.n, chunk.batch, chunk.head, (chunk.begin + b) * T.TILE, 0)
                to = T.blocks_in.index(T.ring.slot(g) * T.BLOCKS + b)
                tma_load(T.v, place, full, to.reshape(T.v.block_type.shape))
            g += 1


@gluon.jit
def transposer(T):
    g = gl.to_tensor(0)
    for c in tl.range(gl.program_id(0), T.all, gl.num_programs(0)):
        chunk = chunk_of(T, c)
        if chunk.begin < chunk.end:
            T.ring.wait(g)
            store_words(T, chunk, load_bytes(T, g))
            T.ring.release(g)  # what was loaded is in registers: it has been stored
            mbarrier.arrive(T.stored.acquire(g), count=1)
            g += 1


@gluon.jit
def load_bytes(T, g):
    x = T.ring.block(g)[0]
    return x.load(bytes_of(x.shape[0], x.shape[1])).to(gl.int8, bitcast=True)


@gluon.jit
def store_words(T, chunk, x):
    """Write V^T of a chunk. Beyond the last key it is 0."""
    if T.used_kv is not None and T.cu_kv is None:  # else TMA knows where that is
        key = chunk.begin * T.TILE + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
        x = gl.where((key < chunk.n)[:, None], x, 0)
    x = words_of(x)
    WORDS: gl.constexpr = T.TILE // 4
    DIM: gl.constexpr = x.shape[1]
    word = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    column = gl.arange(0, DIM, gl.SliceLayout(0, x.type.layout))
    block = word // WORDS
    first = chunk.batch * ((T.n + T.TILE - 1) // T.TILE)
    if T.cu_kv is not None:
        first = chunk.start // T.TILE + chunk.batch
    before = chunk.head.to(gl.int64) * T.blocks + first + chunk.begin
    to = T.v_t.to(gl.pointer_type(gl.int32)) + before * (DIM * WORDS)
    to += (block * (DIM * WORDS) + word % WORDS)[:, None] + (column * WORDS)[None, :]
    gl.store(to, x, mask=(chunk.begin + block < chunk.end)[:, None])
    fence_async_global()


@gluon.jit
def flagger(T):
    g = gl.to_tensor(0)
    for c in tl.range(gl.program_id(0), T.all, gl.num_programs(0)):
        chunk = chunk_of(T, c)
        if chunk.begin < chunk.end:
            T.stored.wait(g)
            gl.atomic_add(T.flags + chunk.batch * T.heads + chunk.head, chunk.end - chunk.begin, sem="release")
            T.stored.release(g)
            g += 1


@gluon.jit(do_not_specialize=["n", "total", "blocks", "heads", "chunks", "all"])
def beside_kernel(
    v_desc, v_t, flags, cu_kv, used_kv, n, total, blocks, heads, chunks, all, TILE: gl.constexpr, columns: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = COLUMNS // columns
    ONE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, columns], v_desc.dtype)
    ALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCKS * TILE, columns], v_desc.dtype)
    blocks_in = gl.allocate_shared_memory(v_desc.dtype, [STAGES * BLOCKS, TILE, columns], ONE)
    chunks_in = reinterpret(blocks_in, v_desc.dtype, [STAGES, BLOCKS * TILE, columns], ALL) if BLOCKS > 1 else blocks_in
    ring = Channel((chunks_in,), make_barriers(STAGES, 1), make_barriers(STAGES, 1), STAGES)
    stored = Channel((), make_barriers(STAGES, 1), make_barriers(STAGES, 1), STAGES)
    fence_async_shared()
    take_turn()
    T = Transposition(
        v_desc, v_t, flags, cu_kv, used_kv, n, total, blocks, heads, chunks, all, blocks_in, ring, stored, TILE, BLOCKS
    )
    gl.warp_specialize([(transposer, (T,)), (loader, (T,)), (flagger, (T,))], [1, 1], [24, 24])


# ---- ahead of the forward


@triton.jit(do_not_specialize=["n", "total", "blocks"])
def transpose_kernel(
    v, v_t, cu_kv, used_kv, n, total, blocks, by_batch, by_row, by_head, TILE: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """One block of keys: bytes [TILE, DIM] of v to [PADDED, TILE] of v_t. Beyond the last key and column it writes 0.

    Four bytes that are neighbours in V^T make a word: keys 2b, 2b + 1, 2b + 8, 2b + 9 of each 16, which the operand's lane b
    has. So registers alone change bytes, and shared memory passes words on."""
    take_program_turn()
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    target = batch * ((n + TILE - 1) // TILE) + block
    start, n = sequence_of_program(cu_kv, used_kv, batch, n, total)
    if cu_kv is not None:
        target = start // TILE + batch + block
    if block * TILE < n:
        word = tl.arange(0, TILE // 4)
        key = block * TILE + (word // 4 * 16 + word % 4 * 2)
        d = tl.arange(0, PADDED)
        # Bytes: what they mean does not matter here.
        rows = v.to(tl.pointer_type(tl.uint8)) + batch.to(tl.int64) * by_batch + head.to(tl.int64) * by_head
        x = tl.zeros((TILE // 4, PADDED), tl.int32)
        for e in tl.static_range(4):
            of_key = key + (e // 2 * 8 + e % 2)
            there = (of_key < n)[:, None]
            if DIM < PADDED:
                there = there & (d < DIM)[None, :]
            byte = tl.load(rows + ((start + of_key).to(tl.int64) * by_row)[:, None] + d[None, :], mask=there, other=0)
            x |= byte.to(tl.int32) << (8 * e)
        to = v_t.to(tl.pointer_type(tl.int32)) + (head.to(tl.int64) * blocks + target) * (PADDED * TILE // 4)
        tl.store(to + d[:, None] * (TILE // 4) + word[None, :], tl.trans(x))
