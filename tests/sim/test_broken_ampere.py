"""Mistakes made in the kernels for mma.sync, one at a time: the simulator finds each in every order."""

from dataclasses import replace
from types import ModuleType

import pytest
from ampere_backward import Backward
from broken import Bug, Kernel, assert_found, assert_right_unless_broken, one_edit
from problems import Case, Results, check, describe

from strobe.kernels.sm80.config import BackwardConfig, Config
from strobe.sim import OutOfBounds, Race, Unfinished, Uninitialised
from strobe.sim.attention import forward_launch

FORWARD, BACKWARD = (f"strobe.kernels.sm80.{name}" for name in ("forward", "backward"))
BACKWARD_PARTS, BACKWARD_DQ = (f"strobe.kernels.sm80.{name}" for name in ("backward_parts", "backward_dq"))
TILES, SCORES, BACKWARD_SCORES = (f"strobe.kernels.sm80.{name}" for name in ("tiles", "scores", "backward_scores"))
TOO_EARLY = (Race, Unfinished, Uninitialised)
NUMBERS = ()


def start_forward(kernels: ModuleType, bug: Bug, t, config):
    def run(order: str, seed: int) -> None:
        launch, out, lse, _notes = forward_launch(kernels, 80, *describe(t), config)
        launch.simulate(order, seed)
        check(Results(out, lse), t, ("out", "lse"))

    return run


def start_backward(kernels: ModuleType, bug: Bug, t, config):
    return Backward(t, config, kernels).run


ONE_STAGE = Kernel(
    FORWARD, 80, Case(100, 133, 1, 1, 1, 64, mask="causal"), Config(64, 64, 64, 32, 4, q_in_registers=True), start_forward
)
RING = replace(ONE_STAGE, config=Config(64, 64, 64, 32, 4, 2))
SAFE = replace(ONE_STAGE, config=Config(64, 64, 64, 32, 4, optimistic=False))
IN_PAIRS = replace(ONE_STAGE, config=Config(64, 64, 64, 32, 4, across=2))
GRADIENTS = Kernel(BACKWARD, 80, Case(130, 70, 1, 2, 1, 64, mask="causal"), BackwardConfig(64, 64, 64, 64, 4), start_backward)
IN_PARTS = replace(GRADIENTS, config=BackwardConfig(64, 64, 64, 128, 4, parts=2))
SHARED_P = replace(GRADIENTS, config=BackwardConfig(64, 64, 64, 64, 8, 2, 1))

IN_PIECES = replace(GRADIENTS, case=Case(64, 64, 1, 1, 1, 128), config=BackwardConfig(128, 128, 32, 64, 8, across=2, stages=1))

WILD = Case(100, 133, 1, 1, 1, 64, logits=30.0)

BUGS = [
    one_edit(
        ONE_STAGE,
        FORWARD,
        "no wait for K",
        "    async_copy.wait_group(0)\n    partition_barrier()\n    if K.C.stages == 1:\n        copy_values",
        "    partition_barrier()\n    if K.C.stages == 1:\n        copy_values",
        TOO_EARLY,
    ),
    one_edit(
        ONE_STAGE,
        FORWARD,
        "no wait for V",
        "        async_copy.wait_group(0)\n        partition_barrier()\n        if position + 1",
        "        partition_barrier()\n        if position + 1",
        TOO_EARLY,
    ),
    one_edit(
        ONE_STAGE,
        FORWARD,
        "Q is read before it is there",
        "        async_copy.wait_group(0)\n        partition_barrier()\n        q = load_q",
        "        q = load_q",
        TOO_EARLY,
    ),
    one_edit(
        ONE_STAGE,
        FORWARD,
        "copies under way at the end",
        "    async_copy.wait_group(0)\n    return acc, m, all_lanes",
        "    return acc, m, all_lanes",
        (Unfinished, Race),
        config={},
    ),
    one_edit(
        ONE_STAGE,
        FORWARD,
        "K of the same block again",
        "copy_keys(K, tile, position + 1, 0)",
        "copy_keys(K, tile, position, 0)",
        NUMBERS,
    ),
    one_edit(
        RING,
        FORWARD,
        "a block too few is waited for",
        "    async_copy.wait_group(0)\n    partition_barrier()\n    if K.C.stages == 1:\n        copy_values",
        "    async_copy.wait_group(1)\n    partition_barrier()\n    if K.C.stages == 1:\n        copy_values",
        TOO_EARLY,
    ),
    one_edit(
        RING,
        FORWARD,
        "copies over what is read",
        "copy_values(K, tile, position + 1, 1 - STAGE)",
        "copy_values(K, tile, position + 1, STAGE)",
        TOO_EARLY,
    ),
    one_edit(
        RING,
        FORWARD,
        "no commit in the loop",
        "        copy_values(K, tile, position + 1, 1 - STAGE)\n    async_copy.commit_group()",
        "        copy_values(K, tile, position + 1, 1 - STAGE)",
        TOO_EARLY,
    ),
    one_edit(
        ONE_STAGE,
        FORWARD,
        "whole blocks reach one too far",
        "        whole = tile.full_end - tile.full_begin",
        "        whole = tile.full_end - tile.full_begin + 1",
        NUMBERS,
    ),
    one_edit(
        SAFE,
        FORWARD,
        "O is not rescaled",
        "            acc = times(acc, factor)\n            row_sum",
        "            row_sum",
        NUMBERS,
        case=WILD,
    ),
    one_edit(
        SAFE, FORWARD, "sums are not rescaled", "            row_sum = rescale_lanes(row_sum, factor)\n", "", NUMBERS, case=WILD
    ),
    one_edit(
        ONE_STAGE,
        FORWARD,
        "optimism is not looked at",
        "    return broken & (p_exists(K, tile, S))",
        "    return (row_sum != row_sum) & (p_exists(K, tile, S))",
        NUMBERS,
        case=replace(WILD, logits=300.0),
    ),
    one_edit(
        ONE_STAGE,
        FORWARD,
        "the redo reads K before it is there",
        "        async_copy.wait_group(0)\n        partition_barrier()\n        hidden",
        "        partition_barrier()\n        hidden",
        TOO_EARLY,
        case=replace(WILD, logits=300.0),
    ),
    one_edit(
        IN_PAIRS,
        FORWARD,
        "the P of the block before",
        "        K.p_s[0].store(p)\n        partition_barrier()\n        return K.p_s[0].load(left(S))",
        "        before = K.p_s[0].load(left(S))\n        K.p_s[0].store(p)\n        return before",
        (Uninitialised,),
    ),
    one_edit(
        ONE_STAGE,
        SCORES,
        "a key too many",
        "key < end[:, None, None, None] - first",
        "key <= end[:, None, None, None] - first",
        NUMBERS,
    ),
    one_edit(
        ONE_STAGE,
        TILES,
        "rows past the end",
        "inside & (row < left)[:, None]",
        "inside & (row <= left)[:, None]",
        (OutOfBounds,),
    ),
    one_edit(
        GRADIENTS,
        BACKWARD,
        "no wait for a tile",
        "    async_copy.wait_group(0)\n    partition_barrier()\n    if K.C.stages == 2:",
        "    partition_barrier()\n    if K.C.stages == 2:",
        TOO_EARLY,
    ),
    one_edit(
        GRADIENTS,
        BACKWARD,
        "the next tile over this one",
        "copy_rows_of(K, work, after, member_after, 1 - STAGE)",
        "copy_rows_of(K, work, after, member_after, STAGE)",
        TOO_EARLY,
    ),
    one_edit(
        GRADIENTS,
        BACKWARD,
        "dQ of the wrong head",
        "place = (work.row + member * K.heads.padded + row).to(gl.int64) * K.C.head_dim",
        "place = (work.row + row).to(gl.int64) * K.C.head_dim",
        NUMBERS,
    ),
    one_edit(
        IN_PARTS,
        BACKWARD_PARTS,
        "dS of a part over that of another",
        "M.ds[PART].store(ds)",
        "M.ds[0].store(ds)",
        TOO_EARLY,
    ),
    one_edit(
        IN_PARTS,
        BACKWARD_DQ,
        "dQ of another part",
        "M.ds[i].permute",
        "M.ds[0].permute",
        NUMBERS,
    ),
    one_edit(
        IN_PIECES,
        BACKWARD_DQ,
        "dQ of a piece over that of another",
        "first_of(K.C, False, c) + j * COLUMNS, i)",
        "first_of(K.C, False, c), i)",
        NUMBERS,
    ),
    one_edit(
        IN_PARTS,
        BACKWARD_PARTS,
        "the rows of another part",
        "    row += FIRST\n",
        "",
        NUMBERS,
    ),
    one_edit(
        IN_PARTS,
        BACKWARD_PARTS,
        "delta of the LSE, in parts",
        "slice(NUMBER * K.C.tile_q + FIRST, K.C.rows)",
        "slice(FIRST, K.C.rows)",
        NUMBERS,
    ),
    one_edit(
        GRADIENTS,
        BACKWARD,
        "delta of the LSE",
        "statistics.slice(K.C.tile_q, K.C.tile_q)",
        "statistics.slice(0, K.C.tile_q)",
        NUMBERS,
    ),
    one_edit(
        GRADIENTS,
        BACKWARD_SCORES,
        "a row too many",
        "within >= key - K.lengths.right - p",
        "within > key - K.lengths.right - p",
        NUMBERS,
    ),
    one_edit(
        SHARED_P,
        BACKWARD,
        "P without the scale",
        "leave(K, K.dk, K.memory.k, dk_sum, work, scale, False, DIM)",
        "leave(K, K.dk, K.memory.k, dk_sum, work, 1.0, False, DIM)",
        NUMBERS,
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


@pytest.mark.parametrize(
    "kernel", [ONE_STAGE, RING, SAFE, IN_PAIRS, GRADIENTS, SHARED_P], ids=lambda k: k.module.rpartition(".")[2]
)
def test_no_false_alarm(kernel, tmp_path):
    assert_right_unless_broken(kernel, tmp_path)
