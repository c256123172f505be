"""Tiles of queries, from the producer, which takes them from a counter, to the consumers, through shared memory."""

from strobe.kernels.common.gluon_masks import kv_range
from strobe.kernels.common.tile_scheduler import locate, of_place
from strobe.kernels.gluon import aggregate, gl, gluon, mbarrier
from strobe.kernels.sm90.layouts import ROWS, rows_of, scalar_layout
from strobe.kernels.sm90.scores import documents_of_rows, slope_of
from strobe.kernels.sm90.tile_list import RECORD

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


@gluon.constexpr_function
def row_of_group(w, C):
    """The first of group w's rows, from that of the tile on."""
    return 0 if C.tile_heads > 1 else w * ROWS.value


@gluon.constexpr_function
def is_always_there(w, C):
    """Whether every tile has a head for group w."""
    return C.uneven_group == 0 or w < C.uneven_group - (C.tiles_abreast - 1) * C.tile_heads


@gluon.jit
def head_of_group(w: gl.constexpr, head, C: gl.constexpr):
    """The head of queries of group w, or one that shares its keys if there is none for it (see `row_of_head`). head: of the
    tile, or the number of those that share it."""
    if C.uneven_group:
        of_key = head % C.tiles_abreast * C.tile_heads + w
        return head // C.tiles_abreast * C.uneven_group + gl.minimum(of_key, C.uneven_group - 1)
    elif C.tile_heads > 1:
        return head * C.tile_heads + w
    else:
        return head


@gluon.jit
def row_of_head(w: gl.constexpr, row, head, K):
    """The first row of group w, of a tile from `row` on; beyond all rows if the tile has no head for it."""
    row += row_of_group(w, K.C)
    if is_always_there(w, K.C):
        return row
    else:
        is_last = head % K.C.tiles_abreast == K.C.tiles_abreast - 1
        return gl.where(is_last, K.lengths.n_q, row)


@gluon.jit
def note_of_tile(work, K):
    """Where the note of the first group's rows is."""
    head = head_of_group(0, work.batch * K.heads.heads + work.head, K.C)
    return head * ((K.lengths.n_q + ROWS - 1) // ROWS) + work.row // ROWS


@gluon.jit
def note_of_group(w: gl.constexpr, K):
    """Where the note of group w's rows is, from that of the first group's on."""
    if K.C.tile_heads > 1:
        return w * ((K.lengths.n_q + ROWS - 1) // ROWS)
    else:
        return w


# ---- producer


@gluon.jit
def first_tile(K):
    """The first tile of this CTA: that of its number or, of a launch whose CTAs begin one by one, the first that nobody has
    taken."""
    if K.C.beside:
        return gl.atomic_add(K.counters, 1, sem="relaxed")
    else:
        return gl.program_id(0)


@gluon.jit
def next_tile(K, tile):
    """The tile that this CTA takes after this one: the next that nobody has taken, or, if tiles are static, the next of its
    own."""
    # Nothing but a number is handed over, so no fence is needed. An H200, head dim 128, 16k tokens, 16 heads, kilocycles (by
    # Triton's default, acq_rel): 512 keys, causal 146 (151), 1024 320 (329), causal 211 (216), 4096, causal, 601 (613);
    # head dim 64: level.
    if K.C.static:
        return tile + gl.num_programs(0)
    elif K.C.beside:
        return gl.atomic_add(K.counters, 1, sem="relaxed")
    else:
        return gl.atomic_add(K.counters, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def with_keys(K, tile):
    """The first tile from this one on that sees any key, and its Work. (The others never run. Over a cache those that have a
    row do, as nobody else writes it.)"""
    work = work_of(K, gl.minimum(tile, K.heads.tiles - 1))
    while (tile < K.heads.tiles) & (work.blocks() <= 0):
        tile = next_tile(K, tile)
        work = work_of(K, gl.minimum(tile, K.heads.tiles - 1))
    return tile, work


@gluon.jit
def work_of(K, tile):
    """The Work of the tile-th tile: by the list where there is one (see `tile_list`), which all heads go through together."""
    if K.listed is None:
        return locate(tile, K.lengths, K.heads, K.C, EMPTY=K.C.box == 0)
    else:
        tile = gl.maximum(tile, 0)
        at = K.listed + (1 + tile // K.heads.heads) * RECORD
        return of_place(gl.load(at), tile % K.heads.heads, tile * 0, gl.load(at + 1), gl.load(at + 2), gl.load(at + 3),
                        gl.load(at + 4), gl.load(at + 5), K.lengths, K.C, EMPTY=K.C.box == 0)  # fmt: skip


@gluon.jit
def publish(K, turn, tile, work):
    """The turn-th tile of this CTA, to the consumers."""
    tiles = K.memory.tiles
    slot = turn % K.C.slots
    mbarrier.wait(K.memory.tile_empty.index(slot), ((turn // K.C.slots) & 1) ^ 1)
    put(tiles, slot, GO, (tile < K.heads.tiles).to(gl.int32))
    put(tiles, slot, BATCH, work.batch)
    put(tiles, slot, HEAD, work.head)
    put(tiles, slot, ROW, work.row)
    put(tiles, slot, P, work.row + (work.n_kv - work.n_q))
    put(tiles, slot, NOTE, note_of_tile(work, K))
    if K.lengths.VARY:
        put(tiles, slot, N_Q, work.n_q)
        put(tiles, slot, N_KV, work.n_kv)
        put(tiles, slot, START_Q, work.start_q)
    put(tiles, slot, BEGIN, work.begin)
    put(tiles, slot, END, work.end)
    put(tiles, slot, FULL_BEGIN, work.full_begin)
    put(tiles, slot, FULL_END, work.full_end)
    mbarrier.arrive(K.memory.tile_full.index(slot), count=1)


@gluon.jit
def put(tiles, slot, field: gl.constexpr, value):
    tiles.index(slot * FIELDS + field).store(gl.full([1], 0, gl.int32, scalar_layout(1)) + value)


# ---- consumers


@gluon.jit
def get(tiles, slot, field: gl.constexpr, WARPS: gl.constexpr = 4):
    """A number of the tile in `slot`. WARPS: of the role that asks."""
    return gl.max(tiles.index(slot * FIELDS + field).load(scalar_layout(WARPS)), 0)


@gluon.jit
def lengths_of(slot, lengths, memory):
    """(n_q, n_kv, first row among the packed) of the sequence of the tile in `slot`."""
    if lengths.VARY:
        return get(memory.tiles, slot, N_Q), get(memory.tiles, slot, N_KV), get(memory.tiles, slot, START_Q)
    else:
        return lengths.n_q, lengths.n_kv, 0


@gluon.jit
def fetch(w: gl.constexpr, K, turn):
    """The turn-th tile of this CTA, as group w sees it. It stays known until the group arrives at `tile_empty`."""
    tiles = K.memory.tiles
    slot = turn % K.C.slots
    mbarrier.wait(K.memory.tile_full.index(slot), (turn // K.C.slots) & 1)
    begin = get(tiles, slot, BEGIN)
    end = get(tiles, slot, END)
    full_begin = get(tiles, slot, FULL_BEGIN)
    full_end = get(tiles, slot, FULL_END)
    lead = first_block(begin, end, full_begin, full_end, K.lengths, K.score)
    go = get(tiles, slot, GO)
    FROM_FIRST: gl.constexpr = K.lengths.left is None and K.score.slopes is None and not K.score.BY_PAIR
    own_begin = begin
    own_end = end
    left = None  # stays None only where nothing has a left side: what decides it has to be known to the compiler
    masked = None
    places = None
    slope = None
    documents = None
    sequence = None
    n_q, n_kv, _start = lengths_of(slot, K.lengths, K.memory)
    if K.MASKED or K.score.PLACED:
        p = get(tiles, slot, P) + row_of_group(w, K.C)
        if K.MASKED:
            key_begin, key_end = kv_range(p, p + ROWS - 1, n_kv, K.lengths.left, K.lengths.right, K.lengths.prefix)
            # No more than half a ring is passed over: its blocks of V wait for the product before them.
            most: gl.constexpr = K.C.num_stages // 2
            own_end = gl.minimum(gl.maximum(gl.maximum((key_end + K.C.tile_kv - 1) // K.C.tile_kv, lead + 1), end - most), end)
            if not FROM_FIRST:
                own_begin = gl.maximum(gl.minimum(gl.minimum(key_begin // K.C.tile_kv, lead), begin + most), begin)
        masked = (p, full_end, go * (end - own_end))
    if not FROM_FIRST:
        left = (own_begin, lead, full_begin, go * (own_begin - begin))
    if K.score.PLACED:
        batch = get(tiles, slot, BATCH)
        head = head_of_group(w, get(tiles, slot, HEAD), K.C)
        places = (batch, head)
        if K.score.slopes is not None:
            slope = slope_of(batch, head, K.score)
        if K.score.document_q is not None:
            rows = p - (n_kv - n_q) + gl.arange(0, ROWS, rows_of(K.C.tile_kv))
            documents = documents_of_rows(batch, rows, n_q, K.score)
    if K.lengths.VARY:
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
def position_and_note_of(w: gl.constexpr, slot, K):
    """The position of the first of group w's rows of the tile in `slot` among the keys, and where their note is."""
    tiles = K.memory.tiles
    return get(tiles, slot, P) + row_of_group(w, K.C), get(tiles, slot, NOTE) + note_of_group(w, K)


@gluon.jit
def place_of(w: gl.constexpr, slot, K):
    """Where group w's rows of the tile in `slot` are: (batch, head, row, n_q, n_kv, first row among the packed)."""
    tiles = K.memory.tiles
    n_q, n_kv, start_q = lengths_of(slot, K.lengths, K.memory)
    head = get(tiles, slot, HEAD)
    row = row_of_head(w, get(tiles, slot, ROW), head, K)
    return get(tiles, slot, BATCH), head_of_group(w, head, K.C), row, n_q, n_kv, start_q
