"""Mistakes made in the GEMMs under examples/, one at a time: the simulator finds each in every order."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from strobe.sim import (
    BarrierMisuse,
    Deadlock,
    DoubleWrite,
    IllegalOperation,
    MissingFence,
    OutOfBounds,
    Race,
    Unfinished,
    Uninitialised,
    simulate,
)

GEMM = Path(__file__).parent.parent.parent / "examples" / "gemm"
sys.path.insert(0, str(GEMM))
SMALL = {
    "sm80": {"block_m": 64, "block_n": 64, "block_k": 64},
    "sm90": {"block_n": 64, "stages": 2, "ctas": 2},
    "sm100": {"block_n": 128, "stages": 2, "ctas": 2},
}
ORDERS = ("in_order", "random", "late", "early")


@dataclass(frozen=True)
class Bug:
    """`text` of an example becomes `becomes`, and a simulation raises one of `errors`; none: its numbers are wrong."""

    what: str
    text: str
    becomes: str
    errors: tuple[type[Exception], ...]

    def __str__(self) -> str:
        return self.what


LOAD_A = "tma_load(a_desc, [row, k], full.index(stage), a_s.index(stage))"
WAIT_EMPTY = "mbarrier.wait(empty.index(stage), ((position // STAGES) & 1) ^ 1)"
WAIT_FULL = "mbarrier.wait(full.index(stage), (position // STAGES) & 1)"
K_LOOP = "for k in range(0, {}, BLOCK_K):\n            stage = position % STAGES\n            mbarrier.wait(empty"
TOO_EARLY = (Race, Unfinished, Uninitialised)
MISCOUNTED = (BarrierMisuse, Deadlock, Race, Uninitialised)

AMPERE = [
    Bug("a group too few is waited for", "wait_group(STAGES - 2)", "wait_group(STAGES - 1)", TOO_EARLY),
    Bug("no wait for copies", "        async_copy.wait_group(STAGES - 2)\n", "", TOO_EARLY),
    Bug("copies under way at the end", "    async_copy.wait_group(0)\n", "", (Unfinished,)),
    Bug("no commit in the loop", "        async_copy.commit_group()\n        left", "        left", TOO_EARLY),
    Bug("copies a block too far", "ahead = k + STAGES - 1", "ahead = k + STAGES", TOO_EARLY),
    Bug("copies over what is read", "ahead % STAGES))\n        async", "k % STAGES))\n        async", TOO_EARLY),
    Bug("copies beyond K", "(columns < K)[None, :]", "(columns < K + 8)[None, :]", (OutOfBounds,)),
    Bug("copies beyond the rows", "(rows < length)[:, None]", "(rows < length + 1)[:, None]", (OutOfBounds,)),
    Bug("stores beyond the rows", "(rows < M)[:, None]", "(rows < M + 1)[:, None]", (OutOfBounds,)),
    Bug("stores beyond the columns", "(columns < N)[None, :]", "(columns < N + 1)[None, :]", (DoubleWrite, OutOfBounds)),
    Bug("two CTAs, one tile", "row, column = gl.program_id(0)", "row, column = gl.program_id(1)", (DoubleWrite, Race)),
]
RING = [
    Bug("the producer waits for the wrong phase", WAIT_EMPTY, WAIT_EMPTY.replace(" ^ 1", ""), (Deadlock,)),
    Bug("the producer does not wait", WAIT_EMPTY, "pass", MISCOUNTED),
    Bug("nobody waits for copies", WAIT_FULL, "pass", (Race, Uninitialised)),
    Bug("the wrong phase of copies", WAIT_FULL, WAIT_FULL.replace("& 1", "& 1 ^ 1"), MISCOUNTED),
    Bug("the bytes of B are not expected", " + b_desc.block_type.nbytes)", ")", MISCOUNTED),
    Bug("A is not copied", LOAD_A, "pass", (Deadlock,)),
    Bug("A's bytes go to another barrier", LOAD_A, LOAD_A.replace("full", "empty"), MISCOUNTED),
    Bug("A goes to the first stage always", LOAD_A, LOAD_A.replace("a_s.index(stage)", "a_s.index(0)"), (Race, Uninitialised)),
    Bug("A comes from the wrong place", LOAD_A, LOAD_A.replace("[row, k]", "[row, k + 8]"), ()),
    Bug("stages are skipped", "        position += 1", "        position += 2", MISCOUNTED),
    Bug("a block of K too few is copied", K_LOOP.format("K"), K_LOOP.format("K - BLOCK_K"), (Deadlock,)),
    Bug("tiles overlap", "tile // columns *", "tile // columns // 2 *", (DoubleWrite, Race)),
    Bug("the last store is not waited for", "    tma_store_wait(0)\n\n\n", "\n\n", (Unfinished,)),
]
HOPPER = [
    Bug("no fence before the store", "        fence_async_shared()\n        partition", "        partition", (MissingFence,)),
    Bug(
        "the fence comes before the store",
        "c_buffer.store(acc.to(c_desc.dtype))\n        fence_async_shared()",
        "fence_async_shared()\n        c_buffer.store(acc.to(c_desc.dtype))",
        (MissingFence,),
    ),
    Bug("the store before is not waited for", "tma_store_wait(0)  #", "pass  #", (Race,)),
    Bug("a product too few is waited for", "warpgroup_mma_wait(1, deps=[acc])", "warpgroup_mma_wait(2, deps=[acc])", (Race,)),
    Bug("products are not waited for", "        acc = warpgroup_mma_wait(0, deps=[acc])\n", "", (Race, Unfinished)),
    Bug(
        "the stage in use is given back",
        "(position + STAGES - 1) % STAGES), count=1, pred=k > 0)",
        "position % STAGES), count=1)",
        MISCOUNTED,
    ),
    Bug("a stage is given back that none had", "count=1, pred=k > 0)", "count=1)", MISCOUNTED),
    Bug(
        "one consumer gives back for both",
        "mbarrier.init(empty.index(i), count=CONSUMERS)",
        "mbarrier.init(empty.index(i), count=1)",
        MISCOUNTED,
    ),
    Bug("both consumers take the same rows", ".slice(W * ROWS, ROWS)", ".slice(0, ROWS)", ()),
    Bug("both consumers store through one buffer", "c_buffer = c_s.index(W)", "c_buffer = c_s.index(0)", (Race, MissingFence)),
    Bug("both consumers store to the same rows", "[row + W * ROWS, column]", "[row, column]", (DoubleWrite, Race)),
]
BLACKWELL = [
    Bug("no fence before the store", "            fence_async_shared()\n", "", (MissingFence,)),
    Bug("the store before the last is not waited for", "tma_store_wait(1)  #", "pass  #", (Race,)),
    Bug("products give no stage back", "mbarriers=[empty.index(stage)]", "mbarriers=[]", (Deadlock, BarrierMisuse)),
    Bug("no commit", "        tcgen05_commit(acc_full.index(i % 2))\n", "", (Deadlock, BarrierMisuse)),
    Bug("the tile is not waited for", "mbarrier.wait(acc_full.index(i % 2), (i // 2) & 1)", "pass", (Race, Uninitialised)),
    Bug("the accumulator is not waited for", "mbarrier.wait(acc_empty.index(i % 2), ((i // 2) & 1) ^ 1)", "pass", MISCOUNTED),
    Bug("no accumulator is given back", "mbarrier.arrive(acc_empty.index(i % 2), count=1)", "pass", (Deadlock, BarrierMisuse)),
    Bug("the accumulator is given back too early", "if j == BLOCK_N // CHUNK - 1:", "if j == 0:", (Race,)),
    Bug("the first product adds to nothing", "use_acc=k > 0", "use_acc=True", (Uninitialised,)),
    Bug("all tiles in one accumulator", "acc = accumulators.index(i % 2)\n        mbarrier.wait(acc_empty",
        "acc = accumulators.index(0)\n        mbarrier.wait(acc_empty", (Race, Uninitialised)),
    Bug("all chunks through one buffer", "c_s.index(j % 2).store", "c_s.index(0).store", (Race, MissingFence, Uninitialised)),
    Bug("more tensor memory than there is", "accumulators = allocate_tensor_memory(",
        "allocate_tensor_memory(gl.float32, [BLOCK_M, 512], TensorMemoryLayout((BLOCK_M, 256), col_stride=1))\n"
        "    accumulators = allocate_tensor_memory(", (IllegalOperation,)),
]  # fmt: skip
BUGS = [
    *(("sm80", bug) for bug in AMPERE),
    *(("sm90", bug) for bug in RING + HOPPER),
    *(("sm100", bug) for bug in RING + BLACKWELL),
]


def broken(tmp_path: Path, name: str, bug: Bug):
    """The example with the bug in it."""
    source = (GEMM / f"{name}.py").read_text()
    assert bug.text in source, f"{name}.py no longer has {bug.text!r}"
    path = tmp_path / f"broken_{name}.py"
    path.write_text(source.replace(bug.text, bug.becomes, 1))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name, bug", BUGS, ids=str)
def test_it_is_found(tmp_path, name, bug, order):
    """A problem whose sides no tile divides, with several tiles for each CTA."""
    if name == "sm100":
        pytest.importorskip("triton", minversion="3.8")
    module = broken(tmp_path, name, bug)
    a, b = (torch.randn(rows, 136, generator=torch.Generator().manual_seed(rows)).half() for rows in (456, 296))
    c = torch.full((456, 296), float("nan"), dtype=a.dtype)
    grid, arguments, constants = module.launch_arguments(a, b, c, **SMALL[name])

    def run():
        simulate(module.matmul_kernel, grid, *arguments, arch=int(name[2:]), order=order, seed=2, **constants)

    if bug.errors:
        with pytest.raises(bug.errors):
            run()
    else:
        run()
        assert not torch.allclose(c.float(), a.float() @ b.float().T, atol=0.1)
