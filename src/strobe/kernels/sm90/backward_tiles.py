"""The work of Hopper's backward: blocks of keys, the tiles of rows that see them, and how a CTA's roles come to know them."""

from strobe.kernels.common.channel import make_barriers
from strobe.kernels.common.gluon_masks import q_full, q_range
from strobe.kernels.common.tile_scheduler import sequence, within_spans
from strobe.kernels.gluon import aggregate, gl, gluon, mbarrier
from strobe.kernels.sm90 import backward_config as sizes
from strobe.kernels.sm90.layouts import scalar_layout
from strobe.kernels.sm90.tile_list import RECORD

KEYS = gl.constexpr(sizes.KEYS)
HALF = gl.constexpr(sizes.KEYS // 2)
"""Keys of a group."""
STAGES = gl.constexpr(sizes.STAGES)
SLOTS = gl.constexpr(sizes.SLOTS)
ROWS_PADDED = gl.constexpr(sizes.ROWS_PADDED)


@aggregate
class KeyHeads:
    """heads, heads_kv: of queries and of keys. at_once: key heads whose blocks come together, in a bundle, so that their Q, dO
    and dQ stay in the L2 cache; where blocks are listed, how many rows the heads of a bundle have. rest: the key head from
    which on all are one bundle, a multiple of at_once. all: key heads of the whole batch. blocks: of all of them. padded: rows
    that a query head has in what the backward's kernels share, all sequences together if they are packed."""

    heads: gl.tensor
    heads_kv: gl.tensor
    at_once: gl.tensor
    rest: gl.tensor
    all: gl.tensor
    blocks: gl.tensor
    padded: gl.tensor


@aggregate
class Work:
    """A block of keys of one key head: `first` is its first key. n_q, n_kv, start_q, start_kv: of its sequence, as in
    `tile_scheduler.Work`. The rows that see it are the tiles [begin, end), those of [full_begin, full_end) without a mask.
    group: query heads that share it. row: of the first of them and this sequence, the first row in what the backward's kernels
    share."""

    batch: gl.tensor
    head_kv: gl.tensor
    first: gl.tensor
    n_q: gl.tensor
    n_kv: gl.tensor
    start_q: (gl.tensor, gl.constexpr)
    start_kv: (gl.tensor, gl.constexpr)
    begin: gl.tensor
    end: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    group: gl.tensor
    row: gl.tensor


@gluon.jit
def locate_keys(K, number, KEYS: gl.constexpr, TILE_Q: gl.constexpr, ORDER: gl.constexpr = 0):
    """The number-th block of so many keys. Under a causal mask those that most rows see come first, within bundles of heads;
    or, with an ORDER of -1, the last keys first."""
    lengths = K.lengths
    heads = K.heads
    blocks = (lengths.n_kv + KEYS - 1) // KEYS
    bundle = gl.minimum(number // (heads.at_once * blocks) * heads.at_once, heads.rest)  # the first of its heads
    width = gl.where(bundle < heads.rest, heads.at_once, heads.all - bundle)
    within = number - bundle * blocks
    first = within // width * KEYS
    if ORDER == -1:
        first = (blocks - 1) * KEYS - first
    batch_head = bundle + within % width
    batch = batch_head // heads.heads_kv
    head_kv = batch_head % heads.heads_kv

    start_q, n_q = sequence(lengths.cu_q, lengths.used_q, batch, lengths.n_q, lengths.total_q)
    start_kv, n_kv = sequence(lengths.cu_kv, lengths.used_kv, batch, lengths.n_kv, lengths.total_kv)
    return _of_place(K, batch, head_kv, first, start_q, n_q, start_kv, n_kv, KEYS, TILE_Q)


@gluon.jit
def work_of(K, number):
    """The number-th block of the kernel in one pass: by the list where there is one (see `tile_list`). Of the blocks of a
    sequence come first those that most rows see, within bundles of heads, which are as even as can be."""
    if K.listed is None:
        return locate_keys(K, number, KEYS, K.C.tile_q, K.C.order)
    else:
        heads = K.heads
        at = K.listed + (1 + number // heads.heads_kv) * RECORD
        n_q = gl.load(at + 3)
        n_kv = gl.load(at + 5)
        blocks = (n_kv + KEYS - 1) // KEYS
        place = blocks - 1 - gl.load(at + 1) // KEYS  # of the record among the sequence's
        within = place * heads.heads_kv + number % heads.heads_kv
        bundles = gl.maximum((heads.heads_kv * n_q + heads.at_once - 1) // heads.at_once, 1)
        width = (heads.heads_kv + bundles - 1) // bundles
        bundle = within // (width * blocks) * width  # the first of its heads
        width = gl.minimum(width, heads.heads_kv - bundle)
        within -= bundle * blocks
        return _of_place(K, gl.load(at), bundle + within % width, within // width * KEYS, gl.load(at + 2), n_q,
                         gl.load(at + 4), n_kv, KEYS, K.C.tile_q)  # fmt: skip


@gluon.jit
def tiles_that_see(first, last, n_q, n_kv, lengths, TILE_Q: gl.constexpr):
    """[begin, end) of the tiles of rows that see some key of first..last; none if there is no such key."""
    shift = n_kv - n_q
    begin, end = q_range(first, last, shift, n_kv, lengths.left, lengths.right, lengths.prefix)
    begin = (gl.maximum(begin, shift) - shift) // TILE_Q
    end = gl.where(first < n_kv, gl.maximum((end - shift + TILE_Q - 1) // TILE_Q, begin), begin)
    return begin, end


@gluon.jit
def _of_place(K, batch, head_kv, first, start_q, n_q, start_kv, n_kv, KEYS: gl.constexpr, TILE_Q: gl.constexpr):
    """The block of a sequence and a key head that begins at a key."""
    lengths = K.lengths
    heads = K.heads
    group = heads.heads // heads.heads_kv
    shift = n_kv - n_q
    last = gl.minimum(first + KEYS, n_kv) - 1
    begin, end = tiles_that_see(first, last, n_q, n_kv, lengths, TILE_Q)
    full_begin, full_end = q_full(first, last, shift, n_kv, lengths.left, lengths.right, lengths.prefix)
    full_begin = (gl.maximum(full_begin, shift) - shift + TILE_Q - 1) // TILE_Q
    # The last tile may have fewer rows: those beyond weigh nothing, masked or not.
    full_end = gl.where(full_end >= n_kv, end, (full_end - shift) // TILE_Q)
    full_end = gl.where(first + KEYS <= n_kv, full_end, full_begin)
    if lengths.spans is not None:
        begin, end, span_begin, span_end = within_spans(begin, end, first, batch, lengths.n_kv, lengths, KEYS, TILE_Q)
        full_begin = gl.maximum(full_begin, (span_begin + TILE_Q - 1) // TILE_Q)
        full_end = gl.minimum(full_end, span_end // TILE_Q)
    if K.score.visible is not None:
        full_begin = end
    if lengths.cu_q is None:
        row = (batch * heads.heads + head_kv * group) * heads.padded
    else:
        row = head_kv * group * heads.padded + (start_q + batch * ROWS_PADDED) // ROWS_PADDED * ROWS_PADDED
    return Work(batch, head_kv, first, n_q, n_kv, start_q, start_kv, begin, end, full_begin, full_end, group, row)


# ---- where dS is stored

STORED_NUMBERS = ("stored_heads", "stored_pairs")


@aggregate
class StoredTiles:
    """dS^T of some heads in global memory: [heads, blocks of 64 keys, pairs of tiles, 64 keys, 128 rows]. descriptor: for the
    TMA, in a tuple that is empty if dS is not stored. heads: of queries; those of the batch take turns. pairs: that a block of
    keys has room for, in a window from the first one that sees it on. Tiles that nobody sees are not written."""

    descriptor: gl.tuple
    heads: gl.tensor
    pairs: gl.tensor

    @gluon.jit
    def place(self, head, first, row, work, lengths):
        """Where the TMA finds the tile of 64 keys from `first` on and the rows from `row` on, of a head of the whole batch."""
        pair = row // KEYS
        if lengths.left is not None:
            if lengths.right is not None:
                if lengths.prefix is None:
                    shift = work.n_kv - work.n_q
                    pair -= (gl.maximum(first // KEYS * KEYS - lengths.right, shift) - shift) // KEYS
        blocks = (lengths.n_kv + KEYS - 1) // KEYS * 2
        return [(((head % self.heads) * blocks + first // HALF) * self.pairs + pair) * HALF, row % KEYS]


# ---- tiles


@gluon.jit
def stage_of(g):
    """Ring stage of the CTA's g-th tile. Unsigned, because the modulo is then one instruction on the critical path."""
    return (g.to(gl.uint32) % STAGES).to(gl.int32)


@gluon.jit
def phase_of(g):
    """Phase of the barriers of the g-th tile's stage."""
    return ((g.to(gl.uint32) // STAGES) & 1).to(gl.int32)


# ---- the number of a block, from the producer to others


@aggregate
class Numbers:
    """Where two roles find the numbers of blocks, by turns, with its barriers."""

    number: gl.shared_memory_descriptor
    number_full: gl.shared_memory_descriptor
    number_empty: gl.shared_memory_descriptor


@gluon.jit
def make_numbers(READERS: gl.constexpr):
    """For so many roles. The caller fences."""
    return Numbers(
        gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        make_barriers(SLOTS, 1),
        make_barriers(SLOTS, READERS),
    )


@gluon.jit
def publish(turn, number, memory):
    """Tell two roles the number of this CTA's turn-th block; one that is too large says that there is none."""
    slot = turn % SLOTS
    mbarrier.wait(memory.number_empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
    memory.number.index(slot).store(gl.full([1], 0, gl.int32, scalar_layout(1)) + number)
    mbarrier.arrive(memory.number_full.index(slot), count=1)


@gluon.jit
def fetch(turn, memory, WARPS: gl.constexpr = 4):
    """The number of this CTA's turn-th block, from the producer. WARPS: of the role."""
    slot = turn % SLOTS
    mbarrier.wait(memory.number_full.index(slot), (turn // SLOTS) & 1)
    number = gl.max(memory.number.index(slot).load(scalar_layout(WARPS)), 0)
    mbarrier.arrive(memory.number_empty.index(slot), count=1)
    return number
