"""The operators under torch's own machinery: opcheck, compile, export, CUDA graphs."""

import shutil
from dataclasses import replace

import pytest
import torch
from problems import Case, Results, run, tensors, upstream

import strobe
from strobe.arguments import options_of
from strobe.call.options import BAND, NAMES, NUMBERS, Options, learned_of
from strobe.dropout import new_seed
from strobe.problem import OPTIONAL

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = (
    Case(40, 50, heads_q=4, heads_kv=2, head_dim=64, mask="causal"),
    Case(40, 50, mask="all"),
    Case(40, 50, packed=True, batch=3, mask="window", alibi=True, softcap=3.0),
    Case(40, 50, bias=True, sinks=True, function=True, seqused=True, mask="functions"),
    Case(40, 50, dropout=0.3, mask="causal"),
    Case(40, 50, packed=True, batch=3, sinks=True, function=True, seqused=True, mask="function"),
)


def dtype_of(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck(case, device):
    t = tensors(case, dtype_of(device), device).with_gradients()
    options = options_of(t.q, t.k, t.v, **t.keywords)
    if options.dropout:
        options = replace(options, seed=new_seed(t.q.device))
    # bfloat16 is compared loosely: opcheck runs the operator twice, and its own rounding is not what it is about.
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if device == "cpu" else {"atol": 5e-2, "rtol": 5e-2}
    torch.library.opcheck(torch.ops.strobe.forward, (t.q, t.k, t.v, *options.arguments()), **tolerance)
    out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, **t.keywords)
    learned = learned_of(options)
    assert learned == [name for name in ("bias", "sinks") if getattr(case, name)]
    q, k, v, out, lse, *rest = (
        x.detach() if isinstance(x, torch.Tensor) else x for x in (t.q, t.k, t.v, out, lse, *options.arguments())
    )
    upstream = torch.randn_like(out), torch.zeros_like(lse)
    torch.library.opcheck(torch.ops.strobe.backward, (*upstream, q, k, v, out, lse, *rest, learned))
    assert options.is_band() == (case == CASES[0])
    if options.is_band():
        torch.library.opcheck(torch.ops.strobe.forward_band, (t.q, t.k, t.v, *rest[:BAND]), **tolerance)
        torch.library.opcheck(torch.ops.strobe.backward_band, (*upstream, q, k, v, out, lse, *rest[:BAND]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compile_without_graph_breaks(case, device):
    t = tensors(case, dtype_of(device), device).with_gradients()

    score = t.keywords["score"]
    learned = {name: x for name in ("bias", "sinks") if (x := getattr(score, name)) is not None}
    inputs = (t.q, t.k, t.v, *learned.values())

    def step(q, k, v, *tensors):
        keywords = {**t.keywords, "score": replace(score, **dict(zip(learned, tensors, strict=True)))}
        out, lse = strobe.attention(q * 2, k, v, return_lse=True, **keywords)
        return (out.float() ** 2).sum() + lse.nan_to_num(neginf=0.0).sin().sum()

    torch.manual_seed(2)
    want = torch.autograd.grad(step(*inputs), inputs)
    torch.manual_seed(2)
    how: dict = {"backend": "aot_eager"} if device == "cpu" else {"options": {"fallback_random": True}}  # draws as without it
    compiled = torch.compile(step, fullgraph=True, **how)
    got = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=3e-2 if device == "cuda" else 1e-4, rtol=3e-2 if device == "cuda" else 1e-4)


def halved(score, batch, head, q_index, kv_index):
    return score * 0.5


def before(bound):
    def early(batch, head, q_index, kv_index):
        return kv_index < bound

    return early


@pytest.mark.parametrize("device", DEVICES)
def test_compile_under_autocast_without_graph_breaks(device):
    layer = torch.nn.Linear(32, 32, device=device)

    def step(x):
        with torch.autocast(device, torch.bfloat16):
            y = layer(x)
            return strobe.attention(y, y, y, mask=strobe.Causal()).float().square().sum()

    x = torch.randn(1, 20, 2, 32, device=device, requires_grad=True)
    (want,) = torch.autograd.grad(step(x), x)
    (got,) = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(torch.__version__ < "2.11", reason="PyTorch's compiler takes a function within a function from 2.11 on")
@pytest.mark.parametrize("device", DEVICES)
def test_functions_may_be_given_within_what_is_compiled(device):
    q = torch.randn(1, 20, 2, 32, device=device, dtype=dtype_of(device))

    def step(q):
        mask = strobe.Visible(before(9)) & strobe.Window(right=30)
        return strobe.attention(q, q, q, mask=mask, score=strobe.Score(function=halved))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    want = strobe.attention(q, q[:, :9], q[:, :9], scale=0.5 * 32**-0.5)
    torch.testing.assert_close(compiled(q), want)


@pytest.mark.parametrize("device", DEVICES)
def test_compile_through_flash_attns_door_with_changing_lengths(device):
    compiled = torch.compile(
        lambda q, k, v: strobe.flash_attn_func(q, k, v, causal=True), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n in (16, 24, 33):
        q, k, v = torch.randn(3, 2, n, 4, 64, device=device, dtype=dtype_of(device))
        torch.testing.assert_close(compiled(q, k, v), strobe.flash_attn_func(q, k, v, causal=True))


def test_compile_with_changing_numbers():
    """A scale, a cap and a window that PyTorch makes symbols of."""
    q = torch.randn(1, 12, 2, 16)

    def call(q, scale, softcap, window):
        return strobe.flash_attn_func(q, q, q, softmax_scale=scale, softcap=softcap, window_size=(window, 0))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for numbers in ((0.5, 3.0, 4), (0.25, 4.0, 5), (0.75, 5.0, 6)):
        torch.testing.assert_close(compiled(q, *numbers), call(q, *numbers))


@pytest.mark.parametrize("device", DEVICES)
def test_export(device):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return strobe.attention(q, k, v, mask=strobe.Causal() & strobe.Window(9))

    q, k, v = torch.randn(3, 1, 40, 2, 64, device=device, dtype=dtype_of(device))
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(Attention(), (q, k, v), dynamic_shapes=[{1: length}] * 3)
    assert "strobe.forward" in str(program.graph)
    q, k, v = torch.randn(3, 1, 70, 2, 64, device=device, dtype=dtype_of(device))
    torch.testing.assert_close(program.module()(q, k, v), Attention()(q, k, v))


class Block(torch.nn.Module):
    """Attention between two linear layers."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).unbind(-3)
        return self.out(strobe.attention(q, k, v, mask=strobe.Causal() & strobe.Window(left=5)).flatten(-2))


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_aot_inductor(tmp_path):
    """A package of an exported model runs for other lengths than the one that it was made with."""
    torch.manual_seed(0)
    model, length = Block().eval(), torch.export.Dim("length", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(2, 40, 64),), dynamic_shapes=({1: length},))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        packaged = torch._inductor.aoti_load_package(path)
        for n in (40, 17, 100):
            x = torch.randn(2, n, 64)
            torch.testing.assert_close(packaged(x), model(x))


def test_options_end_with_the_tensors_of_operands():
    """By which prepared calls take them apart."""
    assert NAMES[NUMBERS:] == OPTIONAL


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("band", ["", "_band"])
def test_operators_of_plain_tensors_are_dispatched_once(grad, band):
    """Where nobody asks for a gradient: compiled code calls them so."""
    q = torch.randn(1, 8, 2, 16, requires_grad=grad)
    forward, backward = (getattr(torch.ops.strobe, name + band) for name in ("forward", "backward"))
    options = options_of(q, q, q).arguments()
    options, learned = (options[:BAND], ()) if band else (options, ([],))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.set_grad_enabled(grad):
        out, lse = forward(q, q, q, *options)
        with torch.no_grad():
            found = backward(out.detach(), None, q, q, q, out, lse, *options, *learned)
    names = [event.name for event in profile.events()]
    assert (names.count(f"strobe::forward{band}"), names.count(f"strobe::backward{band}")) == (1 + grad, 1)
    assert len(found) == 5 and found[3:] == (None, None)  # nobody asked for those of a bias and sinks


def test_what_is_a_band():
    """No other option may be lost."""
    assert Options(scale=0.5, left=3, right=0).is_band()
    with_others = {"max_q", "max_kv", "score_gradient"}  # of no meaning alone
    for name in set(NAMES[BAND:]) - with_others:
        assert not Options(**{name: torch.ones(1) if name in OPTIONAL else 1}).is_band(), name
    q = torch.randn(1, 8, 2, 16)
    for keywords, band in (({"mask": strobe.Window(left=2)}, True), ({"mask": strobe.Prefix(2)}, False)):
        graphs = []
        compiled = torch.compile(
            lambda q, keywords=keywords: strobe.attention(q, q, q, **keywords), fullgraph=True,
            backend=lambda graph, inputs, graphs=graphs: graphs.append(str(graph.graph)) or graph,
        )  # fmt: skip
        torch.testing.assert_close(compiled(q), strobe.attention(q, q, q, **keywords))
        assert ("strobe.forward_band" in graphs[0]) == band


def test_no_gradient_no_saved_tensors():
    t = tensors(Case(8, 8))
    assert strobe.attention(t.q, t.k, t.v).grad_fn is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if not case.dropout], ids=str)
def test_cuda_graph(case):
    """Forward and backward are captured and replay on new inputs."""
    t = tensors(case, torch.bfloat16, "cuda").with_gradients()
    dout = upstream(*strobe.attention(t.q, t.k, t.v, return_lse=True, **t.keywords))

    def step():
        out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, **t.keywords)
        return out, lse, *torch.autograd.grad((out, lse), (t.q, t.k, t.v), dout)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (t.q, t.k, t.v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for name, got, want in zip(Results.FIELDS, captured, step(), strict=True):
        assert torch.equal(got, want), name


@pytest.mark.gpu
def test_documents_of_64_bits_wait_for_nothing():
    """Neither the host, nor a CUDA graph, which numbers what its input holds at each replay."""
    q = torch.randn(2, 200, 2, 64, device="cuda", dtype=torch.bfloat16)
    ids, others = (torch.randint(-3, 3, (2, 200), device="cuda") << 32 for _ in range(2))

    def step():
        return strobe.attention(q, q, q, mask=strobe.Document(ids, ids.flip(1)))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    ids.copy_(others)
    graph.replay()
    assert torch.equal(captured, step())


@pytest.mark.gpu
def test_no_host_sync():
    t = tensors(CASES[0], torch.bfloat16, "cuda")
    run(t, None)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        q, k, v = (x.detach().requires_grad_() for x in (t.q, t.k, t.v))
        out = strobe.attention(q, k, v, mask=strobe.Causal())
        out.backward(out.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")
