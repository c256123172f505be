"""The rungs: what each is called, what it needs, why it is there, and which numbers should move.

A rung is a module. It defines `launches(q, k, v, out)`, or `attention(q, k, v)` where it is more than launches. The words about
it stand here, so that the files hold code alone and two rungs differ by what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from strobe.ladder.launch import Launch

HEAD_DIMS = 32, 64, 128
"""Head dims that the rungs are written for; from rung 6 on rows must have 128 bytes or more."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    least, most: compute capabilities that it runs on (10 * major + minor), 0: a CPU, None: no end. multiple, longest: lengths
    must be a multiple of the one, and at most the other. changes: what is done about the bottleneck. bottleneck: what holds
    back the rung below. prediction: what the change should do. moves: which static numbers show it, by the names of `strobe
    ladder show`. nothing: why it may gain nothing. waits: lines whose removal the simulator should notice. variants: (what it
    is, words of the file, other words), each another way to do the same.
    """

    number: int
    name: str
    title: str
    least: int
    multiple: int
    changes: str
    bottleneck: str
    prediction: str
    moves: tuple[str, ...]
    nothing: str
    most: int | None = None
    longest: int | None = None
    waits: tuple[str, ...] = ()
    variants: tuple[tuple[str, str, str], ...] = ()

    @property
    def module(self) -> ModuleType:
        """The rung's module. ImportError where what it needs (numba, Triton) is not installed."""
        return import_module(f"strobe.ladder.{self.name}")

    @property
    def takes_fp32(self) -> bool:
        """Whether it computes in float32 without tensor cores; else it takes float16 and bfloat16."""
        return self.number < 4

    @property
    def simulated_as(self) -> int:
        """The capability that the simulator runs it as; 0 of what it does not run."""
        return 0 if not hasattr(self.module, "launches") else 90 if self.least >= 90 else 80

    def refuses(self, length: int, head_dim: int, dtype: torch.dtype, capability: int) -> str | None:
        """Why it does not run a problem on a GPU of that capability (0: a CPU), in one sentence; None if it does."""
        kinds = (torch.float32,) if self.takes_fp32 else (torch.float16, torch.bfloat16)
        dims = HEAD_DIMS if self.number < 6 else HEAD_DIMS[1:]
        if dtype not in kinds:
            return f"rung {self.number} takes {' and '.join(map(str, kinds))}, got {dtype}"
        if head_dim not in dims:
            return f"rung {self.number} takes head dims {', '.join(map(str, dims))}, got {head_dim}"
        if length % self.multiple or length == 0:
            return f"rung {self.number} takes lengths that are multiples of {self.multiple}, got {length}"
        if self.longest is not None and length > self.longest:
            return f"rung {self.number} takes lengths up to {self.longest}, got {length}"
        if self.least and not self.least <= capability <= (self.most or capability):
            most, here = f" to sm_{self.most}" if self.most else " on", f"sm_{capability}" if capability else "a CPU"
            return f"rung {self.number} needs a GPU from sm_{self.least}{most}, got {here}"
        return None

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **tile) -> torch.Tensor:
        """softmax(q k^T / sqrt(D)) v on the tensors' device. q, k, v: [heads, S, D], contiguous; tile: one of `tiles`.
        ValueError for what the rung does not take."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 3 or not x.is_contiguous() or x.dtype != q.dtype or x.device != q.device:
                raise ValueError(f"{name} must be [heads, S, D], contiguous, of q's dtype and device, got {list(x.shape)}")
        if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or (self.least and q.shape != k.shape):
            raise ValueError(f"q, k and v must have the same shape, got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
        reason = self.refuses(k.shape[1], q.shape[2], q.dtype, capability_of(q.device))
        if reason is not None:
            raise ValueError(reason)
        if hasattr(self.module, "attention"):
            return self.module.attention(q, k, v, **tile)
        out = torch.empty_like(q)
        for launch in self.launches(q, k, v, out, **tile):
            launch.kernel[launch.grid](*launch.arguments, **launch.constants)
        return out

    def launches(self, q, k, v, out, **tile) -> list[Launch]:
        """What the rung launches; tensors may be on any device, "meta" to compile only."""
        return self.module.launches(q, k, v, out, **tile)

    def tiles(self, head_dim: int) -> Sequence[dict]:
        """Choices of its tile for `attention` and `launches`, the first of which is taken unless one is named."""
        tiles = getattr(self.module, "TILES", {head_dim: ()})[head_dim]
        return [{"tile": tile} for tile in tiles] or [{}]


def capability_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


RUNGS: tuple[Rung, ...] = (
    Rung(
        0, "r00_sequential", "one core, sequential", 0, 1,
        changes="Three loops over heads, queries and keys, compiled by numba for one core.",
        bottleneck="Nothing is below: this is the baseline that speed-ups are counted from.",
        prediction="A multiply-add or so a cycle: float32 sums in their order, which no compiler may turn into vectors.",
        moves=(), nothing="It is the first.",
    ),
    Rung(
        1, "r01_naive", "naive: S and P in global memory", 75, 32,
        changes="Thousands of threads, each an element of S = Q K^T; then a softmax of rows; then O = P V.",
        bottleneck="One core does one thing at a time; a GPU has thousands of lanes.",
        prediction="Orders of magnitude, until S: S x S numbers are written once and read four times more, so memory is the "
        "limit, and what it takes grows with the square of the length.",
        moves=("registers", "smem_bytes", "FFMA", "LDG", "STG"), longest=32768, nothing="Short lengths: the GPU is not full.",
    ),
    Rung(
        2, "r02_block_by_block", "FlashAttention-1's loops, a launch for each block of keys", 75, 32,
        changes="S stays on the chip, tile by tile. O, l and m are taken up from global memory for each block of keys.",
        bottleneck="S and P go through global memory five times.",
        prediction="Memory falls from S x S to S x D for each block of keys. Each launch reads and writes all of O, which is "
        "S / 32 times as much as needed, and the GPU waits for each launch to end.",
        moves=("smem_bytes", "LDG", "STG", "MUFU.EX2"),
        nothing="Where S fits the L2 cache, rung 1's traffic is cheap, and S / 32 launches in a row are not.",
    ),
    Rung(
        3, "r03_online_softmax", "one launch, online softmax, FP32", 75, 32,
        changes="The loop over keys moves into the kernel; O, l and m live in registers; O is divided by l once.",
        bottleneck="O, l and m go to global memory and back for every block of keys, and so does Q.",
        prediction="K and V are all that is read in the loop. What is left is arithmetic without tensor cores, and shared "
        "memory: each multiply-add takes a number of K from there, with a lane a row, so that lanes wait for each other's "
        "banks.",
        moves=("registers", "smem_bytes", "STG", "FFMA", "LDS"),
        nothing="Where shared memory was the limit already, less traffic of global memory changes little.",
    ),
    Rung(
        4, "r04_tensor_cores", "tensor cores, S and P through shared memory", 80, 64,
        changes="Both products by mma.sync in 16-bit types. S goes to shared memory and comes back as rows; P goes back to "
        "it, as the wmma API asks for, whose fragments nobody may look into.",
        bottleneck="FFMA does one multiply-add a lane; and each needs its operands from shared memory.",
        prediction="Products cost little now. Scores cross shared memory twice, operands of V are read two bytes at a time.",
        moves=("HMMA", "FFMA", "STS", "LDS", "BAR", "LDG", "registers"),
        nothing="If loads were the limit, tensor cores wait for the same loads.",
        variants=(
            ("S with 8 elements of padding a row", "s_s = gl.allocate_shared_memory(gl.float32, [ROWS, KEYS], SQUARE)",
             "s_s = gl.allocate_shared_memory(\n        gl.float32, [ROWS, KEYS],\n"
             "        gl.constexpr(gl.PaddedSharedLayout.with_identity_for([[KEYS, 8]], [ROWS, KEYS], [1, 0])))"),
            ("keys and head dim split over two warps", "warps_per_cta=[4, 1]", "warps_per_cta=[2, 2]"),
        ),
    ),
    Rung(
        5, "r05_registers", "P stays in registers", 80, 64,
        changes="mma.sync's layouts are known: a lane holds the same elements of the accumulator as of the next left operand. "
        "So P is converted in place, and row maxima take two shuffles in a quad of lanes.",
        bottleneck="S and P go through shared memory, with barriers around them.",
        prediction="No shared memory at all, no barriers: STS, LDS and BAR go to 0 in the loop, shuffles from 64 to 8.",
        moves=("STS", "LDS", "BAR", "SHFL", "smem_bytes"),
        nothing="Loads of K and V, two and four bytes a lane and the same by all four warps, hide everything else.",
    ),
    Rung(
        6, "r06_staged", "K and V staged in shared memory, through registers", 80, 64,
        changes="Warps share K and V: each element is loaded once a CTA, 16 bytes a lane, and comes to registers by ldmatrix.",
        bottleneck="Each warp loads all of K and V itself, in pieces of two and four bytes.",
        prediction="LDG in the loop falls by more than ten times, and four times fewer bytes are asked for. New: STS, and a "
        "wait for both with nothing to do meanwhile. Rows of 128 bytes and more, one below the other, share their banks.",
        moves=("LDG", "STS", "LDSM", "BAR", "registers", "conflicts"),
        nothing="Conflicts of ldmatrix may cost what the loads saved.",
    ),
    Rung(
        7, "r07_cp_async", "cp.async", 80, 64,
        changes="LDGSTS copies from global to shared memory without registers in between.",
        bottleneck="Copies pass through registers, which wait there for memory.",
        prediction="LDG + STS become LDGSTS, one for two. Registers fall where the copy was the peak of their use.",
        moves=("LDGSTS", "LDG", "STS", "registers", "blocks"),
        nothing="The copy is waited for at once, so memory's latency is as visible as before: the way is prepared for rung 9.",
        waits=("cp_async_wait(0)",),
    ),
    Rung(
        8, "r08_swizzle", "XOR swizzle", 80, 64,
        changes="One constant: the 16-byte units of a row are XORed with the row's number modulo 8.",
        bottleneck="The eight rows that an ldmatrix phase reads lie in the same banks: eight wavefronts instead of one.",
        prediction="Conflicts go to zero, and with them most of the loop's time, if shared memory was its limit.",
        moves=("conflicts", "LDSM", "registers"),
        nothing="Where half-rate accumulation binds (GeForce), tensor cores are the limit soon after.",
    ),
    Rung(
        9, "r09_double_buffer", "double buffering, K and V apart", 80, 64,
        changes="Two buffers each; K and V are commit groups of their own; the next block is asked for before this one is "
        "used.",
        bottleneck="Copies are waited for as soon as they are asked for.",
        prediction="The latency of memory goes under the products. It takes twice the shared memory, so perhaps fewer blocks.",
        moves=("smem_bytes", "blocks", "LDGSTS", "registers"),
        nothing="With several CTAs on a multiprocessor one computes while the other waits: that hid the latency already.",
        waits=("cp_async_wait(1)",),
    ),
    Rung(
        10, "r10_fragments", "Q in registers, fragments of K in two buffers", 80, 64,
        changes="Q is read from shared memory once. The next fragment of K is on its way while a product runs.",
        bottleneck="Each block reads Q from shared memory again, and products wait for ldmatrix.",
        prediction="Fewer LDSM in the loop; more registers.",
        moves=("LDSM", "registers", "blocks"),
        nothing="The compiler puts ldmatrix ahead of mma on its own; a published series of kernels lost a little by this step.",
    ),
    Rung(
        11, "r11_exp2", "exp2, scale folded in", 80, 64,
        changes="exp2 instead of exp, whose argument is one FFMA: s * scale - m, with log2(e) in the scale.",
        bottleneck="Beside 34 MUFU the loop has some 166 FMUL: the scale, and the range of exp's argument.",
        prediction="FMUL falls to the correction of O; a third of all instructions go.",
        moves=("FMUL", "FFMA", "MUFU.EX2", "instructions"),
        nothing="If tensor cores are busy all the time, instructions beside them are free.",
    ),
    Rung(
        12, "r12_tiles", "tiles tuned", 80, 128,
        changes="The same kernel at other tiles and numbers of warps; the fastest is taken.",
        bottleneck="At 16 rows a warp, each fragment of K and V serves one product.",
        prediction="32 rows a warp halve LDSM for each HMMA; the price is registers.",
        moves=("HMMA", "LDSM", "registers", "smem_bytes", "blocks"),
        nothing="Where 64 x 64 is the best tile already.",
    ),
    Rung(
        13, "r13_wgmma", "wgmma", 90, 128, most=90,
        changes="Four warps multiply 64 rows together; K and V are read from shared memory by the tensor cores, without "
        "ldmatrix.",
        bottleneck="mma.sync reaches part of a Hopper tensor core's rate only, and every fragment passes through registers.",
        prediction="HMMA and LDSM go; a handful of HGMMA takes their place. Both products are waited for at once, so softmax "
        "and tensor cores take turns.",
        moves=("HGMMA", "HMMA", "LDSM", "registers", "smem_bytes", "instructions"),
        nothing="It has half of a ladder's worth of idle tensor cores left, but is never slower.",
    ),
    Rung(
        14, "r14_tma", "TMA", 90, 128, most=90,
        changes="One thread asks for a tile by a descriptor; an mbarrier counts its bytes.",
        bottleneck="All threads compute addresses and issue LDGSTS for every block.",
        prediction="LDGSTS become two UTMALDG of one thread; registers that held addresses are free.",
        moves=("LDGSTS", "UTMALDG", "SYNCS", "registers", "instructions"),
        nothing="The copies were asynchronous before, and a few instructions in hundreds went; the way is free for rung 15.",
        waits=("mbarrier.wait(k_full.index(here), phase)",),
    ),
    Rung(
        15, "r15_warp_specialised", "warps with roles", 90, 128, most=90,
        changes="A producer warp copies; two groups of four warps compute, each on 64 rows, at their own pace.",
        bottleneck="Every barrier of the CTA makes all warps wait for the slowest, twice a block.",
        prediction="Barriers of the whole CTA go from the loop; those that are left join the four warps of a group. "
        "Groups drift apart, so one's softmax meets the other's products by "
        "chance; registers move from the producer to those who compute.",
        moves=("BAR", "SYNCS", "instructions", "registers"),
        nothing="Two CTAs on a multiprocessor drift apart as well, where shared memory has room for two.",
        waits=("mbarrier.wait(k_full.index(stage), phase)", "mbarrier.wait(k_empty.index(stage), phase ^ 1)"),
    ),
    Rung(
        16, "r16_overlap", "overlap in a group, ping-pong between two", 90, 128, most=90,
        changes="S of the next block and P V of the last are issued together, and softmax runs under the second; groups take "
        "turns at issuing.",
        bottleneck="Within a group the tensor cores idle during softmax.",
        prediction="What is left outside of products: the wait for S and the correction of O. The same instructions in "
        "another order.",
        moves=("HGMMA", "SYNCS", "instructions"),
        nothing="Turns cost a barrier a block; where groups had fallen into step by themselves, there is nothing left to win.",
        waits=("mbarrier.wait(v_full.index(before), phase_before)",),
    ),
    Rung(
        17, "r17_optimistic", "optimistic softmax", 90, 128, most=90,
        changes="The first block's maxima stay the reference: no maximum of later blocks, no correction of O; a note says "
        "when a sum leaves its range, and a second launch redoes that tile.",
        bottleneck="Between S and the first exponential stands a row maximum, and after each block all of O is multiplied.",
        prediction="A fourth of the loop's instructions go: FMUL to none, SHFL to half.",
        moves=("FMUL", "SHFL", "FADD", "instructions"),
        nothing="If tensor cores are busy all the time, instructions beside them are free.",
    ),
    Rung(
        18, "r18_product", "the product's kernel, persistent", 90, 1, most=90,
        changes="As many CTAs as multiprocessors, which take tile after tile; heads in bundles that fit the L2 cache; "
        "measured tiles.",
        bottleneck="Each CTA begins with a wait for memory and ends with a store, and tensor cores idle meanwhile.",
        prediction="Begins and ends of tiles go under products: most for short sequences, a few percent for long ones.",
        moves=(),
        nothing="At long sequences the ends of a tile are a small part of it.",
    ),
)  # fmt: skip
