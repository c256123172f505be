"""Tiles in shared memory: who copies them in (cp.async), and how products read them (ldmatrix)."""

from strobe.kernels.gluon import aggregate, cp_async, gl, gluon
from strobe.kernels.sm80.layouts import in_rows, swizzled, unit_of


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


@gluon.constexpr_function
def number_of(C, of_v):
    """How many chunks Q and K have, or (`of_v`) V and O. (Triton 3.6 hands no tuple from function to function.)"""
    return len(C.chunks_v if of_v else C.chunks)


@gluon.constexpr_function
def columns_of(C, of_v, c):
    """Columns of a chunk."""
    return (C.chunks_v if of_v else C.chunks)[c]


@gluon.constexpr_function
def first_of(C, of_v, c):
    """The first column of a chunk."""
    return (C.firsts_v if of_v else C.firsts)[c]


@gluon.jit
def allocate(dtype: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, C: gl.constexpr, OF_V: gl.constexpr):
    """[rows, columns] of shared memory for each chunk, swizzled, of each stage (see `at`). Stages do not lie in one buffer: of
    a buffer the compiler does not know which stage is copied and which is read, and puts a barrier between."""
    chunks = ()
    for _ in gl.static_range(stages):
        for c in gl.static_range(number_of(C, OF_V)):
            chunks += (
                gl.allocate_shared_memory(dtype, [rows, columns_of(C, OF_V, c)], swizzled(columns_of(C, OF_V, c), dtype)),
            )
    return chunks


@gluon.jit
def zeros(rows: gl.constexpr, C: gl.constexpr, OF_V: gl.constexpr, LAYOUT: gl.constexpr):
    """[rows, columns] of zeros for each chunk, to add products to."""
    acc = ()
    for c in gl.static_range(number_of(C, OF_V)):
        acc += (gl.full([rows, columns_of(C, OF_V, c)], 0.0, gl.float32, LAYOUT),)
    return acc


@gluon.jit
def at(chunks, STAGE: gl.constexpr, STAGES: gl.constexpr):
    """The chunks of one of some stages."""
    NUMBER: gl.constexpr = len(chunks) // STAGES
    chosen = ()
    for c in gl.static_range(NUMBER):
        chosen += (chunks[STAGE * NUMBER + c],)
    return chosen


@gluon.jit
def copy_tile(chunks, matrix, base, first, n, C: gl.constexpr, OF_V: gl.constexpr, DIM: gl.constexpr, CUT: gl.constexpr):
    """Start to copy the rows from `first` on into chunks [rows, columns]: zeros from row n and column DIM on. base: of
    `Matrix.rows_of`. OF_V: see `number_of`. CUT: whether there may be fewer rows left than a chunk has."""
    if CUT:
        if first + chunks[0].shape[0] <= n:
            copy_rows(chunks, matrix, base, first, n, C, OF_V, DIM, False)
        else:
            copy_rows(chunks, matrix, base, first, n, C, OF_V, DIM, True)
    else:
        copy_rows(chunks, matrix, base, first, n, C, OF_V, DIM, False)


@gluon.jit
def copy_rows(chunks, matrix, base, first, n, C: gl.constexpr, OF_V: gl.constexpr, DIM: gl.constexpr, CUT: gl.constexpr):
    """Start the copies of `copy_tile`."""
    corner = base + first.to(gl.int64) * matrix.row
    for c in gl.static_range(len(chunks)):
        copy_chunk(chunks[c], corner, matrix.row, n - first, first_of(C, OF_V, c), DIM, C.warps, CUT)


@gluon.jit
def copy_chunk(chunk, corner, stride, left, FIRST: gl.constexpr, DIM: gl.constexpr, WARPS: gl.constexpr, CUT: gl.constexpr):
    """Start to copy `left` rows' columns from FIRST on, 16 bytes a thread at a time. corner: a pointer to the first row."""
    ROWS: gl.constexpr = chunk.shape[0]
    COLUMNS: gl.constexpr = chunk.shape[1]
    LAYOUT: gl.constexpr = in_rows(COLUMNS, WARPS, chunk.dtype)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    pointers = gl.multiple_of(corner + (row.to(gl.int64) * stride)[:, None] + column[None, :], [1, 16])  # bytes
    if CUT or DIM < FIRST + COLUMNS:
        inside = (column < DIM)[None, :] & (row >= 0)[:, None]
        if CUT:
            inside = inside & (row < left)[:, None]
        # A lane's 16 bytes are inside or outside together, as head dims are multiples of 8.
        cp_async(chunk, pointers, mask=gl.max_constancy(inside, [1, unit_of(chunk.dtype)]))
    else:
        cp_async(chunk, pointers)
