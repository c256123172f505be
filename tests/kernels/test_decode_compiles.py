"""What the compiler makes of the decode kernel, for GPUs that are not there, and that its launches can be prepared."""

import json

import pytest
from tritons import TRITONS, VERSIONS, answer_by, output_of

PROGRAM = """
import json, sys, torch, triton
from dataclasses import replace
from strobe.call import launcher
from strobe.device import KNOWN
from strobe.kernels.common.call import Tensors
from strobe.kernels.decode import launch, wide_heads
from strobe.kernels.decode.choice import of_converted, of_long_steps, of_mma, of_one_group, of_wgmma
from strobe.kernels.decode.heads_abreast import heads_abreast_of
from strobe.kernels.decode.shares import of_shares
from strobe.kernels.decode.sizes import OVERHEAD
from strobe.lab.binary.offline import pretend_gpu
from strobe.lab.binary.sass import audit
from strobe.serving.problem import DecodeOperands, DecodeOptions, describe

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

made = []
for arch, group, n_q, dim, page, cache, beside in json.loads(sys.argv[1]):
    arch, i32 = KNOWN[arch], torch.int32
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}[cache]
    fixed, beside = beside.startswith("fixed "), beside.removeprefix("fixed ")
    batch, latent = {"few": 4, "one request": 1}.get(beside, 9), dim == 576
    dim_v, heads_kv = 512 if latent else dim, 1 if latent else 2
    q, k = meta(batch, n_q, heads_kv * group, dim), meta(40, page or 512, heads_kv, dim, dtype=kind)
    v = k[..., :dim_v] if latent else meta(*k.shape, dtype=kind)
    table, out = meta(batch, 8, dtype=i32) if page else None, meta(batch, n_q, heads_kv * group, dim_v)
    operands = DecodeOperands(q, k, v, meta(batch, dtype=i32), table, out=out)
    if cache == "e4m3":
        operands = operands._replace(k_scale=meta(batch, 2, dtype=torch.float32), v_scale=meta(batch, 2, dtype=torch.float32))
    if beside == "all":
        operands = operands._replace(leftpad=meta(batch, dtype=i32), tree=meta(batch, n_q, n_q, dtype=torch.bool),
                                     alibi=meta(2 * group, dtype=torch.float32), sinks=meta(2 * group, dtype=torch.float32))
    softcap, left = (30.0, 100) if beside == "all" else (0.0, None)
    options = DecodeOptions(n_q, dim_v, latent, 0.1, left, 0, softcap, True, fixed, None)
    problem = describe(operands, options)
    kinds = {"wgmma": of_wgmma, "one group": of_one_group, "long": of_long_steps, "converted": of_converted}
    kinds["wide"] = wide_heads.of_wgmma
    make = kinds.get(beside, of_shares if "request" in beside else of_mma)
    config = make(problem, arch)
    config = replace(config, heads_abreast=heads_abreast_of(problem, arch, config))
    buffers = launch.buffers(problem, arch, config)
    others = {name: meta(*x.shape, dtype=x.dtype) for name, x in {**buffers.made, **buffers.shared}.items()}
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    (call,) = launch.calls(problem, Tensors(**given, **others), arch, config)
    with pretend_gpu(arch.capability):
        compiled = call.compile()
    found, ptx = audit(compiled, "decode", 0.0, ()), compiled.asm["ptx"]
    ready = launcher.Call(call.kernel, call.grid, (), call.keywords, compiled)
    known = launcher.parameters(compiled, launcher.all_arguments(ready))
    there = {id(x) for x in (*given.values(), *others.values())}
    assert config.late == (fixed and page == 256)
    made.append({
        "wrong_code": found.wrong_code, "registers": found.registers, "allowed": config.registers, "spills": found.spill_bytes,
        "smem": compiled.metadata.shared, "smem_said": config.smem, "overhead": OVERHEAD, "ldmatrix": ptx.count("ldmatrix"),
        "copies": ptx.count("cp.async.cg"), "narrow": ptx.count("cp.async.ca"),
        "posted": ptx.count("st.async"), "wgmma": ptx.count("wgmma.mma_async"), "tma": ptx.count("cp.async.bulk.tensor"),
        "room": arch.smem_per_sm // (8 // config.warps if config.shares > 0 else config.ctas), "clustered": config.clustered,
        "strangers": sum(isinstance(p.value, torch.Tensor) and id(p.value) not in there for p in known),
    })
print(json.dumps({"triton": triton.__version__, "made": made}))
"""

FEW = [("H200", 8, 4, 128, 64, "bf16", ""), ("H200", 8, 4, 128, 64, "bf16", "one group")]
ALONE = [
    *(("H200", 8, n_q, 128, 64, "bf16", f"{number} request{'s' * (number == 'several')}") for number in ("one", "several")
      for n_q in (1, 4)),
]  # fmt: skip
SOME = [
    *FEW, *ALONE, ("H200", 8, 1, 128, 64, "bf16", ""), ("H200", 1, 4, 128, None, "bf16", ""),
    *(("H200", 8, n_q, 128, None, "bf16", "long") for n_q in (1, 4)),
    ("A100", 4, 1, 64, 16, "bf16", ""), ("H200", 8, 16, 128, 64, "bf16", "wgmma"),
    ("H200", 8, 16, 128, 16, "bf16", "fixed bits"), ("H200", 8, 4, 128, 256, "bf16", "fixed one group"),
]  # fmt: skip
OTHER_DIMS = [
    ("H200", 8, 4, 256, 16, "bf16", "one group"), ("H200", 8, 8, 256, 64, "bf16", "wide"),
    ("H200", 8, 700, 256, 64, "bf16", "wide"), ("H200", 8, 700, 256, 16, "bf16", "wide"),
    ("H200", 8, 8, 192, 64, "bf16", "one group"), ("H200", 8, 700, 192, 64, "bf16", "wide"),
    ("H200", 8, 700, 136, 16, "bf16", "wide"),
    ("H200", 8, 1, 256, 64, "bf16", "one request"), ("H200", 8, 4, 256, 64, "e4m3", "converted"),
    ("H200", 8, 1, 256, 64, "e4m3", ""), ("L4", 8, 1, 256, 64, "bf16", ""), ("L4", 8, 4, 256, 64, "e4m3", ""),
    ("A100", 8, 4, 256, 64, "bf16", ""), ("A100", 8, 16, 256, 64, "bf16", ""),
    ("H200", 8, 1, 64, 64, "bf16", "one request"), ("H200", 8, 1, 64, 64, "bf16", "several requests"),
    ("H200", 8, 4, 64, None, "bf16", "long"),
]  # fmt: skip
MORE = [
    ("H200", 8, 4, 128, 64, "bf16", "wgmma"), ("H200", 8, 16, 128, 16, "bf16", "wgmma"),
    ("H200", 8, 16, 96, 64, "bf16", "wgmma"), ("H200", 8, 4, 160, 16, "bf16", "one group"),
    ("H200", 8, 4, 128, 16, "bf16", "wgmma"), ("H200", 8, 4, 128, 256, "bf16", "fixed wgmma"),
    ("H200", 8, 16, 128, 256, "bf16", "fixed wgmma"),
    ("H200", 8, 4, 64, None, "bf16", "wgmma"), ("H200", 128, 1, 576, 64, "bf16", "wgmma"),
    ("H200", 16, 1, 576, 64, "bf16", "wgmma"), ("H200", 128, 2, 576, 64, "bf16", "wgmma"),
    ("H200", 4, 1, 128, 1, "bf16", "fixed bits"), ("H200", 8, 16, 128, 64, "bf16", ""), ("H200", 2, 1, 256, 64, "bf16", ""),
    ("H200", 8, 8, 128, 64, "e4m3", "converted"), ("H200", 8, 17, 128, 16, "e4m3", "converted"),
    ("H200", 8, 1, 128, 64, "e4m3", ""), ("H200", 8, 4, 128, 16, "e4m3", ""), ("H200", 8, 4, 64, None, "e4m3", "all"),
    ("H200", 8, 1, 128, 64, "e5m2", ""), ("H200", 8, 4, 128, 64, "bf16", "all"), ("A100", 8, 1, 128, None, "bf16", ""),
    ("H200", 7, 1, 80, 16, "bf16", ""), ("H200", 8, 1, 128, 64, "bf16", "few"),
    ("H200", 8, 1, 128, 16, "bf16", "one group"), ("A100", 4, 1, 576, 16, "bf16", ""), *OTHER_DIMS,
]  # fmt: skip
ALL = [*SOME, *MORE]
SPILLS = {
    ("H200", 8, 16, 128, 64, "bf16", ""): 640, ("H200", 8, 4, 128, 64, "bf16", "all"): 640,
    ("H200", 8, 4, 64, None, "e4m3", "all"): 8, ("H200", 8, 17, 128, 16, "e4m3", "converted"): 1000,
    ("H200", 8, 16, 128, 64, "bf16", "wgmma"): 88, ("H200", 8, 16, 128, 16, "bf16", "wgmma"): 20,
    ("A100", 4, 1, 64, 16, "bf16", ""): 16, ("H200", 8, 4, 128, None, "bf16", "long"): 44,
    ("H200", 7, 1, 80, 16, "bf16", ""): 64, ("H200", 16, 1, 576, 64, "bf16", "wgmma"): 48,
    ("H200", 8, 4, 256, 16, "bf16", "one group"): 68, ("H200", 8, 8, 256, 64, "bf16", "wide"): 260,
    ("H200", 8, 700, 256, 64, "bf16", "wide"): 332, ("H200", 8, 700, 256, 16, "bf16", "wide"): 604,
    ("H200", 8, 700, 192, 64, "bf16", "wide"): 384,
    ("H200", 8, 700, 136, 16, "bf16", "wide"): 556,
    ("H200", 8, 4, 256, 64, "e4m3", "converted"): 52, ("A100", 8, 4, 256, 64, "bf16", ""): 120,
    ("H200", 8, 4, 64, None, "bf16", "long"): 72, ("A100", 4, 1, 576, 16, "bf16", ""): 288,
    ("H200", 8, 16, 96, 64, "bf16", "wgmma"): 160, ("H200", 8, 8, 192, 64, "bf16", "one group"): 288,
    ("H200", 8, 4, 160, 16, "bf16", "one group"): 316,
    ("H200", 8, 4, 128, 256, "bf16", "fixed wgmma"): 204, ("H200", 8, 16, 128, 256, "bf16", "fixed wgmma"): 592,
}  # fmt: skip
"""Bytes that may be spilled, by the Triton that spills most: outside of what runs at every step for the most part, there a
number or none is loaded again."""


@pytest.mark.parametrize(
    ("triton", "problems"),
    [
        pytest.param("oldest Triton", SOME, id="some, oldest Triton"),
        pytest.param("Triton 3.8", [*FEW[:1], *ALONE], id="four, Triton 3.8"),
        pytest.param("installed Triton", [*FEW, *ALONE], id="few, installed Triton"),
        *(pytest.param(TRITONS[0], MORE[i::3], id=f"more, {i}, {TRITONS[0]}", marks=pytest.mark.exhaustive) for i in range(3)),
        *(pytest.param(TRITONS[1], ALL[i::4], id=f"all, {i}, {TRITONS[1]}", marks=pytest.mark.exhaustive) for i in range(4)),
    ],
)
def test_it_compiles_for_gpus_that_are_not_there(triton, problems):
    answer = answer_by(triton, PROGRAM, json.dumps(problems))
    for problem, made in zip(problems, answer["made"], strict=True):
        assert not made["wrong_code"], (problem, made)
        assert made["registers"] <= made["allowed"] and made["spills"] <= SPILLS.get(tuple(problem), 0), (problem, made)
        assert made["smem_said"] <= made["smem"] <= made["smem_said"] + made["overhead"] + 4096, (problem, made)
        assert made["smem"] + 1024 <= made["room"] and not made["narrow"] and made["strangers"] == 0, (problem, made)
        assert bool(made["posted"]) == made["clustered"], (problem, made)
        kind = problem[-1].removeprefix("fixed ")
        if kind in ("wgmma", "wide"):
            in_turns = problem[3] == 576 and problem[1] * problem[2] > 64  # whose rows of Q cp.async copies
            assert made["wgmma"] and made["tma"] and bool(made["copies"]) == in_turns, (problem, made)
        elif kind == "converted":
            assert made["wgmma"] and made["tma"] and not made["copies"], (problem, made)
        elif kind == "one group":
            assert made["wgmma"] and made["copies"] and not made["tma"], (problem, made)
        else:
            assert made["copies"] and made["ldmatrix"], (problem, made)


APPEND = """
import itertools, torch, triton
import strobe
from strobe.call import launcher
from strobe.device import KNOWN
from strobe.kernels.decode.append import append_call
from strobe.lab.binary.offline import pretend_gpu
from strobe.serving.arguments import checked_append

def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)

done = 0
for paged, rotary, packed, scaled in itertools.product((False, True), repeat=4):
    kind = torch.float8_e4m3fn if scaled else torch.bfloat16
    scales = (torch.ones(3, 3), torch.ones(3, 3)) if scaled else (None, None)
    table, index = (ints(3, 5), None) if paged else (None, ints(3))
    caches = (torch.empty(20, 16, 3, dim, dtype=kind) for dim in (24, 16))
    cache = strobe.Cache(*caches, ints(3), table, index, None, *scales)
    rows = (12,) if packed else (3, 4)
    k, v, q = (torch.empty(*rows, heads, dim, dtype=torch.bfloat16) for heads, dim in ((3, 24), (3, 16), (6, 24)))
    turns = strobe.Rotary(torch.empty(64, 8), torch.empty(64, 8), True) if rotary else None
    cu = ints(4) if packed else None
    given = dict(q=q if rotary else None, rotary=turns, cu_seqlens=cu, cu_seqlens_q=cu if rotary else None, positions=None)
    operands, options = checked_append(cache, k, v, **given, one_position=False)
    call = append_call(operands, options, ints(3), torch.empty_like(q) if rotary else None, KNOWN["H100"])
    with pretend_gpu(90):
        compiled = call.compile()
    assert "griddepcontrol.wait" in compiled.asm["ptx"]
    ready = launcher.Call(call.kernel, call.grid, (), call.keywords, compiled)  # raises if it cannot be prepared
    assert launcher.parameters(compiled, launcher.all_arguments(ready))
    done += 1
print(done, triton.__version__)
"""


@pytest.mark.parametrize("triton", TRITONS)
def test_append_compiles(triton):
    """In all of its forms, and can be prepared: what the interpreter takes is more than what a compiler takes."""
    assert output_of(APPEND, triton=triton).startswith(f"16 {VERSIONS[triton]}")
