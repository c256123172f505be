"""Masks with blocks: every backend that takes them against the specification, and the way to them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import BLOCK_CASES, Case, check, run, tensors
from torch.utils.flop_counter import FlopCounterMode
from tritons import TRITONS, output_of

import strobe
from strobe.cpu import tiled
from strobe.device import KNOWN
from strobe.masks import Blocks, Mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("backend", ["portable", "tiled"])
@pytest.mark.parametrize("case", BLOCK_CASES, ids=str)
def test_against_reference(case, backend):
    t = tensors(case, torch.float32, DEVICE)
    check(run(t, backend), t)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype):
    t = tensors(BLOCK_CASES[2], dtype, DEVICE)
    check(run(t, "portable"), t)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype):
    """Tiles of the size that a GPU takes, several in a block, by the operator and by what it prepared."""
    for size, head_dim in ((128, 64), (256, 128), (64, 256)):
        case = Case(700, 900, heads_q=4, head_dim=head_dim)
        kinds = torch.randint(0, 4, (2, 4, -(-700 // size), -(-900 // size)), dtype=torch.int32)
        pairs = torch.randint(0, 2, (2, size, size), dtype=torch.uint8)
        t = tensors(case, dtype, "cuda")
        t = replace(t, keywords={**t.keywords, "mask": Mask(blocks=Blocks(kinds.cuda(), pairs.cuda()))})
        for _ in range(2):
            check(run(t, None), t)


def test_what_is_hidden_is_not_visited(monkeypatch):
    """On a CPU: a tile is a block, and hidden ones are not multiplied."""
    visited, scores = [], tiled._scores
    monkeypatch.setattr(tiled, "_scores", lambda part, q, k, tile, *n: visited.append(tile[:2]) or scores(part, q, k, tile, *n))
    kinds = torch.tensor([[[[1, 0, 0], [0, 2, 0], [1, 0, 3]]]], dtype=torch.int32)
    mask = Mask(blocks=Blocks(kinds, torch.ones(2, 64, 128, dtype=torch.uint8)))
    q, k, v = (torch.randn(1, n, 2, 16) for n in (190, 300, 300))
    strobe.attention(q, k, v, mask=mask, backend="tiled")
    places = {(rows.start // 64, keys.start // 128) for rows, keys in visited}
    assert places == {(0, 0), (1, 1), (2, 0), (2, 2)} and len(visited) == 4


@pytest.mark.parametrize("backend", ["portable", "tiled"])
def test_what_is_hidden_reaches_no_row(backend):
    kinds = torch.tensor([[[[1, 0], [2, 1]]]], dtype=torch.int32)
    pairs = torch.zeros(1, 32, 32, dtype=torch.uint8)
    pairs[:, :, :20] = 1
    mask = Mask(blocks=Blocks(kinds, pairs))
    for key, first, last in ((25, 0, 32), (40, 32, 64), (3, 0, 64)):  # a key, and the rows that see it
        q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
        k[:, key] = v[:, key] = torch.nan
        out = strobe.attention(q, k, v, mask=mask, backend=backend)
        sees = torch.zeros(64, dtype=torch.bool)
        sees[first:last] = True
        assert torch.equal(out.isnan().all(-1).all(-1)[0], sees) and torch.equal(out.isnan().any(-1).any(-1)[0], sees)


def test_compiled_whole_and_counted():
    t = tensors(BLOCK_CASES[0])
    mask = t.keywords["mask"]
    compiled = torch.compile(lambda q, k, v: strobe.attention(q, k, v, mask=mask), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(t.q, t.k, t.v), strobe.attention(t.q, t.k, t.v, mask=mask))
    with FlopCounterMode(display=False) as counter:
        strobe.attention(t.q, t.k, t.v, mask=mask)
    assert counter.get_total_flops() == 2 * 2 * 4 * 32 * int(mask.dense(60, 100).sum())


def test_masks_are_values():
    one, other = (tensors(case).keywords["mask"] for case in BLOCK_CASES[:2])
    same = Mask(blocks=Blocks(one.blocks.kinds.clone(), one.blocks.pairs.clone()))
    assert one == same and hash(one) == hash(same) and one != other and "blocks of 32 x 48" in str(one & strobe.Causal())
    assert (one & strobe.Causal()).dense(60, 100).equal(one.dense(60, 100) & strobe.Causal().dense(60, 100))
    with pytest.raises(ValueError, match="blocks of one mask"):
        one & other


BAD = {
    "other lengths": (dict(kinds=torch.zeros(1, 1, 4, 3, dtype=torch.int32)), r"shape \[2, 2, 2, 3\], got \[1, 1, 4, 3\]"),
    "another batch": (dict(kinds=torch.zeros(3, 1, 2, 3, dtype=torch.int32)), r"shape \[2, 2, 2, 3\]"),
    "int64": (dict(kinds=torch.zeros(1, 1, 2, 3, dtype=torch.int64)), "kinds of blocks must be contiguous torch.int32"),
    "odd blocks": (dict(pairs=torch.zeros(1, 30, 48, dtype=torch.uint8)), "multiples of 16 rows and keys, got 30 and 48"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    changes, words = BAD[name]
    t = tensors(BLOCK_CASES[0])
    mask = Mask(blocks=replace(t.keywords["mask"].blocks, **changes))
    with pytest.raises(ValueError, match=words):
        strobe.attention(t.q, t.k, t.v, mask=mask)


def test_refused_with_used_lengths():
    t = tensors(BLOCK_CASES[0])
    with pytest.raises(ValueError, match="used whole"):
        strobe.attention(t.q, t.k, t.v, mask=t.keywords["mask"], seqused_kv=torch.ones(2, dtype=torch.int32))


def test_backends_that_take_none_say_so():
    from strobe.arguments import options_of
    from strobe.call.dispatch import explain_problem
    from strobe.call.options import describe, operands_of

    t = tensors(replace(BLOCK_CASES[0], head_dim=64), torch.bfloat16)
    options = options_of(t.q, t.k, t.v, **t.keywords)
    said = explain_problem(describe(operands_of(t.q, t.k, t.v, options), options), KNOWN["H200"])
    assert said.chosen == "portable" and dict(said.refusals)["sm90"] == "takes no blocks of 32 x 48 yet"
    assert 32 % said.config.tile_q == 0 and 48 % said.config.tile_kv == 0


COMPILE = """
import json, sys
from dataclasses import replace
import torch
from problems import BLOCK_CASES, describe, tensors
from strobe.call import launcher
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.kernels.portable import backend, config
from strobe.lab.binary.offline import pretend_gpu

for gpu, number, size in json.loads(sys.argv[1]):
    arch = KNOWN[gpu]
    t = tensors(replace(BLOCK_CASES[number], head_dim=128), torch.bfloat16).with_gradients()
    for phase in ("forward", "backward"):
        problem, _ = describe(t, phase)
        problem = replace(problem, mask=replace(problem.mask, blocks=type(problem.mask.blocks)(size, size)))
        calls = backend.calls(problem, unfilled(problem, backend.buffers(problem, arch)), arch)
        with pretend_gpu(arch.capability):
            for kernel, grid, arguments, keywords, *_ in calls:
                call = launcher.compiled_call(kernel, grid, *arguments, **keywords)
                launcher.parameters(call.compiled, launcher.all_arguments(call))  # or Unknown is raised
                print(kernel.__name__, call.compiled.metadata.shared, "trap;" in call.compiled.asm["ptx"])
"""
COMPILED = [("H200", 0, 128)]
OTHERS = [("A100", 3, 64), ("B200", 2, 128)]


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("problems", [COMPILED, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["H200", "others"])
def test_compiles(problems, triton):
    """For GPUs, and what prepares launches knows what these kernels take."""
    printed = output_of(COMPILE, json.dumps(problems), triton=triton, path=[Path(__file__).parents[1]])
    assert printed.count("_dkdv") == len(problems) and "True" not in printed
