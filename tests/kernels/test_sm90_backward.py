"""The Hopper backward without a GPU: what the compiler makes of it, what it runs with, and what it refuses."""

import dataclasses
import json
import re

import pytest
import torch
from tritons import TRITONS, answer_of

import strobe
from strobe.call.dispatch import explain_problem
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.kernels.sm90 import backend, backward_launch
from strobe.kernels.sm90.backward_config import Config, SplitConfig, choose
from strobe.problem import AttentionProblem, Dense, Varlen


def compiling(*some: int) -> list:
    """Which Triton compiles which of a script's problems, by their numbers: the installed one always some; campaigns all, by
    both."""
    campaigns = (pytest.param((triton, None), id=f"all, {triton}", marks=pytest.mark.exhaustive) for triton in TRITONS)
    return [pytest.param((TRITONS[1], some), id=f"some, {TRITONS[1]}"), *campaigns]


def picked(things, which: tuple[int, ...] | None) -> list:
    """Those of these numbers, or all."""
    return [thing for i, thing in enumerate(things) if which is None or i in which]


def run_compiler(code: str, triton: str, *arguments: str) -> list:
    """The answer of a program that compiles for a GPU that is not there. No kernel is left to Triton's default for the fusion
    of products and sums, which Triton 3.10 changes, or takes Python's min and max of tensors that are no numbers."""
    errors = "error:TRITON_DEFAULT_FP_FUSION:UserWarning,error:builtin:UserWarning"
    return answer_of(code, *arguments, triton=triton, PYTHONWARNINGS=errors)


# ---- the compiler's own numbers

D64 = Config(64, 64, 128, turns=True, folded=True)
D96 = Config(96, 96, 64, turns=True, held_k=64, held_v=64)
D96_MASKED = Config(96, 96, 64, turns=True, held_k=96)
D128 = Config(128, 128, 64, turns=True, held_k=64, folded=True)
D160 = Config(160, 160, 64, turns=False)
D192 = Config(192, 128, 64, turns=False)
AUDITED = {
    # Head dims, mask, dtype, length: the config, and of the oldest Triton and the installed one how many loads and stores of
    # spilled registers stand in the loop over tiles of either group, and how many bytes of them anywhere.
    ((64, 64), "Full()", "bfloat16", 4096): (D64, (0, 24), (6, 348)),
    ((64, 64), "Causal()", "float16", 1000): (D64, (0, 56), (7, 240)),
    ((80, 80), "Full()", "float16", 1000): (D96, (0, 40), (6, 468)),
    ((96, 96), "Causal()", "bfloat16", 4096): (D96_MASKED, (0, 92), (2, 196)),
    ((128, 128), "Full()", "bfloat16", 4096): (D128, (0, 0), (5, 328)),
    ((128, 128), "Causal()", "bfloat16", 4096): (D128, (0, 0), (4, 276)),
    ((128, 64), "Window(1023, 0)", "bfloat16", 4096): (Config(128, 64, 64, True, 64, 64, folded=True), (0, 0), (2, 304)),
    ((64, 128), "Full()", "float16", 4096): (Config(96, 128, 64, turns=True, held_k=64), (0, 0), (2, 96)),
    ((192, 128), "Full()", "bfloat16", 4096): (D192, (2, 252), (9, 452)),
    ((192, 128), "Causal()", "float16", 1000): (D192, (1, 412), (29, 800)),
    ((176, 96), "Window(1023, 0)", "bfloat16", 4096): (Config(192, 96, 64, turns=False), (4, 88), (9, 604)),
    ((160, 160), "Causal()", "bfloat16", 4096): (D160, (2, 276), (15, 448)),
}

AUDIT = """
import dataclasses, json, sys, torch, triton
from strobe.kernels.sm90.backward_config import Config
from strobe.lab.binary.offline import audit_sm90_backward
from strobe.masks import Causal, Full, Window
audits = []
for head_dims, mask, dtype, length, config in json.loads(sys.argv[1]):
    [audit] = audit_sm90_backward(tuple(head_dims), eval(mask), getattr(torch, dtype), length, Config(**config))
    audits.append(dataclasses.asdict(audit))
print(json.dumps([triton.__version__, audits]))
"""


REPEATED_BIAS = """
import json, re, sys, torch
from strobe import Score
from strobe.device import KNOWN
from strobe.lab.binary.offline import portable_backward, sm90_backward
from strobe.problem import AttentionProblem, Dense


def adds_up(kernel):
    return re.search(r"\\b(red|atom)\\.\\S*f32|cp\\.reduce", kernel.asm["ptx"]) is not None


found = []
all_dims, shapes = json.loads(sys.argv[1])
for head_dim, head_dim_v in all_dims:
    for shape in shapes:
        score = Score(bias=torch.empty(shape, device="meta"))
        for deterministic in (False, True):
            problem = AttentionProblem(
                lengths=Dense(2, 300, 500), heads_q=4, heads_kv=4, head_dim=head_dim, head_dim_v=head_dim_v,
                dtype=torch.bfloat16, scale=0.1, score=score, phase="backward", learned=("bias",), deterministic=deterministic,
            )
            hopper = [made.kernel for made in sm90_backward(problem, KNOWN["H200"])]
            others = [made.kernel for made in portable_backward(problem, KNOWN["A100"])]
            shared = max(kernel.metadata.shared for kernel in hopper)
            found.append((deterministic, shared, any(map(adds_up, hopper)), any(map(adds_up, others))))
print(json.dumps(found))
"""


REPEATED = ((192, 128), (160, 160), (256, 256)), ((1, 4, 1, 500), (2, 1, 300, 1), (1, 1, 1, 1))
"""Head dims, and shapes of biases."""


@pytest.fixture(scope="module", params=compiling(0))
def repeated_biases(request):
    """Of each kind of repetition whether it is deterministic, the shared memory, and whether the Hopper kernels, and the
    portable ones, add up floats by atomics."""
    triton, which = request.param
    return run_compiler(REPEATED_BIAS, triton, json.dumps([picked(things, which) for things in REPEATED]))


def test_a_repeated_bias_leaves_room(repeated_biases):
    """Its gradient is summed over keys or rows with no more shared memory than there is."""
    assert max(shared for _, shared, *_ in repeated_biases) <= 227 * 1024


def test_no_atomics_in_a_deterministic_backward(repeated_biases):
    """Those of a repeated bias's gradient have no order, nor have those of dQ."""
    assert all([not deterministic] * 2 == atomics for deterministic, _, *atomics in repeated_biases)


@pytest.fixture(scope="module", params=compiling(1, 5, 9))
def audits(request):
    """Of each audited problem its config, the spills that are allowed, and the audit."""
    triton, which = request.param
    problems = [(*problem, dataclasses.asdict(config)) for problem, (config, *_) in AUDITED.items()]
    version, found = run_compiler(AUDIT, triton, json.dumps(picked(problems, which)))
    assert version.startswith("3.6") == (triton == "oldest Triton")
    measured = [(config, spills[TRITONS.index(triton)]) for config, *spills in picked(AUDITED.values(), which)]
    return [(config, spills, audit) for (config, spills), audit in zip(measured, found, strict=True)]


def shares_of(config: Config) -> list[list[int]]:
    """Columns of the shares of dQ that each group computes, always or in turn."""
    return [[config.share_columns[w], *config.share_columns[2:]] for w in range(2)]


def consumers(audit) -> list[tuple[dict, dict]]:
    """Of each group its instructions, and those in its loop over tiles."""
    assert list(audit["roles"]) == ["consumer 0", "consumer 1", "producer"]
    assert list(audit["main_loops"]) == ["consumer 0", "consumer 1"]
    return [(audit["roles"][role], counts) for role, counts in audit["main_loops"].items()]


def test_shared_memory_is_what_config_says(audits):
    """Beside it the compiler hands the roles their arguments in shared memory."""
    for config, _, audit in audits:
        assert 0 <= audit["smem_bytes"] - config.smem_bytes() <= 640, audit["name"]
        assert audit["smem_bytes"] <= KNOWN["H200"].smem_per_block


def test_ptxas_made_no_known_mistake(audits):
    for _, _, audit in audits:
        assert not audit["wrong_code"], audit["name"]


def test_spills(audits):
    """No more than were measured."""
    for _, (in_loop, bytes_), audit in audits:
        spilled = [counts.get("LDL", 0) + counts.get("STL", 0) for _, counts in consumers(audit)]
        assert max(spilled) <= in_loop, (audit["name"], spilled)
        assert audit["spill_bytes"] <= bytes_, (audit["name"], audit["spill_bytes"])


def test_tensor_cores_run_unhindered(audits):
    for config, _, audit in audits:
        assert not audit["warnings"], audit["warnings"]  # ptxas's C75xx: a wgmma made serial
        scores, dp = config.head_dim // 16, config.head_dim_v // 16  # products of 16 in K
        sums = config.tile_q // 16 * (config.products + config.products_v)
        for (counts, loop), shares in zip(consumers(audit), shares_of(config), strict=True):
            dq = 128 // 16 * len(shares)
            assert loop["HGMMA"] == scores + dp + 2 * config.folded + dq + sums, audit["name"]
            # After the loop the last tile's dQ.
            assert counts["HGMMA"] == loop["HGMMA"] + dq, audit["name"]
            assert counts["MUFU.EX2"] == loop["MUFU.EX2"] == 64 * config.tile_q // 128, audit["name"]


def test_registers_change_hands_nowhere_in_the_loop(audits):
    """What is loaded from shared memory are statistics that are not folded, what is stored dS (by STSM) and dQ."""
    for config, _, audit in audits:
        for (_, loop), shares in zip(consumers(audit), shares_of(config), strict=True):
            assert not {"SHFL", "PRMT"} & set(loop), audit["name"]
            assert loop.get("LDS", 0) == (0 if config.folded else config.tile_q // 4), audit["name"]
            assert loop["STSM"] == config.tile_q // 16, audit["name"]
            assert loop["STS"] == 64 * sum(shares) // (128 * 4), audit["name"]
            assert loop["F2FP"] == 2 * 64 * config.tile_q // (128 * 2), audit["name"]  # P and dS are rounded in pairs


def test_roles_do_their_own_work_only(audits):
    for config, _, audit in audits:
        boxes, boxes_v = -(-config.head_dim // 64), -(-config.head_dim_v // 64)
        for (counts, loop), shares in zip(consumers(audit), shares_of(config), strict=True):
            assert "UTMALDG" not in counts
            assert (counts["UTMAREDG"], loop["UTMAREDG"]) == (2 * len(shares), len(shares)), audit["name"]
            # What was summed, or zeros for keys that no row sees.
            assert counts["UTMASTG"] == 2 * (config.products + config.products_v), audit["name"]
        producer = audit["roles"]["producer"]
        assert not {"HGMMA", "MUFU.EX2", "UTMASTG", "UTMAREDG"} & set(producer), audit["name"]
        # K, two halves of V; Q, dO and statistics of the first tile and of the others.
        assert producer["UTMALDG"] == boxes + 2 * boxes_v + 2 * (boxes + boxes_v + 1), audit["name"]


SPLIT = """
import dataclasses, json, sys, torch
from strobe.kernels.sm90.backward_config import SplitConfig
from strobe.lab.binary.offline import audit_sm90_backward
from strobe.masks import Causal, Full
audits = []
problems = (256, 256, Full()), (256, 256, Causal()), (192, 128, Causal()), (64, 64, Full()), (96, 96, Causal())
which = json.loads(sys.argv[1])
for *head_dims, mask in problems if which is None else [problems[i] for i in which]:
    config = SplitConfig(*head_dims)
    for audit, buffers in zip(audit_sm90_backward(head_dims, mask, config=config), (config.keys_map(), config.rows_map())):
        audits.append((dataclasses.asdict(audit), sum(buffer.bytes for buffer in buffers), *head_dims))
print(json.dumps(audits))
"""


@pytest.mark.parametrize("by", compiling(1, 3))
def test_the_two_passes(by):
    """No product is made serial, and each role computes its own. Head dim 256 keeps 32 bytes in local memory on the newest
    Triton, the others none."""
    triton, which = by
    for audit, smem_bytes, head_dim, head_dim_v in run_compiler(SPLIT, triton, json.dumps(which)):
        name, roles = audit["name"], audit["roles"]
        assert audit["spill_bytes"] <= (32 if head_dim == 256 and triton == "installed Triton" else 0), name
        assert not audit["warnings"] and not audit["wrong_code"], name
        assert 0 <= audit["smem_bytes"] - smem_bytes <= 640, name
        chunks, chunks_v = (2 if dim in (96, 192) else 1 for dim in (head_dim, head_dim_v))
        scores, dp, sums, sums_v = head_dim // 16, head_dim_v // 16, 4 * chunks, 4 * chunks_v
        if "keys pass" in name:  # of the first tile, of the loop, of the last tile
            assert roles["dv"]["HGMMA"] == 2 * (scores + sums_v), name
            assert roles["dk"]["HGMMA"] == 2 * (dp + sums), name
            assert roles["dv"]["MUFU.EX2"] == 2 * 32 and "MUFU.EX2" not in roles["dk"], name
            for role in ("dv", "dk"):  # nothing that threads write is read by the TMA
                assert "MEMBAR" not in audit["main_loops"][role], name
        else:
            for role in ("dq 0", "dq 1"):
                assert roles[role]["HGMMA"] == scores + dp + 2 * sums, name
                assert roles[role]["MUFU.EX2"] == 32, name


STORED = """
import dataclasses, json, sys, torch
from dataclasses import replace
from strobe.kernels.sm90.backward_config import DqConfig, choose
from strobe.lab.binary.offline import audit_sm90_backward, problem_of
from strobe.masks import Causal
audits, problems = [], ((256, 256, Causal()), (128, 128, Causal()), (192, 128, Causal()))
which = json.loads(sys.argv[1])
for *head_dims, mask in problems if which is None else [problems[i] for i in which]:
    problem = replace(problem_of(head_dims, mask, torch.bfloat16), phase="backward", deterministic=True)
    config = choose(problem)
    config = config if config.stored else replace(config, order=0, stored=True)  # as of packed sequences
    smem_bytes = [buffers.smem_bytes() for buffers in (config, DqConfig(*head_dims))]
    for audit, bytes_ in zip(audit_sm90_backward(head_dims, mask, config=config), smem_bytes, strict=True):
        audits.append((dataclasses.asdict(audit), bytes_, *head_dims))
print(json.dumps(audits))
"""


@pytest.mark.parametrize("by", compiling(0, 1))
def test_where_ds_is_stored(by):
    """It leaves by the TMA, once a tile of each role that makes it, with one fence; and dQ is one product for each block."""
    triton, which = by
    for audit, smem_bytes, head_dim, _head_dim_v in run_compiler(STORED, triton, json.dumps(which)):
        name, roles, loops = audit["name"], audit["roles"], audit["main_loops"]
        assert not audit["warnings"] and not audit["wrong_code"], name
        assert 0 <= audit["smem_bytes"] - smem_bytes <= 640, name
        newest = {256: 128, 192: 440}.get(head_dim, 300)
        assert audit["spill_bytes"] <= (newest if triton == TRITONS[1] else 440 if head_dim == 192 else 0), name
        assert not any("UTMAREDG" in counts for counts in roles.values()), name
        if name.endswith("dQ"):
            chunks = 2 if head_dim == 192 else 1
            for role in ("dq 0", "dq 1"):
                assert loops[role]["HGMMA"] == 4 * chunks and roles[role]["HGMMA"] == 4 * chunks, name
        else:
            for role in ("dk",) if head_dim == 256 else ("consumer 0", "consumer 1"):
                assert loops[role]["UTMASTG"] == loops[role]["MEMBAR"] == 1, name


ORDERED = """
import dataclasses, json, sys, torch
from dataclasses import replace
from strobe.kernels.sm90.backward_config import choose
from strobe.lab.binary.offline import audit_sm90_backward, problem_of
from strobe.masks import Causal, Full, Window
audits, which = [], json.loads(sys.argv[1])
ways = (Full(), 1, False), (Causal(), -1, False), (Window(1023, 0), -1, False)
ways = [(dim, *way) for dim in (64, 96, 128) for way in ways] + [(dim, Causal(), 1, True) for dim in (64, 128)]
for head_dim, mask, order, downwards in ways if which is None else [ways[i] for i in which]:
    config = choose(replace(problem_of((head_dim, head_dim), mask, torch.bfloat16), phase="backward"))
    config = replace(config, stored=False, order=order, downwards=downwards)
    [audit] = audit_sm90_backward((head_dim, head_dim), mask, config=config)
    audits.append((dataclasses.asdict(audit), head_dim, config.smem_bytes()))
print(json.dumps(audits))
"""


@pytest.mark.parametrize("by", compiling(1, 7))
def test_where_dq_has_an_order(by):
    """The groups do as ever, but for additions, and stores where a block is the first, which are the writer's. It has no
    barrier of memory; the teller's loop has one, of the CTA and of the GPU."""
    triton, which = by
    audits = run_compiler(ORDERED, triton, json.dumps(which))
    for audit, head_dim, smem_bytes in audits:
        name, roles = audit["name"], audit["roles"]
        assert not audit["warnings"] and not audit["wrong_code"], name
        assert 0 <= audit["smem_bytes"] - smem_bytes <= 720, name
        assert audit["spill_bytes"] <= (420 if triton == TRITONS[1] else 100), name
        assert list(roles) == ["consumer 0", "consumer 1", "producer", "writer", "teller"], name
        writer, teller = roles["writer"], roles["teller"]
        assert writer["UTMAREDG"] == writer["UTMASTG"] == 2 and "MEMBAR" not in writer and teller["MEMBAR"] == 2, name
        assert not {"HGMMA", "UTMALDG"} & {*writer, *teller} and "UTMASTG" not in teller, name
        for group in range(2):
            loop = audit["main_loops"][f"consumer {group}"]
            assert loop["HGMMA"] == {64: 34, 96: 36, 128: 34}[head_dim] and loop["MEMBAR"] == 2, name
            assert loop.get("LDL", 0) + loop.get("STL", 0) <= 10, name
            assert "UTMAREDG" not in roles[f"consumer {group}"], name


COUNT = """
import sys, torch
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.kernels.sm90 import backend, backward_launch
from strobe.lab.binary.offline import pretend_gpu
from strobe.masks import Causal
from strobe.problem import AttentionProblem, Dense


def compile_all(batch, n_q, n_kv, heads, heads_kv):
    lengths = Dense(batch, n_q, n_kv)
    problem = AttentionProblem(lengths, heads, heads_kv, 128, 128, torch.bfloat16, 0.1, mask=Causal(), phase="backward")
    tensors = unfilled(problem, backend.buffers(problem, KNOWN["H200"]))
    tensors.dlse = tensors.lse
    calls = backend.calls(problem, tensors, KNOWN["H200"])[:3]
    for call in calls:
        call.compile()
    return [call.kernel for call in calls]


with pretend_gpu(90):
    for sizes in eval(sys.argv[1]):
        kernels = compile_all(*sizes)
    print([len(cache) for kernel in kernels for cache, *_ in kernel.device_caches.values()])
"""

LONG = (1, 4096, 4096, 4, 4), (1, 1999, 1999, 1, 1), (3, 1717, 333, 4, 4), (16, 1512, 4096, 16, 1), (5, 2048, 2049, 3, 3)
BRIEF = (1, 1024, 1024, 4, 4), (1, 1, 1, 1, 1), (3, 17, 333, 4, 4), (5, 512, 1000, 3, 3)
BRIEF_GROUPS = (1, 1024, 1024, 4, 2), (1, 1, 1, 2, 1), (3, 17, 333, 16, 1)


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("sizes", [LONG, BRIEF, BRIEF_GROUPS])
def test_lengths_batch_and_heads_compile_nothing(triton, sizes):
    """Each of the three kernels of one config and one kind of mask is one kernel; long causal sequences have a config of their
    own, and so have short ones with groups of heads."""
    assert run_compiler(COUNT, triton, repr(sizes)) == [1, 1, 1]


PLANS = """
import contextlib, ctypes, dataclasses, json, struct, torch
import strobe
from strobe.arguments import options_of
from strobe.call import launcher, launches as launching, torch_internals
from strobe.call.options import describe, operands_of
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.kernels.sm90 import backend, backward_launch
from strobe.lab.binary.offline import pretend_gpu
from strobe.problem import Operands, Upstream, lse_shape

kernels, launches = [], []


class Recorder:
    def launch(self, config, function, pointers, extra):
        compiled = kernels[function.value - 1]
        sizes = launcher.ptx_sizes(compiled.asm["ptx"], compiled.name)
        launches.append((compiled.name, [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes)]))
        return 0

    def call(self, name, start, element_type, rank, address, *rest):
        ctypes.memmove(start, struct.pack("<Q", address) * 16, 128)


recorder = Recorder()
launcher._driver = lambda: recorder
launcher.function = lambda compiled, device: (kernels.append(compiled), len(kernels))[1]
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.current_device = lambda: 0
torch_internals.is_capturing = lambda: False
launching._has_driver = lambda x: True
launching.arch_of = lambda device: KNOWN["H200"]


def described(tensors, options, learned):
    q, k, v, out, lse, dout, dlse, *others = [None if x is None else x.detach() for x in tensors]
    operands, upstream = Operands(q, k, v, *others), Upstream(out, lse, dout, dlse)
    return describe(operands, options, "backward", learned), operands, upstream


def expected(tensors, options, learned, gradients):
    "What Triton would give the kernels: addresses of what is given as numbers, the other tensors as they are."
    problem, operands, upstream = described(tensors, options, learned)
    given = operands._asdict() | upstream._asdict()
    every = launching.allocated(backend.buffers(problem, KNOWN["H200"]), given)
    every.dq, every.dk, every.dv = gradients[:3]
    if gradients.bias is not None:
        every.dbias = gradients.bias
    known = {id(x) for x in (*operands, *upstream, *gradients) if x is not None}
    for call in backend.calls(problem, every, KNOWN["H200"]):
        compiled = launcher.compiled_call(call.kernel, call.grid, *call.arguments, **call.keywords)
        values = []
        for code, value in launcher.parameters(compiled.compiled, launcher.all_arguments(compiled)):
            times = 1
            if isinstance(value, launcher.Descriptor):
                code, value, times = "Q", value.given.base, 16
            if isinstance(value, torch.Tensor):
                value = value.data_ptr() if id(value) in known else value
            values.append((value, times) if isinstance(value, torch.Tensor) else struct.pack(f"<{code}", value or 0) * times)
        yield compiled.compiled.name, values


def check(head_dim, dlse=True, packed=False, learned=(), **keywords):
    q, k, v = torch.zeros(3, 2, 192, 4, head_dim, dtype=torch.bfloat16).unbind()
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    options = options_of(q, k, v, **keywords)
    if options.dropout:
        options = dataclasses.replace(options, seed=torch.zeros(1, dtype=torch.int64))
    lse = torch.zeros(lse_shape(describe(operands_of(q, k, v, options), options)))
    dlse = torch.zeros_like(lse) if dlse else None
    tensors = (q, k, v, torch.zeros_like(q), lse, torch.zeros_like(q), dlse, *options.tensors())
    problem, operands, upstream = described(tensors, options, learned)
    plan = launching.prepared(backend, problem, operands, upstream)
    assert isinstance(plan._launches, launcher.PreparedLaunches)
    later = tuple(None if x is None else x.clone() for x in tensors)
    launches.clear()
    gradients = plan.backward(5, tuple(x.data_ptr() for x in later if x is not None), later)
    assert [x.shape for x in gradients[:3]] == [x.shape for x in later[:3]]
    assert (gradients.bias is None, gradients.sinks is None) == ("bias" not in learned, "sinks" not in learned)
    names, addresses = [], {}
    for (name, got), (same, want) in zip(launches, expected(later, options, learned, gradients), strict=True):
        names.append(name)
        assert name == same
        for given, value in zip(got, want, strict=True):
            if isinstance(value, tuple):  # a tensor that kernels share: the same place for all of them
                value, times = value
                assert given == addresses.setdefault(id(value), given[:8]) * times, name
            else:
                assert given == value, name
    taken = {struct.pack("<Q", x.data_ptr()) for x in (*later, *gradients[:4]) if x is not None}
    assert len({*addresses.values()} | taken) == len(addresses) + len(taken)
    return names


cu, used = torch.tensor([0, 100, 384], dtype=torch.int32), torch.tensor([90, 190], dtype=torch.int32)
document = torch.arange(192, dtype=torch.int64).div(50, rounding_mode="floor").expand(2, 192).contiguous()
mask, slopes, sinks = strobe.Causal() & strobe.Document(document), torch.ones(2, 4), torch.ones(4)
bias = torch.zeros(2, 1, 192, 192)
changed = strobe.Score(alibi=slopes, bias=bias, sinks=sinks)
with pretend_gpu(90):
    print(json.dumps([
        check(64),
        check(64, packed=True, cu_seqlens_q=cu, cu_seqlens_kv=cu, seqused_q=used, seqused_kv=used, mask=strobe.Causal()),
        check(128, mask=mask, score=changed, seqused_kv=used),
        check(256, False, mask=mask, score=changed, seqused_q=used),
        check(64, dropout_p=0.3),
        check(128, mask=mask, score=changed, learned=("bias", "sinks")),
        check(160, mask=strobe.Causal()),
        check(128, deterministic=True, mask=strobe.Causal()),
        check(64, deterministic=True),
        check(256, mask=strobe.Causal()),
    ]))
"""


@pytest.mark.parametrize("triton", [TRITONS[0], pytest.param(TRITONS[1], marks=pytest.mark.exhaustive)])
def test_a_plan_launches_with_the_tensors_of_its_call(triton):
    """Whatever tensors there are, those of a later call reach the kernels where Triton would put them, one given twice too."""
    one_pass, two_passes = ["prepare", "backward_kernel", "convert"], ["prepare", "keys_kernel", "rows_kernel"]
    stored, two_stored = ["prepare", "backward_kernel", "dq_kernel"], ["prepare", "keys_kernel", "dq_kernel"]
    assert run_compiler(PLANS, triton) == [
        one_pass,
        ["list_rows_and_keys", *one_pass, "redo_noted"],
        ["spans_kernel", *one_pass, "redo_noted"],
        ["spans_kernel", "spans_kernel", *two_passes, "redo_noted"],
        one_pass,
        ["spans_kernel", *one_pass, "redo_noted"],
        [*stored, "redo_noted"],
        [*one_pass, "redo_noted"],
        one_pass,
        [*two_stored, "redo_noted"],
    ]


# ---- dispatch


def problem(**changes) -> AttentionProblem:
    plain = {"lengths": Dense(2, 512, 512), "heads_q": 4, "heads_kv": 2, "head_dim": 128, "head_dim_v": 128}
    return AttentionProblem(**{**plain, "dtype": torch.bfloat16, "scale": 0.1, "phase": "backward", **changes})


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("head_dim_v", [None, 8, 64, 96, 128, 256])
@pytest.mark.parametrize("mask", [strobe.Full(), strobe.Causal()], ids=str)
def test_every_head_dim_has_a_config(head_dim, head_dim_v, mask):
    head_dim_v = head_dim_v or head_dim
    given = problem(head_dim=head_dim, head_dim_v=head_dim_v, mask=mask)
    assert backend.refuses(given, KNOWN["H200"]) is None
    config = backend.config(given, KNOWN["H200"])
    assert head_dim <= config.head_dim and head_dim_v <= config.head_dim_v
    assert config.smem_bytes() + 640 <= KNOWN["H200"].smem_per_block
    assert isinstance(config, SplitConfig) == (head_dim > 192 or head_dim_v > (160 if 128 < head_dim <= 160 else 128))
    if isinstance(config, Config):
        assert config.turns == (config.head_dim <= 128)
        assert config.serial == (head_dim > 128)


@pytest.mark.parametrize("audited", AUDITED, ids=str)
def test_what_is_audited_is_what_runs(audited):
    (head_dim, head_dim_v), mask, *_ = audited
    mask = eval(mask, vars(strobe))
    chosen = choose(problem(head_dim=head_dim, head_dim_v=head_dim_v, mask=mask))
    # What runs where dS cannot be stored, sums come in any order, and each head has its own keys.
    plain = {} if isinstance(chosen, SplitConfig) else {"order": 0, "downwards": False}
    assert dataclasses.replace(chosen, stored=False, **plain) == AUDITED[audited][0]


def _not_after(batch, head, q_index, kv_index):
    return kv_index <= q_index


def _twice(score, batch, head, q_index, kv_index):
    return 2.0 * score


def _two(score, batch, head, q_index, kv_index):
    return 2.0 + 0.0 * score


@pytest.mark.parametrize("changes", [{"score": strobe.Score(softcap=3.0)}, {"dropout": 0.1}], ids=str)
def test_what_takes_registers_gets_smaller_tiles(changes):
    plain, changed = (backend.config(problem(head_dim=64, head_dim_v=64, **more), KNOWN["H200"]) for more in ({}, changes))
    assert (plain.tile_q, changed.tile_q) == (128, 64)
    config = backend.config(problem(**changes), KNOWN["H200"])
    assert not config.turns and not config.folded


@pytest.mark.parametrize("changes, stored", [
    ({}, False),
    ({"deterministic": True}, False),
    ({"deterministic": True, "mask": strobe.Causal()}, False),
    ({"deterministic": True, "score": strobe.Score(bias=torch.zeros(1, 1, 512, 512)), "learned": ("bias",)}, True),
    ({"deterministic": True, "mask": strobe.Document(torch.zeros(2, 512, dtype=torch.int32))}, False),
    ({"deterministic": True, "lengths": Dense(1, 32768, 32768), "score": strobe.Score(softcap=3.0)}, False),
    ({"deterministic": True, "lengths": Dense(1, 32768, 32768), "mask": strobe.Window(1000, 0)}, False),
    ({"deterministic": True, "lengths": Dense(9, 16384, 16384)}, False),
    ({"deterministic": True, "lengths": Dense(9, 8192, 8192), "mask": strobe.Causal()}, False),
    ({"deterministic": True, "lengths": Dense(9, 8192, 8192), "mask": strobe.Causal(), "heads_kv": 4}, False),
    ({"deterministic": True, "lengths": Varlen(9, 9000, 9000, 1000, 1000)}, True),
    ({"deterministic": True, "lengths": Varlen(99, 20000, 20000, 8000, 8000), "score": strobe.Score(softcap=3.0)}, False),
    ({"head_dim": 192}, True),
    ({"head_dim": 192, "lengths": Dense(1, 32768, 32768)}, False),
    ({"head_dim": 192, "partial": True}, False),
    ({"head_dim": 192, "lengths": Varlen(9, 9000, 9000, 1000, 1000)}, False),
    ({"head_dim": 192, "head_dim_v": 64}, False),
    ({"head_dim": 256}, True),
    ({"head_dim": 256, "score": strobe.Score(bias=torch.zeros(1, 1, 512, 512)), "learned": ("bias",)}, False),
])  # fmt: skip
def test_where_ds_may_be_stored(changes, stored):
    """Head dim 256, (192, 128) but packed sequences, and what must be deterministic, if there is memory for a head, or few
    turns of packed sequences."""
    given = problem(**changes)
    config = choose(given)
    assert config.stored == stored
    one_pass = stored or not given.deterministic or getattr(config, "order", 0) != 0
    assert isinstance(config, Config) == (given.head_dim <= 192 and one_pass)
    assert ("stores dS" in backend.origin(given, KNOWN["H200"])) == stored


DOWN = "downwards"


@pytest.mark.parametrize("changes, order", [
    ({}, 1),
    ({"mask": strobe.Causal()}, DOWN),
    ({"mask": strobe.Window(100, 0)}, -1),
    ({"mask": strobe.Window(100, None)}, 1),
    ({"mask": strobe.Prefix(100)}, -1),
    ({"lengths": Dense(1, 65536, 65536)}, 1),
    ({"head_dim": 40, "head_dim_v": 40}, 1),
    ({"seqused": True}, 1),
    ({"partial": True}, 1),
    ({"deterministic": False}, 0),
    ({"deterministic": False, "mask": strobe.Window(2048, 0)}, -1),
    ({"deterministic": False, "mask": strobe.Window(2049, 0)}, 0),
    ({"deterministic": False, "mask": strobe.Window(1025, 0), "head_dim": 128, "head_dim_v": 128}, 0),
    ({"deterministic": False, "mask": strobe.Causal(), "heads_kv": 4, "lengths": Dense(2, 1024, 1024)}, -1),
    ({"deterministic": False, "mask": strobe.Causal(), "heads_kv": 4, "lengths": Dense(2, 1024, 1025)}, 0),
    ({"deterministic": False, "mask": strobe.Causal(), "heads_kv": 2, "lengths": Dense(2, 2048, 2048)}, 0),
    ({"deterministic": False, "mask": strobe.Causal(), "heads_q": 5, "heads_kv": 1, "lengths": Dense(2, 2048, 2048)}, DOWN),
    ({"deterministic": False, "head_dim": 96, "head_dim_v": 96, "lengths": Dense(2, 1024, 1024)}, 1),
    ({"deterministic": False, "head_dim": 96, "head_dim_v": 96, "lengths": Dense(2, 1023, 1023)}, 0),
    ({"deterministic": False, "mask": strobe.Window(100, 0), "lengths": Varlen(9, 9000, 9000, 1000, 1000)}, 0),
    ({"mask": strobe.Causal(), "heads_kv": 4}, -1),
    ({"lengths": Varlen(9, 9000, 9000, 1000, 1000)}, 0),
    ({"lengths": Varlen(99, 20000, 20000, 8000, 8000)}, DOWN),
    ({"mask": strobe.Document(torch.zeros(2, 512, dtype=torch.int32))}, 0),
    ({"mask": strobe.Visible(_not_after)}, 0),
    ({"score": strobe.Score(softcap=3.0)}, 0),
    ({"head_dim": 96, "head_dim_v": 96}, 1),
    ({"head_dim": 96, "head_dim_v": 96, "heads_kv": 4}, 1),
    ({"head_dim": 96, "head_dim_v": 96, "heads_kv": 4, "mask": strobe.Causal()}, -1),
    ({"head_dim": 80, "head_dim_v": 80, "heads_kv": 4, "mask": strobe.Causal(), "lengths": Dense(1, 4096, 4096)}, -1),
    ({"head_dim": 96, "head_dim_v": 96, "heads_kv": 4, "mask": strobe.Window(100, 0), "lengths": Dense(1, 4096, 4096)}, -1),
    ({"head_dim": 64, "head_dim_v": 128, "heads_kv": 4}, 1),
    ({"head_dim": 128, "head_dim_v": 128}, 1),
    ({"head_dim": 128, "head_dim_v": 128, "mask": strobe.Causal()}, DOWN),
    ({"head_dim": 128, "head_dim_v": 128, "mask": strobe.Causal(), "heads_kv": 4}, -1),
    ({"head_dim": 128, "head_dim_v": 128, "mask": strobe.Window(100, 0)}, -1),
    ({"head_dim": 128, "head_dim_v": 128, "lengths": Dense(4, 8192, 8192), "mask": strobe.Causal()}, DOWN),
    ({"head_dim": 128, "head_dim_v": 128, "partial": True}, 1),
    ({"head_dim": 128, "head_dim_v": 128, "lengths": Dense(1, 32768, 32768)}, 1),
    ({"head_dim": 128, "head_dim_v": 128, "heads_q": 28, "lengths": Dense(2, 8192, 8192), "mask": strobe.Causal()}, DOWN),
    ({"head_dim": 128, "head_dim_v": 128, "lengths": Varlen(99, 20000, 20000, 8000, 8000), "mask": strobe.Prefix(9)}, DOWN),
    ({"head_dim": 192, "head_dim_v": 128}, 0),
])  # fmt: skip
def test_where_dq_may_have_an_order(changes, order):
    given = problem(**{"head_dim": 64, "head_dim_v": 64, "deterministic": True, **changes})
    config = choose(given)
    found = getattr(config, "order", 0)
    assert (DOWN if found == 1 and config.downwards else found) == order
    assert ("add to dQ in an order" in backend.origin(given, KNOWN["H200"])) == (order != 0)


@pytest.mark.parametrize("changes, downwards", [
    ({"heads_q": 28, "heads_kv": 4, "lengths": Dense(1, 8192, 8192)}, True),
    ({"heads_q": 40, "heads_kv": 8, "lengths": Dense(1, 8192, 8192)}, False),
    ({"heads_q": 28, "heads_kv": 28, "lengths": Dense(1, 1100, 1100)}, False),
    ({"heads_q": 28, "heads_kv": 4, "lengths": Dense(1, 8192, 8192), "head_dim": 64, "head_dim_v": 64}, False),
])  # fmt: skip
def test_a_single_bundle_of_groups_begins_at_the_last_rows(changes, downwards):
    config = choose(problem(**{"head_dim": 128, "head_dim_v": 128, "mask": strobe.Causal(), **changes}))
    assert config.order == 0 and config.downwards == downwards


@pytest.mark.parametrize("changes, cleared", [
    ({}, False),
    ({"deterministic": False}, True),
    ({"lengths": Dense(2, 600, 500)}, False),
    ({"lengths": Dense(2, 600, 500), "mask": strobe.Causal()}, True),
    ({"lengths": Dense(2, 500, 600), "mask": strobe.Causal()}, False),
    ({"mask": strobe.Window(100, 0)}, False),
    ({"seqused": True}, True),
    ({"lengths": Varlen(99, 20000, 20000, 8000, 8000)}, True),
])  # fmt: skip
def test_sums_are_cleared_where_none_may_be_the_first(changes, cleared):
    given = problem(**{"head_dim": 64, "head_dim_v": 64, "deterministic": True, **changes})
    config = choose(given)
    tensors = unfilled(given, backward_launch.buffers(given, config))
    call = backward_launch.prepare_call(given, tensors, config)
    assert (call.keywords["accumulator"] is not None) == cleared


def test_packed_sequences_without_keys_have_a_config():
    """No kernel runs for them, but `strobe.explain` says which would."""
    problem = AttentionProblem(Varlen(2, 30, 0, 20, 0), 4, 2, 64, 64, torch.bfloat16, 0.1, strobe.Causal(), phase="backward")
    found = explain_problem(problem, KNOWN["H200"])
    assert found.chosen == "sm90" and found.config == choose(problem)


def test_an_lse_by_the_scale_must_be_a_number():
    for head_dim in (64, 128):
        folded = [choose(problem(head_dim=head_dim, head_dim_v=head_dim, scale=scale)).folded for scale in (1e-31, 1e-29)]
        assert folded == [False, True]


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": torch.float32}, "float16 and bfloat16, not float32"),
    ({"score": strobe.Score(function=_twice)}, "needs the derivative of the score function _twice"),
    ({"lengths": Dense(2**16, 4096, 512), "heads_q": 2}, "fewer than 2\\^29 of them in its backward, not 536870912"),
    ({"scale": -0.1}, "positive scale.*not -0.1"),
    ({"unaligned": ("dout",)}, "multiples of 16 bytes.*which dout lacks"),
])  # fmt: skip
def test_refusals(changes, reason):
    assert re.search(reason, backend.refuses(problem(**changes), KNOWN["H200"]))


@pytest.mark.parametrize("changes", [
    {"lengths": Varlen(3, 500, 600, 200, 300)},
    {"mask": strobe.Window(100, 20)},
    {"mask": strobe.Prefix(100)},
    {"score": strobe.Score(softcap=3.0)},
    {"score": strobe.Score(softcap=3.0), "scale": -0.1},
    {"score": strobe.Score(alibi=torch.ones(4))},
    {"score": strobe.Score(sinks=torch.zeros(4)), "learned": ("sinks",)},
    {"mask": strobe.Document(torch.zeros(2, 512, dtype=torch.int32))},
    {"mask": strobe.Visible(_not_after)},
    {"score": strobe.Score(bias=torch.zeros(1, 1, 512, 512)), "learned": ("bias",)},
    {"score": strobe.Score(function=_twice, function_gradient=_two)},
    {"dropout": 0.1},
    {"seqused": True},
    {"deterministic": True},
], ids=str)  # fmt: skip
def test_what_it_takes(changes):
    assert backend.refuses(problem(**changes), KNOWN["H200"]) is None


def test_other_gpus_are_refused():
    for name in ("T4", "A100", "RTX 4090", "B200"):
        assert "needs a Hopper GPU" in backend.refuses(problem(), KNOWN[name])
