"""Which keys a step has, where they lie, and how they are copied by cp.async; queries."""

from triton.experimental.gluon.language.nvidia.ampere import async_copy

from strobe.kernels.decode.layouts import along, copy_layout, first_keys_in, keys_in, keys_of_warp
from strobe.kernels.gluon import cp_async, gl, gluon

MMA_ROWS = gl.constexpr(16)
"""Rows of a product of mma.sync."""


@gluon.constexpr_function
def of_8_bits(C):
    """Whether keys of 8 bits are walked along by `eight_bits`."""
    # e4m3, pages of 64, microseconds, and with K unpacked two by two (16 rows: loaded one by one) and all else as `forward`:
    #   an H100, 4 queries of 64 heads on 8: 32 requests of 8k keys 201 (205), 128 of 8k 782 (806), 8 of 8k 61.0 (63.6)
    #            1 query of 16 on 2: 32 of 8k 55.0 (56.0), 8 of 32k 55.9 (57.0); 64 on 8: 32 of 8k 193 (195)
    #   an H200, not this very code: scores scaled as the maximum is subtracted; 4 queries 151 (177), 603 (708), 46.6 (51.2);
    #            1 query, beyond a piece nothing copied: 16 on 2 40.2 (40.9), 8 of 8k 16.0 (17.9), 32 of 32k 139.1 (138.8);
    #            64 on 8 135.2 (134.5), and with `forward`'s masks and slots 134.5 (132.5), 32 of 32k 513 (507)
    return C.kv_bytes == 1 and holds_queries(C) and (C.head_dim_v <= 128 or C.warps * C.ctas <= 8)


@gluon.constexpr_function
def holds_queries(C):
    """Whether registers hold the rows of Q that a warp has, by mma.sync, beside O."""
    return C.head_dim <= 128 or (C.head_dim <= 256 and C.warps * C.ctas <= 8)


@gluon.constexpr_function
def on_one_page(C, PAGE):
    """Whether the keys that a warp has in a step are on one page, which is looked up once for all of them."""
    return PAGE > 0 and PAGE % keys_of_warp(C) == 0


@gluon.constexpr_function
def on_few_pages(C, PAGE):
    """Whether the keys that a warp has in a step are on two to four whole pages."""
    return PAGE > 0 and keys_of_warp(C) % PAGE == 0 and keys_of_warp(C) // PAGE in (2, 4)


@gluon.jit
def look_up(cached, piece, first, C: gl.constexpr, layout: gl.constexpr, AT_ONCE: gl.constexpr = False):
    """The pages of a step's keys from key `first` on, -1 for those that are none: [token_warps, keys of a warp or, on one page,
    1]; 0 for a contiguous cache. AT_ONCE: asked for here, and not where the compiler thinks them needed."""
    if cached.PAGE == 0:
        return piece.begin * 0
    elif on_few_pages(C, cached.PAGE):
        return look_up_few(cached, piece, first, C, layout, AT_ONCE)
    else:
        if on_one_page(C, cached.PAGE):
            keys = first + first_keys_in(C, layout)
            there = (keys + keys_of_warp(C) > piece.begin) & (keys < piece.end)
        else:
            keys = first + keys_in(C, layout)
            there = (keys >= piece.begin) & (keys < piece.end)
        row = cached.table + piece.batch.to(gl.int64) * cached.table_row
        return gl.load(row + keys // cached.PAGE, mask=there, other=-1, volatile=AT_ONCE)


@gluon.jit
def look_up_few(cached, piece, first, C: gl.constexpr, layout: gl.constexpr, AT_ONCE: gl.constexpr):
    """What `look_up` gives where the keys that a warp has in a step are on a few whole pages: each is looked up once."""
    PAGE: gl.constexpr = cached.PAGE
    row = cached.table + piece.batch.to(gl.int64) * cached.table_row
    own = gl.expand_dims(gl.arange(0, keys_of_warp(C), gl.SliceLayout(0, layout)), 0)
    pages = own * 0 - 1
    for n in gl.static_range(keys_of_warp(C) // PAGE):
        keys = first + n * PAGE + first_keys_in(C, layout)
        there = (keys + PAGE > piece.begin) & (keys < piece.end)
        page = gl.load(row + keys // PAGE, mask=there, other=-1, volatile=AT_ONCE)
        pages = gl.where(own // PAGE == n, page, pages)
    return pages


@gluon.jit
def is_page(cached, pages):
    """Whether pages are there."""
    return (pages >= 0) & (pages < cached.pages)


@gluon.jit
def is_key(cached, piece, first, pages, C: gl.constexpr, layout: gl.constexpr):
    """Whether a step's keys from key `first` on belong to a piece and are there."""
    keys = first + keys_in(C, layout)
    if of_8_bits(C):  # one comparison, of numbers without a sign
        count = gl.maximum(piece.end - piece.begin, 0)
        if cached.PAGE:
            count = gl.where(is_page(cached, pages), count, 0)
        return (keys - piece.begin).to(gl.uint32) < count.to(gl.uint32)
    else:
        inside = (keys >= piece.begin) & (keys < piece.end)
        if cached.PAGE:
            inside = inside & is_page(cached, pages)
        return inside


@gluon.jit
def rows_at(cached, first, pages, entry, page_stride, row_stride, C: gl.constexpr, layout: gl.constexpr):
    """The offsets in the cache of a step's keys (or values) from key `first` on."""
    if cached.PAGE == 0:
        return entry.to(gl.int64) * page_stride + (first + keys_in(C, layout)).to(gl.int64) * row_stride
    else:
        row = rows_of_pages(first, cached.PAGE, C, layout)
        return pages.to(gl.int64) * page_stride + row.to(gl.int64) * row_stride


@gluon.jit
def rows_of_pages(first, PAGE: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Which rows of their pages a step's keys from key `first` on are."""
    if on_one_page(C, PAGE):
        beyond = gl.expand_dims(gl.arange(0, keys_of_warp(C), gl.SliceLayout(0, layout)), 0)
        return (first + first_keys_in(C, layout)) % PAGE + beyond
    else:
        return (first + keys_in(C, layout)) % PAGE


@gluon.jit
def same_or_looked_up(cached, piece, pages, first, C: gl.constexpr, layout: gl.constexpr):
    """The pages of a step as V is copied: those as K is copied, if both have the same layout."""
    if C.head_dim == C.head_dim_v:
        return pages
    else:
        return look_up(cached, piece, first, C, layout)


@gluon.jit
def wide(a, b):
    """The product, in 64 bits, of numbers that are not negative: one instruction, as those without a sign have one, and no
    register for the sign of an argument, which would be kept, or spilled, from a kernel's begin."""
    if b.dtype == gl.int32:
        return a.to(gl.uint32).to(gl.int64) * b.to(gl.uint32).to(gl.int64)
    else:
        return a.to(gl.int64) * b


@gluon.jit
def copy_step(buffer, base, cached, piece, first, pages, page_stride, row_stride, layout: gl.constexpr, COLUMNS: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """Start copying a step's keys (or values) from key `first` on into a buffer, zeros where there is no key, and beyond
    COLUMNS. Where there is no key the address is that of another row: none lies outside of the cache, though it would not be
    read. What the rows of a page share is computed once."""
    KEYS: gl.constexpr = gl.SliceLayout(2, layout)
    columns = along(buffer.shape[2], 2, layout)
    inside = is_key(cached, piece, first, pages, C, KEYS)
    if cached.PAGE == 0:
        pages, rows = piece.entry, gl.where(inside, first + keys_in(C, KEYS), 0)
        at = base + wide(gl.where(is_page(cached, pages), pages, 0), page_stride) + columns
    else:
        rows = rows_of_pages(first, cached.PAGE, C, KEYS)
        at = base + gl.expand_dims(wide(gl.where(is_page(cached, pages), pages, 0), page_stride), 2) + columns
    width: gl.constexpr = layout.size_per_thread[2]
    mask = gl.max_constancy(gl.expand_dims(inside, 2) & (columns < COLUMNS), [1, 1, width])
    if cached.PAGE != 1:  # or 0 would be added, which folds, and with it what is said of the sum
        at += gl.expand_dims(wide(rows, row_stride), 2)
    cp_async(buffer, gl.multiple_of(at, [1, 1, 16]), mask=mask)  # bytes


@gluon.jit
def is_copied(first, piece, C: gl.constexpr):
    """Whether a step from key `first` on is copied. Where many rows keep the tensor cores busy, or keys have 8 bits, even if
    it lies beyond the piece, as zeros: a branch in the loop would keep copies and products apart."""
    if C.rows > MMA_ROWS or of_8_bits(C):
        return gl.to_tensor(True)
    else:
        return first < piece.end


@gluon.jit
def copy_keys(rings, slot, cached, piece, first, pages, layout: gl.constexpr, C: gl.constexpr, DIM: gl.constexpr,
              AT_ONCE: gl.constexpr = False):  # fmt: skip
    """Start copying a step of K from key `first` on, in one group, which is empty beyond the piece. AT_ONCE: with zeros there,
    as it is not known yet where the piece ends."""
    if AT_ONCE or is_copied(first, piece, C):
        base = cached.k + piece.head.to(gl.int64) * cached.k_head
        copy_step(rings[0].index(slot), base, cached, piece, first, pages, cached.k_page, cached.k_row, layout,
                  min(DIM, C.head_dim), C)  # fmt: skip
        if C.narrow > 0:
            N: gl.constexpr = copy_layout(C, C.narrow, 16 // C.kv_bytes)
            S: gl.constexpr = gl.SliceLayout(2, N)
            own_pages = pages
            if cached.PAGE:
                own_pages = gl.convert_layout(pages, S)
            copy_step(rings[2].index(slot), base + C.head_dim, cached, piece, first, own_pages, cached.k_page, cached.k_row, N,
                      DIM - C.head_dim, C)  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def copy_values(rings, slot, cached, piece, first, pages, layout: gl.constexpr, C: gl.constexpr, DIM_V: gl.constexpr):
    """Start copying a step of V from value `first` on, in one group; nothing where V is columns of K."""
    if C.narrow == 0:
        if is_copied(first, piece, C):
            base = cached.v + piece.head.to(gl.int64) * cached.v_head
            copy_step(rings[1].index(slot), base, cached, piece, first, pages, cached.v_page, cached.v_row, layout, DIM_V, C)
        async_copy.commit_group()


@gluon.jit
def owners_of(row, piece, C: gl.constexpr, GROUP: gl.constexpr):
    """The query and the head whose rows of a request these are, and whether they are there. The last of the GROUP rows of a
    query may be absent: they stand for no head."""
    query, head, there = row // GROUP, piece.head * (GROUP - C.absent) + row % GROUP, row < piece.queries * GROUP
    if C.absent > 0:
        there = there & (row % GROUP < GROUP - C.absent)
    return query, head, there


@gluon.jit
def load_queries(outputs, piece, FIRST: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr, C: gl.constexpr,
                 GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr = 2):  # fmt: skip
    """COLUMNS of Q from FIRST on as the first operand of a product, the same for all warps that share its rows; zeros beyond
    the last row. WIDTH: elements that are loaded together."""
    row = piece.first_row + along(C.rows, 1, layout) + 0 * along(C.token_warps, 0, layout)
    column = FIRST + along(COLUMNS, 2, layout)
    query, head, there = owners_of(row, piece, C, GROUP)
    at = outputs.q + piece.batch.to(gl.int64) * outputs.q_batch
    at += (piece.first_query + query).to(gl.int64) * outputs.q_row + head.to(gl.int64) * outputs.q_head
    mask = gl.max_constancy(there & (column < DIM), [1, 1, WIDTH])
    return gl.load(gl.multiple_of(at + column, [1, 1, 2 * WIDTH]), mask=mask, other=0.0)  # bytes


@gluon.jit
def as_half(q):
    """Q in float16, each row (of the last dim) divided by a power of two that makes its largest number about 1024, and these
    powers. (float8 becomes float16 in one instruction for two numbers, bfloat16 in several for each.)"""
    power = power_of(gl.expand_dims(largest(q), len(q.shape) - 1))
    return (q.to(gl.float32) * (1.0 / power)).to(gl.float16), power


@gluon.jit
def largest(q):
    """The largest number, without its sign, of each row of Q."""
    return gl.max(gl.abs(q.to(gl.float32)), len(q.shape) - 1)


@gluon.jit
def power_of(largest):
    """The powers of two by which rows of such numbers are divided."""
    return gl.exp2(gl.ceil(gl.log2(gl.maximum(largest, 1e-30))) - 10.0)
