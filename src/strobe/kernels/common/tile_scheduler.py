"""Work: the tiles of an attention, and which of them a CTA takes at its turn."""

from strobe.kernels.common.documents import SPAN
from strobe.kernels.common.gluon_masks import kv_full, kv_range
from strobe.kernels.gluon import aggregate, gl, gluon


@aggregate
class Lengths:
    """Numbers of queries and keys, the same for every sequence, or (`cu_q`, `cu_kv`) the most that a sequence has, with
    pointers to the first rows of packed sequences and (`total_q`, `total_kv`) the rows of all together; the bounds of
    `strobe.masks`, None where the mask has none; pointers to how many queries and keys of each sequence are used, None where
    all are; a pointer to the spans of what each 64 rows (or, where a CTA takes keys, each 64 keys) may see of the other by
    their documents, [batch, spans, 3]. VARY: whether sequences differ."""

    n_q: gl.tensor
    n_kv: gl.tensor
    cu_q: (gl.tensor, gl.constexpr)
    cu_kv: (gl.tensor, gl.constexpr)
    left: (gl.tensor, gl.constexpr)
    right: (gl.tensor, gl.constexpr)
    prefix: (gl.tensor, gl.constexpr)
    used_q: (gl.tensor, gl.constexpr)
    used_kv: (gl.tensor, gl.constexpr)
    spans: (gl.tensor, gl.constexpr)
    total_q: (gl.tensor, gl.constexpr)
    total_kv: (gl.tensor, gl.constexpr)
    VARY: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, n_q, n_kv, cu_q, cu_kv, left, right, prefix, used_q=None, used_kv=None, spans=None, total_q=None,
                 total_kv=None):  # fmt: skip
        self.n_q = n_q
        self.n_kv = n_kv
        self.cu_q = gl.constexpr(None) if cu_q is None else cu_q
        self.cu_kv = gl.constexpr(None) if cu_kv is None else cu_kv
        self.left = gl.constexpr(None) if left is None else left
        self.right = gl.constexpr(None) if right is None else right
        self.prefix = gl.constexpr(None) if prefix is None else prefix
        self.used_q = gl.constexpr(None) if used_q is None else used_q
        self.used_kv = gl.constexpr(None) if used_kv is None else used_kv
        self.spans = gl.constexpr(None) if spans is None else spans
        self.total_q = gl.constexpr(None) if total_q is None else total_q
        self.total_kv = gl.constexpr(None) if total_kv is None else total_kv
        self.VARY = gl.constexpr(any(x is not None for x in (cu_q, used_q, used_kv)))


@aggregate
class Heads:
    """heads: of queries, in all tiles of one batch entry (those that share a tile count as one, here and in a `Work`); group:
    query heads a key head; at_once: heads whose tiles come together, in a bundle, so that their K and V stay in the L2 cache;
    rest: the head from which on all are one bundle, a multiple of at_once; tiles: of the whole problem."""

    heads: gl.tensor
    group: gl.tensor
    at_once: gl.tensor
    rest: gl.tensor
    tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(self, heads, group, at_once, rest, tiles):
        self.heads = heads
        self.group = group
        self.at_once = at_once
        self.rest = rest
        self.tiles = tiles


@aggregate
class Work:
    """One tile of queries of one head: its place, and the key blocks [begin, end) that it sees, [full_begin, full_end)
    without a mask. Its sequence has n_q queries from row `start_q` on, n_kv keys from `start_kv` on (0 if not packed)."""

    batch: gl.tensor
    head: gl.tensor
    split: gl.tensor
    row: gl.tensor
    n_q: gl.tensor
    n_kv: gl.tensor
    start_q: (gl.tensor, gl.constexpr)
    start_kv: (gl.tensor, gl.constexpr)
    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, split, row, n_q, n_kv, start_q, start_kv, begin, full_begin, full_end, end):
        self.batch = batch
        self.head = head
        self.split = split
        self.row = row
        self.n_q = n_q
        self.n_kv = n_kv
        self.start_q = start_q
        self.start_kv = start_kv
        self.begin = begin
        self.full_begin = full_begin
        self.full_end = full_end
        self.end = end

    @gluon.jit
    def blocks(self):
        """How many blocks of keys: 0 for a tile beyond the end of its packed sequence, else 1 or more."""
        return self.end - self.begin


@gluon.jit
def sequence(cu_seqlens, used, batch, n, total):
    """First row and (used) length of one sequence. Whatever the tensors hold, they lie within the `total` rows that there are,
    and the length is at most n, by which grids, notes and workspaces are sized."""
    start = gl.constexpr(0)
    if cu_seqlens is not None:
        start = within(gl.load(cu_seqlens + batch), total)
        n = within(within(gl.load(cu_seqlens + batch + 1), total) - start, n)
    if used is not None:
        n = within(gl.load(used + batch), n)
    return start, n


@gluon.jit
def within(x, most):
    """x from 0 to `most`, in 32 bits. (Clamped first: cut to 32 bits, 2^32 + 5 would be 5.)"""
    return gl.minimum(gl.maximum(x, 0), most).to(gl.int32)


@gluon.jit
def within_spans(begin, end, first, batch, n, lengths, TILE: gl.constexpr, BLOCK: gl.constexpr):
    """What is left of the blocks [begin, end), at least one of them, when only documents are looked at that those of a tile, of
    the n rows (or keys) of a sequence from `first` on, may see; and [begin, end) of what all of the tile see by documents, in
    keys (or rows)."""
    spans = (n + SPAN - 1) // SPAN
    least = end * BLOCK
    most = begin * 0
    full_begin = begin * 0
    full_end = end * BLOCK
    for i in gl.static_range(TILE // SPAN):
        at = lengths.spans + (batch * spans + gl.minimum(first // SPAN + i, spans - 1)) * 3
        span_begin = gl.load(at)
        span_end = gl.load(at + 1)
        least = gl.minimum(least, span_begin)
        most = gl.maximum(most, span_end)
        full_begin = gl.maximum(full_begin, span_begin)
        full_end = gl.minimum(full_end, gl.where(gl.load(at + 2) != 0, span_end, 0))
    least = gl.maximum(gl.minimum(least // BLOCK, end - 1), begin)
    return least, gl.minimum(gl.maximum((most + BLOCK - 1) // BLOCK, least + 1), end), full_begin, full_end


@gluon.jit
def locate(tile, lengths, heads, C: gl.constexpr, EMPTY: gl.constexpr = False):
    """The Work of the tile-th tile. One that sees no key has no blocks if EMPTY, else one, all masked. Under a causal mask
    those with the most keys come first, so that short ones fill the end, within bundles of heads whose K and V fit the L2
    cache together."""
    split = tile % C.splits
    tile = tile // C.splits
    tiles = (lengths.n_q + C.tile_q - 1) // C.tile_q
    bundle = gl.minimum(tile // (heads.at_once * tiles) * heads.at_once, heads.rest)  # the first of its heads
    width = gl.where(bundle < heads.rest, heads.at_once, heads.tiles // (tiles * C.splits) - bundle)
    within = tile - bundle * tiles
    row = (tiles - 1 - within // width) * C.tile_q
    batch_head = bundle + within % width
    batch = batch_head // heads.heads

    start_q, n_q = sequence(lengths.cu_q, lengths.used_q, batch, lengths.n_q, lengths.total_q)
    start_kv, n_kv = sequence(lengths.cu_kv, lengths.used_kv, batch, lengths.n_kv, lengths.total_kv)
    return of_place(batch, batch_head % heads.heads, split, row, start_q, n_q, start_kv, n_kv, lengths, C, EMPTY)


@gluon.jit
def of_place(batch, head, split, row, start_q, n_q, start_kv, n_kv, lengths, C: gl.constexpr, EMPTY: gl.constexpr = False):
    """The Work of the tile of a sequence that begins at a row."""
    shift = n_kv - n_q
    first, last = row + shift, gl.minimum(row + C.tile_q, n_q) - 1 + shift
    key_begin, key_end = kv_range(first, last, n_kv, lengths.left, lengths.right, lengths.prefix)
    begin = key_begin // C.tile_kv
    end = (key_end + C.tile_kv - 1) // C.tile_kv
    end = gl.maximum(end, begin if EMPTY else begin + 1)
    key_begin, key_end = kv_full(first, last, n_kv, lengths.left, lengths.right, lengths.prefix)
    if lengths.spans is not None:
        begin, end, span_begin, span_end = within_spans(begin, end, row, batch, lengths.n_q, lengths, C.tile_q, C.tile_kv)
        key_begin = gl.maximum(key_begin, span_begin)
        key_end = gl.minimum(key_end, span_end)
    if C.splits > 1:  # as even as can be; a split that gets no block masks one
        share = (end - begin + C.splits - 1) // C.splits
        begin = begin + split * share
        end = gl.maximum(gl.minimum(begin + share, end), begin + 1)
    if lengths.VARY:
        end = gl.where(row < n_q, end, begin)
    full_end = gl.minimum(gl.maximum(key_end // C.tile_kv, begin), end)
    full_begin = gl.minimum((key_begin + C.tile_kv - 1) // C.tile_kv, full_end)
    return Work(batch, head, split, row, n_q, n_kv, start_q, start_kv, begin, full_begin, full_end, end)
