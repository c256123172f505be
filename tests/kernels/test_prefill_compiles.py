"""What the compiler makes of the Hopper forward over a cache, for a GPU that is not there, and that its launches can be
prepared."""

import json

import pytest
from tritons import answer_by

PROGRAM = """
import json, sys, torch, triton
from strobe.call import launcher
from strobe.device import KNOWN
from strobe.kernels.common.call import Tensors, unfilled_buffers
from strobe.kernels.sm90 import cache_backend
from strobe.lab.binary.offline import pretend_gpu
from strobe.lab.binary.sass import audit
from strobe.serving.problem import DecodeOperands, DecodeOptions, describe

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

made, arch, i32 = [], KNOWN["H200"], torch.int32
for dims, page, packed, most, *heads in json.loads(sys.argv[1]):
    dim, dim_v = dims
    ((heads, heads_kv),) = heads or [(32, 8)]
    rows = (4 * 2048,) if packed else (4, 2048)
    q, out = meta(*rows, heads, dim), meta(*rows, heads, dim_v)
    k, v = (meta(40, page or 8192, heads_kv, d) for d in dims)
    table, cu = meta(4, 8192 // page, dtype=i32) if page else None, meta(5, dtype=i32) if packed else None
    operands = DecodeOperands(q, k, v, meta(4, dtype=i32), table, cu_seqlens_q=cu, out=out)
    problem = describe(operands, DecodeOptions(most if packed else 2048, dim_v, False, 0.1, None, 0, 0.0, True, False, None))
    assert cache_backend.refuses(problem, arch) is None, cache_backend.refuses(problem, arch)
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    tensors = Tensors(**given, **unfilled_buffers(cache_backend.buffers(problem, arch)))
    *ahead, call, rest = cache_backend.calls(problem, tensors, arch)
    with pretend_gpu(arch.capability):
        compiled = call.compile()
        few = [audit(one.compile(), "few", 0.0, ()).spill_bytes for one in ahead if "q" in one.keywords]
    found, config = audit(compiled, "forward", 0.0, ()), cache_backend.config(problem, arch)
    ready = launcher.Call(call.kernel, call.grid, call.arguments, call.keywords, compiled)
    there = {id(x) for x in vars(tensors).values()}
    values = [p.value for p in launcher.parameters(compiled, launcher.all_arguments(ready))]
    bases = [x.given.base if isinstance(x, launcher.Descriptor) else x for x in values]
    made.append({
        "spills": found.spill_bytes, "few": few, "smem": compiled.metadata.shared, "smem_said": config.smem_bytes(),
        "tma": compiled.asm["ptx"].count("cp.async.bulk.tensor.5d.shared"), "boxes": config.tile_kv // config.box,
        "strangers": sum(isinstance(x, torch.Tensor) and id(x) not in there for x in bases),
        "rest": [x is tensors.notes or x is tensors.counters for x in (rest.keywords["notes"], rest.keywords["counters"])],
    })
print(json.dumps({"triton": triton.__version__, "made": made}))
"""

SOME = [((128, 128), 16, True, 500)]
MORE = [
    ((128, 128), 64, False, 2048), ((128, 128), None, False, 2048), ((128, 128), 256, True, 2048),
    ((128, 128), 16, True, 2048), ((128, 128), 64, True, 500), ((64, 64), 16, False, 2048), ((64, 64), 64, True, 2048),
    ((64, 64), 16, True, 500), ((96, 96), 16, False, 2048), ((80, 80), 16, True, 500), ((192, 128), 64, True, 2048),
    ((192, 128), 16, True, 500), ((256, 256), 64, False, 2048), ((256, 256), 16, True, 500),
    ((128, 128), 16, True, 300, (28, 4)), ((128, 128), 16, True, 500, (24, 8)), ((64, 64), 64, True, 500, (24, 8)),
]  # fmt: skip
"""Head dims, keys of a page, whether requests are packed, the queries of the longest, and heads, if not 32 on 8."""
SPILLS = {"oldest Triton": 64, "installed Triton": 400}
"""Bytes that may be spilled at head dims other than 128: by producers, and with newer Tritons by three groups of consumers."""


@pytest.mark.parametrize(
    ("triton", "problems"),
    [
        pytest.param("oldest Triton", SOME, id="one, oldest Triton"),
        pytest.param("oldest Triton", MORE, id="more, oldest Triton", marks=pytest.mark.exhaustive),
        pytest.param("installed Triton", [*SOME, *MORE], id="all, installed Triton", marks=pytest.mark.exhaustive),
    ],
)
def test_it_compiles_for_a_gpu_that_is_not_there(triton, problems):
    answer = answer_by(triton, PROGRAM, json.dumps(problems))
    for problem, made in zip(problems, answer["made"], strict=True):
        assert made["spills"] <= (0 if problem[0] == (128, 128) else SPILLS[triton]), (problem, made)
        assert made["smem_said"] <= made["smem"] <= made["smem_said"] + 2048, (problem, made)
        few = made["few"]  # single tokens have a launch where requests are packed
        assert len(few) == problem[2] and sum(few) <= (0 if problem[0][0] == problem[0][1] else SPILLS[triton]), (problem, made)
        assert made["tma"] >= 2 * made["boxes"] and made["strangers"] == 0 and all(made["rest"]), (problem, made)
