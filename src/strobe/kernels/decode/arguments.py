"""What a decode kernel is given, and what its roles tell each other: aggregates, and the names of its numbers."""

from strobe.kernels.decode.schedule import Requests
from strobe.kernels.gluon import aggregate, gl, gluon, tensor_descriptor


@aggregate
class Cached:
    """Where keys and values are: pointers to k, v (or descriptors for TMA) and, or None, to the page table; their strides, and
    the number of pages. PAGE: keys of a page, or 0."""

    k: (gl.tensor, tensor_descriptor)
    v: (gl.tensor, tensor_descriptor)
    table: (gl.tensor, gl.constexpr)
    k_page: gl.tensor
    k_row: gl.tensor
    k_head: gl.tensor
    v_page: gl.tensor
    v_row: gl.tensor
    v_head: gl.tensor
    table_row: gl.tensor
    pages: gl.tensor
    PAGE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v, table, k_page, k_row, k_head, v_page, v_row, v_head, table_row, pages, PAGE):
        self.k, self.v = k, v
        self.table = gl.constexpr(None) if table is None else table
        self.k_page, self.k_row, self.k_head = k_page, k_row, k_head
        self.v_page, self.v_row, self.v_head = v_page, v_row, v_head
        self.table_row = table_row
        self.pages = pages
        self.PAGE = gl.constexpr(PAGE)


@aggregate
class Terms:
    """What changes scores, or None: pointers to a tree mask, slopes, sinks, scales of K and of V, each with its strides; the
    scale, a softcap and the bounds of a band. BY_ROW: whether the rows of a tile see different keys. BY_TOKEN: whether K and V
    have a scale for each key."""

    tree: (gl.tensor, gl.constexpr)
    tree_batch: gl.tensor
    tree_row: gl.tensor
    tree_column: gl.tensor
    alibi: (gl.tensor, gl.constexpr)
    alibi_batch: gl.tensor
    sinks: (gl.tensor, gl.constexpr)
    k_scale: (gl.tensor, gl.constexpr)
    v_scale: (gl.tensor, gl.constexpr)
    k_scale_page: gl.tensor
    k_scale_row: gl.tensor
    v_scale_page: gl.tensor
    v_scale_row: gl.tensor
    scale: gl.tensor
    softcap: (gl.tensor, gl.constexpr)
    left: (gl.tensor, gl.constexpr)
    right: (gl.tensor, gl.constexpr)
    BY_ROW: gl.constexpr
    K_BY_TOKEN: gl.constexpr
    V_BY_TOKEN: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tree, tree_batch, tree_row, tree_column, alibi, alibi_batch, sinks, k_scale, v_scale, k_scale_page,
                 k_scale_row, v_scale_page, v_scale_row, scale, softcap, left, right, BY_ROW, K_BY_TOKEN,
                 V_BY_TOKEN):  # fmt: skip
        nothing = gl.constexpr(None)
        self.tree = nothing if tree is None else tree
        self.tree_batch, self.tree_row, self.tree_column = tree_batch, tree_row, tree_column
        self.alibi = nothing if alibi is None else alibi
        self.alibi_batch = alibi_batch
        self.sinks = nothing if sinks is None else sinks
        self.k_scale = nothing if k_scale is None else k_scale
        self.v_scale = nothing if v_scale is None else v_scale
        self.k_scale_page, self.k_scale_row = k_scale_page, k_scale_row
        self.v_scale_page, self.v_scale_row = v_scale_page, v_scale_row
        self.scale = scale
        self.softcap = nothing if softcap is None else softcap
        self.left = nothing if left is None else left
        self.right = nothing if right is None else right
        self.BY_ROW = gl.constexpr(BY_ROW)
        self.K_BY_TOKEN = gl.constexpr(K_BY_TOKEN)
        self.V_BY_TOKEN = gl.constexpr(V_BY_TOKEN)


@aggregate
class Outputs:
    """q, out and lse (or None) with their strides of a batch entry, a row and a head; parts float32 [places, rows, dim_v], sums
    float32 [places, 2, rows]; arrivals int32 [2 * batch * key heads * tiles], 0 between launches (see `merge_together`)."""

    q: gl.tensor
    q_batch: gl.tensor
    q_row: gl.tensor
    q_head: gl.tensor
    out: gl.tensor
    out_batch: gl.tensor
    out_row: gl.tensor
    out_head: gl.tensor
    lse: (gl.tensor, gl.constexpr)
    lse_batch: gl.tensor
    lse_head: gl.tensor
    parts: gl.tensor
    sums: gl.tensor
    arrivals: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, q_batch, q_row, q_head, out, out_batch, out_row, out_head, lse, lse_batch, lse_head, parts, sums,
                 arrivals):  # fmt: skip
        self.q, self.q_batch, self.q_row, self.q_head = q, q_batch, q_row, q_head
        self.out, self.out_batch, self.out_row, self.out_head = out, out_batch, out_row, out_head
        self.lse = gl.constexpr(None) if lse is None else lse
        self.lse_batch, self.lse_head = lse_batch, lse_head
        self.parts, self.sums, self.arrivals = parts, sums, arrivals


@aggregate
class Piece:
    """A part of a job's keys: its request, the entry of the cache, its key head, its first row (of all that share the head);
    the request's first query, its number of queries and its length; the keys [begin, end) of the piece."""

    batch: gl.tensor
    entry: gl.tensor
    head: gl.tensor
    first_row: gl.tensor
    first_query: gl.tensor
    queries: gl.tensor
    length: gl.tensor
    begin: gl.tensor
    end: gl.tensor


@aggregate
class Chain:
    """What a piece knows of its job's splits (see `splits`). begins: whether the job begins with it; settled: the first key
    from which on it has the beginning of each chain; line: what has to be added to the number of a split to get its place in
    the line of the schedule; job_begin: the job's first split; begin, end: those that its tile sees."""

    begins: gl.tensor
    settled: gl.tensor
    line: gl.tensor
    job_begin: gl.tensor
    begin: gl.tensor
    end: gl.tensor


@aggregate
class Job:
    """What a piece is a part of: its number among all jobs, how many parts it has, the CTA (or split) of the first one, where
    its units begin in the line, the stretch of a CTA; where this part's result goes, and how often its CTA may look whether
    the others are there. chain: see there, or None."""

    number: gl.tensor
    parts: gl.tensor
    first: gl.tensor
    begins: gl.tensor
    stretch: gl.tensor
    place: gl.tensor
    patience: gl.tensor
    chain: (Chain, gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, number, parts, first, begins, stretch, place, patience, chain=None):
        self.number, self.parts, self.first = number, parts, first
        self.begins, self.stretch = begins, stretch
        self.place, self.patience = place, patience
        self.chain = gl.constexpr(None) if chain is None else chain


@aggregate
class Kernel:
    """What all roles of a kernel take. heads_kv, tiles: key heads, and tiles of the rows of one in the longest request. GROUP:
    query heads of a key head. DIM, DIM_V: columns of K and V. ROWS: rows of a result that may be in use."""

    requests: Requests
    outputs: Outputs
    terms: Terms
    cached: Cached
    heads_kv: gl.tensor
    tiles: gl.tensor
    C: gl.constexpr
    GROUP: gl.constexpr
    DIM: gl.constexpr
    DIM_V: gl.constexpr
    ROWS: gl.constexpr


NUMBERS = (
    "q_batch", "q_row", "q_head", "k_page", "k_row", "k_head", "v_page", "v_row", "v_head", "out_batch", "out_row", "out_head",
    "lse_batch", "lse_head", "table_row", "tree_batch", "tree_row", "tree_column", "alibi_batch", "k_scale_page",
    "k_scale_row", "v_scale_page", "v_scale_row", "batch", "heads_kv", "n_q",
    "capacity", "total_q", "pages", "tiles",
)  # fmt: skip
"""Arguments for whose values nothing is compiled anew."""
