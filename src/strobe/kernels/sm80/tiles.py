"""Tiles in shared memory: who copies them in (cp.async), and how products read them (ldmatrix)."""

from strobe.kernels.gluon import aggregate, cp_async, gl, gluon
from strobe.kernels.sm80.layouts import in_rows, swizzled


@aggregate
class Matrix:
    """A tensor of rows in global memory: by batch, row and head, strides in elements. Packed sequences have no batch."""

    pointer: gl.tensor
    batch: gl.tensor
    row: gl.tensor
    head: gl.tensor

    @gluon.jit
    def rows_of(self, batch, head, start):
        """A pointer to the rows of one head of a batch entry, or of the sequence that begins at row `start`."""
        at = batch.to(gl.int64) * self.batch + head.to(gl.int64) * self.head
        return self.pointer + at + (gl.to_tensor(0) + start).to(gl.int64) * self.row


@gluon.jit
def allocate(dtype: gl.constexpr, number: gl.constexpr, rows: gl.constexpr, CHUNKS: gl.constexpr):
    """[number, rows, columns] of shared memory for each of CHUNKS, swizzled."""
    chunks = ()
    for c in gl.static_range(len(CHUNKS)):
        chunks += (gl.allocate_shared_memory(dtype, [number, rows, CHUNKS[c]], swizzled(CHUNKS[c])),)
    return chunks


@gluon.jit
def zeros(rows: gl.constexpr, CHUNKS: gl.constexpr, LAYOUT: gl.constexpr):
    """[rows, columns] of zeros for each of CHUNKS, to add products to."""
    acc = ()
    for c in gl.static_range(len(CHUNKS)):
        acc += (gl.full([rows, CHUNKS[c]], 0.0, gl.float32, LAYOUT),)
    return acc


@gluon.jit
def at(chunks, index):
    """The index-th buffer of each chunk."""
    chosen = ()
    for c in gl.static_range(len(chunks)):
        chosen += (chunks[c].index(index),)
    return chosen


@gluon.jit
def copy_tile(chunks, matrix, base, first, n, FIRSTS: gl.constexpr, DIM: gl.constexpr, WARPS: gl.constexpr, CUT: gl.constexpr):
    """Start to copy the rows from `first` on into chunks [rows, columns]: zeros from row n and column DIM on. base: of
    `Matrix.rows_of`. FIRSTS: the first column of each chunk. CUT: whether there may be fewer rows left than a chunk has."""
    if CUT:
        if first + chunks[0].shape[0] <= n:
            copy_rows(chunks, matrix, base, first, n, FIRSTS, DIM, WARPS, False)
        else:
            copy_rows(chunks, matrix, base, first, n, FIRSTS, DIM, WARPS, True)
    else:
        copy_rows(chunks, matrix, base, first, n, FIRSTS, DIM, WARPS, False)


@gluon.jit
def copy_rows(chunks, matrix, base, first, n, FIRSTS: gl.constexpr, DIM: gl.constexpr, WARPS: gl.constexpr, CUT: gl.constexpr):
    """Start the copies of `copy_tile`."""
    corner = base + first.to(gl.int64) * matrix.row
    for c in gl.static_range(len(chunks)):
        copy_chunk(chunks[c], corner, matrix.row, n - first, FIRSTS[c], DIM, WARPS, CUT)


@gluon.jit
def copy_chunk(chunk, corner, stride, left, FIRST: gl.constexpr, DIM: gl.constexpr, WARPS: gl.constexpr, CUT: gl.constexpr):
    """Start to copy `left` rows' columns from FIRST on, 16 bytes a thread at a time. corner: a pointer to the first row."""
    ROWS: gl.constexpr = chunk.shape[0]
    COLUMNS: gl.constexpr = chunk.shape[1]
    LAYOUT: gl.constexpr = in_rows(COLUMNS, WARPS)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    pointers = gl.multiple_of(corner + (row.to(gl.int64) * stride)[:, None] + column[None, :], [1, 16])  # bytes
    if CUT or DIM < FIRST + COLUMNS:
        inside = (column < DIM)[None, :] & (row >= 0)[:, None]
        if CUT:
            inside = inside & (row < left)[:, None]
        # A lane's 16 bytes are inside or outside together, as head dims are multiples of 8.
        cp_async(chunk, pointers, mask=gl.max_constancy(inside, [1, 8]))
    else:
        cp_async(chunk, pointers)
