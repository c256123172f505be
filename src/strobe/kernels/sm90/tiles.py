"""Tiles of queries, from the producer, which takes them from a counter, to the consumers, through shared memory."""

from strobe.kernels.common.gluon_masks import kv_range
from strobe.kernels.common.work import locate
from strobe.kernels.gluon import aggregate, gl, gluon, mbarrier
from strobe.kernels.sm90.layouts import ROWS, one, rows_of
from strobe.kernels.sm90.scores import documents_of_rows, slope_of

SLOTS = gl.constexpr(2)
"""Tiles that are known at a time: one is worked on, one is next."""

FIELDS = gl.constexpr(13)
GO, BATCH, HEAD, ROW, P, NOTE, N_Q, N_KV, START_Q, BEGIN, END, FULL_BEGIN, FULL_END = (gl.constexpr(i) for i in range(13))
"""P: the position of the tile's first row among the keys. NOTE: where the note of its first rows is. Both follow from the
others, but what consumers compute with they keep in registers."""


@aggregate
class Tile:
    """What a group of consumers keeps of a tile, in registers: None where it is not needed.

    go: whether there is a tile. The group works on `blocks` key blocks: `lead` first, then the others from `begin` on, left to
    right. With a mask: p is the position of the group's first row among the keys; blocks outside [full_begin, full_end) are
    masked; only other groups see the `between` blocks after the lead, and the `after` at the end. Where every tile begins at
    key 0 and leads with it, begin, lead, full_begin and between are 0, and None. batch, head, n_q: where scores depend on them.
    slope: of the head. documents: of the group's rows. n_q, n_kv: where sequences differ.
    """

    go: gl.tensor
    blocks: gl.tensor
    begin: (gl.tensor, gl.constexpr)
    lead: (gl.tensor, gl.constexpr)
    full_begin: (gl.tensor, gl.constexpr)
    between: (gl.tensor, gl.constexpr)
    p: (gl.tensor, gl.constexpr)
    full_end: (gl.tensor, gl.constexpr)
    after: (gl.tensor, gl.constexpr)
    batch: (gl.tensor, gl.constexpr)
    head: (gl.tensor, gl.constexpr)
    slope: (gl.tensor, gl.constexpr)
    documents: (gl.tensor, gl.constexpr)
    n_q: (gl.tensor, gl.constexpr)
    n_kv: (gl.tensor, gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, go, blocks, left, masked, places, slope, documents, lengths):
        self.go = go
        self.blocks = blocks
        nothing = gl.constexpr(None)
        self.begin, self.lead, self.full_begin, self.between = left or [nothing] * 4
        self.p, self.full_end, self.after = masked or [nothing] * 3
        self.batch, self.head = places or [nothing] * 2
        self.slope = nothing if slope is None else slope
        self.documents = nothing if documents is None else documents
        self.n_q, self.n_kv = lengths or [nothing] * 2


@gluon.jit
def first_block(begin, end, full_begin, full_end, lengths, score):
    """The block that leads, which the optimistic softmax goes by: the leftmost that all rows see whole. Without one, the one
    before: its last keys are the last that all rows see, unless a window is narrower than a tile. With slopes, which
    favour near keys, the rightmost, and with a user's mask, of which no block is sure to be seen."""
    FROM_FIRST: gl.constexpr = lengths.left is None and score.slopes is None and not score.BY_PAIR
    if FROM_FIRST:  # then all see the first whole block
        return begin
    elif score.slopes is not None or score.visible is not None:
        return end - 1
    else:
        return gl.where(full_begin < full_end, full_begin, gl.minimum(gl.maximum(full_end, begin), end - 1))


@gluon.jit
def later_block(j, begin, lead):
    """The j-th block, j > 0: from left to right, without the lead."""
    if lead is None:
        return j
    else:
        i = begin + (j - 1)
        return i + (i >= lead).to(gl.int32)


# ---- producer


@gluon.jit
def next_tile(counter):
    return gl.atomic_add(counter, 1) + gl.num_programs(0)


@gluon.jit
def with_keys(tile, counter, lengths, heads, C: gl.constexpr):
    """The first tile from this one on that sees any key, and its Work. (The others never run.)"""
    work = locate(gl.minimum(tile, heads.tiles - 1), lengths, heads, C, EMPTY=True)
    while (tile < heads.tiles) & (work.blocks() <= 0):
        tile = next_tile(counter)
        work = locate(gl.minimum(tile, heads.tiles - 1), lengths, heads, C, EMPTY=True)
    return tile, work


@gluon.jit
def publish(turn, tile, work, lengths, heads, memory):
    """The turn-th tile of this CTA, to the consumers."""
    slot = turn % SLOTS
    mbarrier.wait(memory.tile_empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
    put(memory.tiles, slot, GO, (tile < heads.tiles).to(gl.int32))
    put(memory.tiles, slot, BATCH, work.batch)
    put(memory.tiles, slot, HEAD, work.head)
    put(memory.tiles, slot, ROW, work.row)
    put(memory.tiles, slot, P, work.row + (work.n_kv - work.n_q))
    put(
        memory.tiles, slot, NOTE, (work.batch * heads.heads + work.head) * ((lengths.n_q + ROWS - 1) // ROWS) + work.row // ROWS
    )
    if lengths.VARY:
        put(memory.tiles, slot, N_Q, work.n_q)
        put(memory.tiles, slot, N_KV, work.n_kv)
        put(memory.tiles, slot, START_Q, work.start_q)
    put(memory.tiles, slot, BEGIN, work.begin)
    put(memory.tiles, slot, END, work.end)
    put(memory.tiles, slot, FULL_BEGIN, work.full_begin)
    put(memory.tiles, slot, FULL_END, work.full_end)
    mbarrier.arrive(memory.tile_full.index(slot), count=1)


@gluon.jit
def put(tiles, slot, field: gl.constexpr, value):
    tiles.index(slot * FIELDS + field).store(gl.full([1], 0, gl.int32, one(1)) + value)


# ---- consumers


@gluon.jit
def get(tiles, slot, field: gl.constexpr):
    return gl.max(tiles.index(slot * FIELDS + field).load(one(4)), 0)


@gluon.jit
def lengths_of(slot, lengths, memory):
    """(n_q, n_kv, first row among the packed) of the sequence of the tile in `slot`."""
    if lengths.VARY:
        return get(memory.tiles, slot, N_Q), get(memory.tiles, slot, N_KV), get(memory.tiles, slot, START_Q)
    else:
        return lengths.n_q, lengths.n_kv, 0


@gluon.jit
def fetch(w: gl.constexpr, turn, memory, lengths, score, MASKED: gl.constexpr, C: gl.constexpr):
    """The turn-th tile of this CTA, as group w sees it. It stays known until the group arrives at `tile_empty`."""
    slot = turn % SLOTS
    mbarrier.wait(memory.tile_full.index(slot), (turn // SLOTS) & 1)
    begin = get(memory.tiles, slot, BEGIN)
    end = get(memory.tiles, slot, END)
    full_begin = get(memory.tiles, slot, FULL_BEGIN)
    full_end = get(memory.tiles, slot, FULL_END)
    lead = first_block(begin, end, full_begin, full_end, lengths, score)
    go = get(memory.tiles, slot, GO)
    FROM_FIRST: gl.constexpr = lengths.left is None and score.slopes is None and not score.BY_PAIR
    own_begin = begin
    own_end = end
    left = None  # stays None only where nothing has a left side: what decides it has to be known to the compiler
    masked = None
    places = None
    slope = None
    documents = None
    sequence = None
    n_q, n_kv, _start = lengths_of(slot, lengths, memory)
    if MASKED or score.PLACED:
        p = get(memory.tiles, slot, P) + w * ROWS
        if MASKED:
            key_begin, key_end = kv_range(p, p + ROWS - 1, n_kv, lengths.left, lengths.right, lengths.prefix)
            # No more than half a ring is passed over: its blocks of V wait for the product before them.
            most: gl.constexpr = C.num_stages // 2
            own_end = gl.minimum(gl.maximum(gl.maximum((key_end + C.tile_kv - 1) // C.tile_kv, lead + 1), end - most), end)
            if not FROM_FIRST:
                own_begin = gl.maximum(gl.minimum(gl.minimum(key_begin // C.tile_kv, lead), begin + most), begin)
        masked = (p, full_end, go * (end - own_end))
    if not FROM_FIRST:
        left = (own_begin, lead, full_begin, go * (own_begin - begin))
    if score.PLACED:
        batch = get(memory.tiles, slot, BATCH)
        head = get(memory.tiles, slot, HEAD)
        places = (batch, head)
        if score.slopes is not None:
            slope = slope_of(batch, head, score)
        if score.document_q is not None:
            rows = p - (n_kv - n_q) + gl.arange(0, ROWS, rows_of(C.tile_kv))
            documents = documents_of_rows(batch, rows, n_q, score)
    if lengths.VARY:
        sequence = (n_q, n_kv)
    return Tile(go != 0, own_end - own_begin, left, masked, places, slope, documents, sequence)


@gluon.jit
def lead_of(tile):
    if tile.lead is None:
        return 0
    elif tile.batch is None:
        return tile.lead
    else:  # what belongs to its keys is loaded even if there is no tile, but one that sees nothing and leads with less
        return gl.maximum(tile.lead, 0)


@gluon.jit
def position_and_note_of(w: gl.constexpr, slot, memory):
    """Of group w's rows of the tile in `slot`: the position of the first among the keys, and where their note is."""
    return get(memory.tiles, slot, P) + w * ROWS, get(memory.tiles, slot, NOTE) + w


@gluon.jit
def place_of(w: gl.constexpr, slot, lengths, memory):
    """Where group w's rows of the tile in `slot` are: (batch, head, row, n_q, n_kv, first row among the packed)."""
    n_q, n_kv, start_q = lengths_of(slot, lengths, memory)
    row = get(memory.tiles, slot, ROW) + w * ROWS
    return get(memory.tiles, slot, BATCH), get(memory.tiles, slot, HEAD), row, n_q, n_kv, start_q
