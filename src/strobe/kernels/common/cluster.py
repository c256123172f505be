"""CTAs of a cluster give each other what they found, by way of their shared memory, without a word through global memory.

They are programs of their own, neighbours, which run at the same time since the launch asks for it (see `Call.cluster`). Each
writes the shares of what it found to the CTAs whose they are, in one of two ways:

    it posts them     (st.async), and waits until an mbarrier has counted the bytes of its own share of all: a number is under
                      way once, and nobody waits for a fence
    it stores them    and all meet at a barrier of the cluster: slower, but CTAs that end together leave room together, so that
                      those of the next launch lie further apart

Nobody writes to another one's shared memory before all have begun, or after it has its share. So each may end when it likes.
"""

import math

from strobe.kernels.gluon import gl, gluon


@gluon.jit
def begin_cluster(CTAS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, POSTS: gl.constexpr,
                  SWIZZLED: gl.constexpr = False):  # fmt: skip
    """Tell the CTAs of a cluster that this one has begun and may be written to. All threads do, once, ahead of the kernel's one
    `exchange`, of tensors of so many rows and columns."""
    gl.inline_asm_elementwise(begin_ptx(CTAS, ROWS, COLUMNS, POSTS, SWIZZLED), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_arguments(pointer, a, b, c, d):
    """Read some of a kernel's arguments ahead of its turn, one in every 64 bytes, so that after it the constant cache has
    them. (They are compared with a number, for a wait that nobody notices, or the compiler would not read them.)"""
    gl.inline_asm_elementwise(
        """{
        .reg .pred same;
        .reg .b32 x;
        cvt.u32.u64 x, $1;
        xor.b32 x, x, $2;
        xor.b32 x, x, $3;
        xor.b32 x, x, $4;
        xor.b32 x, x, $5;
        setp.eq.u32 same, x, 0x9e3779b9;
        @same nanosleep.u32 1;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r,r", [pointer.to(gl.int64), a, b, c, d], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def exchange(x, top, total, CTAS: gl.constexpr, POSTS: gl.constexpr):
    """This CTA's share of what each CTA of a cluster has as x, [CTAS, numbers of a share], and, for each number, what it has as
    `top` and `total` of the row.

    x: float32 [rows, columns], of which a thread has four neighbours in rows that are as far apart as there are warps, in
    order. A share is some rows or a part of one: the i-th of CTAS equal parts of x is that of CTA i."""
    EACH: gl.constexpr = numbers_of_thread(x.shape, gl.num_warps())
    top, total = gl.expand_dims(top, 1) + 0.0 * x, gl.expand_dims(total, 1) + 0.0 * x
    x, top, total = gl.inline_asm_elementwise(
        exchange_ptx(x.shape[0], x.shape[1], CTAS, gl.num_warps(), POSTS), operands(EACH), [x, top, total],
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=EACH)  # fmt: skip
    return by_ctas(x, CTAS), by_ctas(top, CTAS), by_ctas(total, CTAS)


@gluon.jit
def by_ctas(x, CTAS: gl.constexpr):
    """Numbers as `exchange_ptx` leaves them in threads, as [CTAS, numbers of a share]."""
    EACH: gl.constexpr = numbers_of_thread(x.shape, gl.num_warps())
    OF_PLACE: gl.constexpr = min(EACH, CTAS)
    x = gl.reshape(x, [EACH // OF_PLACE, OF_PLACE // 4, gl.num_warps(), CTAS // OF_PLACE, 32 * OF_PLACE // CTAS, 4])
    return gl.reshape(gl.permute(x, (3, 1, 5, 0, 2, 4)), [CTAS, 32 * EACH * gl.num_warps() // CTAS])


@gluon.constexpr_function
def numbers_of_thread(shape, warps):
    return math.prod(shape) // (32 * warps)


@gluon.constexpr_function
def operands(each):
    return ",".join(["=&f"] * (3 * each) + ["f"] * (3 * each))


@gluon.constexpr_function
def rows_of_share(rows, ctas):
    """Rows of which a CTA's share has some."""
    return max(1, rows // ctas)


@gluon.constexpr_function
def begin_ptx(ctas, rows, columns, posts, swizzled=False):
    """PTX of `begin_cluster`. Its shared memory is declared for the whole kernel, as `exchange_ptx` names it, too.
    swizzled: wgmma reads the kernel's other shared memory, which lies behind it, and so has to begin at a multiple of 1024
    bytes."""
    numbers, sums = 4 * rows * columns, 8 * ctas * rows_of_share(rows, ctas)
    room = (sums + 1031) // 1024 * 1024 - 8 if swizzled else sums
    expect = f"""
        .reg .pred first;
        .reg .b32 at, lane;
        mov.u32 lane, %tid.x;
        mov.u32 at, all_written;
        setp.eq.u32 first, lane, 0;
        @first mbarrier.init.shared::cta.b64 [at], 1;
        @first fence.mbarrier_init.release.cluster;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], {numbers + sums};"""
    return f"""
        .shared .align 16 .b8 all_numbers[{numbers}];
        .shared .align 16 .b8 all_sums[{room}];
        .shared .align 8 .b64 all_written;
        {{{expect if posts else ""}
        barrier.cluster.arrive.relaxed.aligned;
        mov.b32 $0, 0;
        }}"""


@gluon.constexpr_function
def exchange_ptx(rows, columns, ctas, warps, posts):
    """PTX of `exchange`, for all numbers of a thread at once. It takes those of several CTAs, so that a warp has all that are
    added up: of `together` CTAs, in one or more of `across` neighbouring places of a share."""
    each, share, shared_rows = rows * columns // (32 * warps), rows * columns // ctas, rows_of_share(rows, ctas)
    together = min(each, ctas)
    across = 32 * together // ctas

    def row_of_sums(cta, number):
        """`there`: where the maximum and the sum are of the row of a share's number that a CTA has."""
        lines = ["mov.u32 there, all_sums;", f"mad.lo.u32 there, {cta}, {8 * shared_rows}, there;"]
        return lines + [f"div.u32 at, {number}, {columns};", "mad.lo.u32 there, at, 8, there;"] * (shared_rows > 1)

    write = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes" if posts else "st.shared::cluster"
    told = ", [barrier]" if posts else ""
    lines = [
        ".reg .pred is_first, over;",
        ".reg .b32 rank, lane, warp, at, to, in_share, there, barrier;",
        "mov.u32 rank, %cluster_ctarank;",
        "mov.u32 at, %tid.x;",
        "shr.u32 warp, at, 5;",
        "and.b32 lane, at, 31;",
        "barrier.cluster.wait.acquire.aligned;",
    ]
    for i in range(each // 4):
        numbers = ", ".join(f"${3 * each + 4 * i + j}" for j in range(4))
        lines += [
            "mad.lo.u32 at, warp, 32, lane;",
            f"mad.lo.u32 at, at, 4, {i * warps * columns};",
            f"div.u32 to, at, {share};",
            f"rem.u32 in_share, at, {share};",
            f"mad.lo.u32 at, rank, {share}, in_share;",
            "mov.u32 there, all_numbers;",
            "mad.lo.u32 there, at, 4, there;",
            "mapa.shared::cluster.u32 there, there, to;",
            "mov.u32 barrier, all_written;",
            "mapa.shared::cluster.u32 barrier, barrier, to;",
            f"{write}.v4.f32 [there], {{{numbers}}}{told};",
            *row_of_sums("rank", "in_share"),
            "mapa.shared::cluster.u32 there, there, to;",
            f"rem.u32 in_share, in_share, {columns};" if shared_rows > 1 else "",
            "setp.eq.u32 is_first, in_share, 0;",
            f"@is_first {write}.v2.f32 [there], {{${4 * each + 4 * i}, ${5 * each + 4 * i}}}{told};",
        ]
    if posts:
        lines += [
            "mov.u32 barrier, all_written;",
            "again:",
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [barrier], 0;",
            "@!over bra again;",
        ]
    else:
        lines += ["barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"]
    lines += [
        f"div.u32 to, lane, {across};",
        f"mul.lo.u32 to, to, {together};",
        f"rem.u32 in_share, lane, {across};",
        f"mad.lo.u32 in_share, warp, {across}, in_share;",
    ]
    for place in range(each // together):
        lines += [
            *row_of_sums("to", "in_share"),
            f"mad.lo.u32 at, to, {share}, in_share;",
            "mov.u32 barrier, all_numbers;",
            "mad.lo.u32 at, at, 4, barrier;",
            f"add.u32 in_share, in_share, {across * warps};",
        ]
        for i in range(together):
            number = place * together + i
            lines += [
                f"ld.shared.f32 ${number}, [at + {4 * share * i}];",
                f"ld.shared.v2.f32 {{${each + number}, ${2 * each + number}}}, [there + {8 * shared_rows * i}];",
            ]
    return "\n".join(["{", *filter(None, lines), "}"])
