"""Prepared launches: the driver is given what the compiled kernel takes (no GPU needed); on a GPU they do what Triton's do."""

import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from problems import without_plans
from tritons import TRITONS, answer_by, answer_of

import strobe
from strobe.call import launcher, prepared_calls, torch_internals


class Library:
    """Stands for libcuda: `got` lists what its functions are called with."""

    def __init__(self, without_context: bool = False):
        self.got: list[tuple] = []
        self._without_context = without_context

    def __getattr__(self, name):
        def function(*arguments):
            self.got.append((name, *arguments))
            if name == "cuModuleLoadData" and self._without_context:
                self._without_context = False
                return 201
            if name == "cuModuleGetFunction":
                arguments[0]._obj.value = 4321
            return 0

        self.__dict__[name] = function
        return function


@pytest.mark.parametrize("without_context", [False, True])
@pytest.mark.parametrize(("shared", "cluster"), [(49152, 1), (49153, 8), (49153, 16)])
def test_a_kernel_is_loaded(monkeypatch, shared, cluster, without_context):
    """Shared memory beyond 48 KiB is asked for, attribute 8, and so are clusters of more than 8 CTAs, attribute 14."""
    library = Library(without_context)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "_driver", lambda: launcher.Driver(library))
    metadata = SimpleNamespace(shared=shared)
    compiled = SimpleNamespace(
        function=None, kernel=b"image", name="kernel", metadata=metadata, packed_metadata=(4, cluster, shared),
        __hash__=object.__hash__,
    )  # fmt: skip
    assert launcher.function.__wrapped__(compiled, 0) == 4321
    names = [name for name, *_ in library.got]
    context = ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuModuleLoadData"] if without_context else []
    more = ["cuFuncSetCacheConfig", "cuFuncSetAttribute"] if shared > 49152 else []
    asked = [(8, shared)] * (shared > 49152) + [(14, 1)] * (cluster > 8)
    assert names == ["cuModuleLoadData", *context, "cuModuleGetFunction", *more, *["cuFuncSetAttribute"] * (cluster > 8)]
    assert library.got[0][2] == b"image"
    assert [got[2:] for got in library.got if got[0] == "cuFuncSetAttribute"] == asked


@pytest.mark.parametrize(("overlaps", "loaded"), [(True, None), (True, 1234), (False, None)])
def test_launches_of_a_step_part_memory_alike(monkeypatch, overlaps, loaded):
    """A kernel whose launches overlap asks for all shared memory, attribute 9, whoever loaded it: else its CTAs keep those of
    the next launch off their multiprocessors."""
    library = Library()
    monkeypatch.setattr(launcher, "_driver", lambda: launcher.Driver(library))
    monkeypatch.setattr(launcher, "function", launcher.function.__wrapped__)
    metadata = SimpleNamespace(shared=0, launch_pdl=overlaps)
    compiled = SimpleNamespace(function=loaded, kernel=b"image", name="kernel", metadata=metadata, packed_metadata=(4, 1, 0))
    handle = launcher._carved_out.__wrapped__(compiled, 0)
    assert handle == (loaded or 4321)
    assert [got[1:] for got in library.got if got[0] == "cuFuncSetAttribute"] == [(handle, 9, 100)] * overlaps


# ---- offline: the driver's part is played by a recorder, on the oldest and on the installed Triton

RECORD = """
import ctypes, json, struct, sys
import torch, triton
sys.path.insert(0, TESTS)
import launch_kernels as kernels
from strobe.call import echo, launcher, triton_internals
from strobe.kernels.common.call import launch_in_clusters
from strobe.lab.binary.offline import pretend_gpu

launches, encoded = [], []


class Recorder:
    def launch(self, config, function, pointers, extra):
        compiled = self.compiled[function.value]
        sizes = launcher.ptx_sizes(compiled.asm["ptx"], compiled.name)
        assert len(sizes) == len(pointers) and extra is None
        values = [ctypes.string_at(pointer, size).hex() for pointer, size in zip(pointers, sizes)]
        aligned = all(pointer % min(size, 64) == 0 for pointer, size in zip(pointers, sizes))
        config = struct.unpack("<7I4xQQI", ctypes.string_at(config, 52))
        attributes = ctypes.string_at(config[8], 72 * config[9]).hex()
        launches.append(dict(config=config[:8], attributes=attributes, function=function.value, values=values, aligned=aligned))
        return 0

    def call(self, name, start, element_type, rank, address, sizes, strides, box, steps, *rest):
        assert name == "cuTensorMapEncodeTiled" and start % 64 == 0
        encoded.append([element_type, rank, address, list(sizes), list(strides), list(box), list(steps), *rest])
        ctypes.memmove(start, struct.pack("<Q", address) * 16, 128)


recorder = Recorder()
recorder.compiled = {}
launcher._driver = lambda: recorder


def prepared(tensors, *calls):
    kernels = []
    for kernel, grid, arguments, keywords, *_ in calls:
        call = launcher.compiled_call(kernel, grid, *arguments, **keywords)
        if call.compiled.function is None:
            call.compiled.function = 4321 + len(recorder.compiled)
            recorder.compiled[call.compiled.function] = call.compiled
        kernels.append((call.compiled, call.compiled.function, call.grid, launcher.all_arguments(call)))
    return launcher.PreparedLaunches(kernels, tensors)


result = {"triton": triton.__version__, "encoded": encoded, "launches": launches}
with pretend_gpu(90):
    x, y, sums = kernels.rows(130, "cpu")
    grid, arguments, keywords = kernels.scale_rows_arguments(x, y, sums)
    launch = prepared((x, y, sums), (kernels.scale_rows, grid, arguments, keywords))
    others = tuple(torch.empty_like(t) for t in (x, y, sums))
    addresses = [tuple(t.data_ptr() for t in three) for three in ((x, y, sums), others)]
    for stream, three in ((77, addresses[0]), (78, addresses[1]), (79, addresses[1])):
        launch.on(stream)(three)
    result["addresses"] = addresses[1]
    result["shared"] = launch._kernels[0].shape[-1]

    a, b = torch.zeros(3, 5), torch.zeros(5, 3).t()
    grid_1, arguments_1, keywords_1 = kernels.add_one_arguments(a, b)
    add_one = (kernels.add_one, grid_1, arguments_1, keywords_1)
    with_pdl = (kernels.add_one, grid_1, arguments_1, {**keywords_1, "launch_pdl": True})
    prepared((a, b), with_pdl).on(0)((a.data_ptr(), b.data_ptr()))
    result["matrices"] = [a.data_ptr(), b.data_ptr()]
    prepared((a, b), (kernels.add_one, (0,), arguments_1, keywords_1)).on(0)((0, 0))  # launches nothing

    # Two kernels, of which one takes what the other takes, and an empty grid between them.
    scale_rows = (kernels.scale_rows, grid, arguments, keywords)
    nothing = (kernels.scale_rows, (0,), arguments, keywords)
    reverse = (kernels.scale_rows, grid, kernels.scale_rows_arguments(y, x, sums)[1], keywords)
    frame = prepared((a, x, y, b, sums), scale_rows, nothing, add_one, reverse).on(80)
    frame((a.data_ptr(), *addresses[1][:2], b.data_ptr(), addresses[1][2]))

    # One frame, whose tensors move and stay.
    frame, before = launch.on(81), len(launches)
    for turn in (0, 1, 1, 0):
        frame(addresses[turn])
    result["moved"] = [one["values"] for one in launches[before:]]
    del launches[before:]

    # An unknown Triton: kernels that say what they got, launched as all others are.
    calls, tensors, wanted = echo.calls(torch.device("cpu"), with_tma=True)
    before, encodings = len(launches), len(encoded)
    prepared(tensors, *calls).on(82)(tuple(t.data_ptr() for t in tensors))
    result["echo"] = [[one["values"] for one in launches[before:]], [t.data_ptr() for t in tensors]]
    del launches[before:], encoded[encodings:]
    torch.cuda.current_device = lambda: 0
    triton_internals.KNOWN = ()
    add_one_call = launcher.compiled_call(kernels.add_one, grid_1, *arguments_1, **keywords_1)
    launcher.function = lambda compiled, device: 4321
    ways = []
    for came_back in (True, False):
        launcher._echoes[0] = came_back
        ways.append(type(launcher.prepare([add_one_call], (a, b))).__name__)
    result["ways"] = ways
    triton_internals.KNOWN = (triton_internals.triton_version(),)

    # What is private to Triton goes, one after the other.
    def gone(*_):
        raise ImportError("gone")

    without = []
    for place, name in ((triton_internals, "signature_of"), (launcher, "function")):
        there = getattr(place, name)
        setattr(place, name, gone)
        without.append(type(launcher.prepare([add_one_call], (a, b))).__name__)
        setattr(place, name, there)
    from triton.runtime import jit

    there, jit.JITCallable = jit.JITCallable, None
    triton_internals.parse_in_turn.cache_clear()
    triton_internals.parse_in_turn()
    jit.JITCallable = there
    result["without"] = [*without, type(launcher.prepare([add_one_call], (a, b))).__name__]

    # In clusters: of eight warps, as what was compiled stays so.
    of_8 = {**keywords_1, "num_warps": 8}
    launch_in_clusters(launcher.compiled_call(kernels.add_one, (3,), *arguments_1, **of_8).compiled, 16)
    prepared((a, b), (kernels.add_one, (3,), arguments_1, of_8)).on(83)((a.data_ptr(), b.data_ptr()))
    result["in_clusters"] = launches.pop()

    try:
        prepared((a,), add_one)
    except ValueError as error:
        result["missing"] = str(error)
    compiled = kernels.add_one.warmup(*arguments_1, grid=grid_1, **keywords_1)
    compiled.asm["ptx"] = compiled.asm["ptx"].replace(".param .u32 add_one_param_1", ".param .u64 add_one_param_1")
    try:
        launcher.PreparedLaunches([(compiled, 1, (1, 1, 1), [*arguments_1, False, 8])], (a, b))
    except launcher.Unknown as error:
        result["unknown"] = str(error)
print(json.dumps(result))
"""


@pytest.fixture(scope="module", params=TRITONS)
def recorded(request):
    script = RECORD.replace("TESTS", repr(str(Path(__file__).parents[1])))
    return answer_by(request.param, script)


def packed(code, *values):
    return [struct.pack(f"<{code}", value).hex() for value in values]


def test_parameters_of_a_gluon_kernel(recorded):
    x, y, sums = recorded["addresses"]
    shape, strides, nothing = packed("i", 130, 64), packed("q", 64, 1), packed("Q", 0, 0)
    _, second, third = recorded["launches"][:3]
    assert second["values"] == [
        *[struct.pack("<Q", x).hex() * 16, *shape, *strides],
        *packed("Q", sums),
        *[*packed("i", 130), *packed("q", 2**40 + 3), *packed("f", 2.0)],
        *[struct.pack("<Q", y).hex() * 16, *shape, *strides],
        *nothing,  # Triton's scratch buffers
    ]
    assert third["values"] == second["values"]
    assert second["config"] == [3, 1, 1, 128, 1, 1, recorded["shared"], 78] and third["config"][-1] == 79
    assert second["function"] == 4321 and second["attributes"] == "" and all(one["aligned"] for one in recorded["launches"])


def test_kernels_in_a_row(recorded):
    """Each is given what it is given alone, of the same tensors."""
    _, second, _, alone, first, add_one, reverse = recorded["launches"]
    assert first["values"] == second["values"] and first["config"] == [*second["config"][:-1], 80]
    assert add_one["values"] == alone["values"] and add_one["config"] == [*alone["config"][:-1], 80]
    x, y = (struct.pack("<Q", address).hex() * 16 for address in recorded["addresses"][:2])
    assert (first["values"][0], reverse["values"][0]) == (x, y) and set(first["values"]) == set(reverse["values"])
    assert first["function"] == reverse["function"] != add_one["function"]


def test_a_frame_follows_its_tensors(recorded):
    first, second = (one["values"] for one in recorded["launches"][:2])
    assert first != second
    assert recorded["moved"] == [first, second, second, first]


def test_descriptors_are_encoded_once_for_an_address(recorded):
    """bfloat16 (9), innermost dim first, strides in bytes; no interleave, swizzle of 128 bytes (3), L2 by 128 bytes (2)."""
    alone = recorded["encoded"][:4]
    assert len(recorded["encoded"]) == 4 + 2 * 2
    by_address = {one[2]: one for one in alone}
    for address in recorded["addresses"][:2]:
        assert by_address[address] == [9, 2, address, [64, 130], [128], [64, 64], [1, 1], 0, 3, 2, 0]


def test_parameters_of_tuples_and_attributes(recorded):
    """A number that is 1 is no parameter; programmatic serialization is attribute 6."""
    assert len(recorded["launches"]) == 4 + 3  # none for an empty grid
    last = recorded["launches"][3]
    x, y = recorded["matrices"]
    assert last["values"] == [*packed("Q", x), *packed("i", 5), *packed("Q", y), *packed("i", 3, 5), *packed("Q", 0, 0)]
    assert last["attributes"] == struct.pack("<I4xI60x", 6, 1).hex()


def test_clusters(recorded):
    """The grid is one of clusters; their dimensions are attribute 4, that their CTAs are spread attribute 5."""
    launch = recorded["in_clusters"]
    assert launch["config"][:4] == [48, 1, 1, 256]
    spread = struct.pack("<I4xI60x", 5, 1)
    assert launch["attributes"] == (struct.pack("<I4x3I52x", 4, 16, 1, 1) + spread).hex()


def test_what_cannot_be_prepared(recorded):
    assert "every tensor of a prepared launch must be given" in recorded["missing"]
    assert "not laid out as those of Triton 3.6 to 3.9" in recorded["unknown"]


def test_an_unknown_triton_gives_an_echo_first(recorded):
    """What its kernels are given is what they say that they were given; if it is not, Triton launches."""
    (numbers, tile), (out, given, beside, ones, sums) = recorded["echo"]
    nothing = packed("Q", 0, 0)
    assert numbers == [
        *packed("Q", out, given), *packed("i", 5, 7), *packed("q", 2**40 + 3), *packed("f", 0.5), *packed("Q", beside),
        *nothing,
    ]  # fmt: skip
    assert tile[0] == struct.pack("<Q", ones).hex() * 16 and tile[-4:] == [*packed("i", 7), *packed("Q", sums), *nothing]
    assert recorded["ways"] == ["PreparedLaunches", "ThroughTriton"]


def test_without_tritons_private_names_triton_launches(recorded):
    """The signature, the loader, and the parser that threads take in turn, which is not needed to compile."""
    assert recorded["without"] == ["ThroughTriton", "ThroughTriton", "PreparedLaunches"]


@pytest.mark.gpu
def test_the_echo_comes_back():
    from strobe.call import launcher

    assert launcher._echo(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_maker_makes(device):
    from strobe.call.launcher import maker

    like = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16, device=device).transpose(1, 2)
    new = maker(like)
    for made in (new(), new()):
        for of in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.get_device):
            assert of(made) == of(like)
        assert made.dtype == like.dtype and not made.requires_grad and made.data_ptr() % 16 == 0
    assert new().data_ptr() != made.data_ptr()
    with torch.inference_mode():
        assert new().is_inference()


def test_threads_that_share_a_stream_keep_two_launches_together(monkeypatch):
    """Notes that one thread's first launch leaves are redone by its own second launch."""
    from strobe.call.launches import Prepared as PreparedCalls
    from strobe.call.tables import Memo
    from strobe.kernels.common.call import Buffers

    launches, rest = [], threading.Event()

    class Prepared:
        def on(self, stream):
            def launch(addresses):
                for kernel in ("forward", "redo"):
                    launches.append((addresses[0], kernel))
                    rest.wait(0.002)  # as ctypes does, it lets other threads run

            return launch

    monkeypatch.setattr(torch_internals, "is_capturing", lambda: False)
    plan = PreparedCalls.__new__(PreparedCalls)
    plan._device, plan._buffers, plan._launches = torch.device("cpu"), Buffers({}, notes={"notes": 4}), Prepared()
    plan._places, plan._new_kept = Memo(64, plan._place), []
    plan._names, plan._spare_lse, plan._passing = ("out", "lse"), True, [0, 512]
    plan._new = (lambda: torch.empty(8), lambda: torch.empty(4))
    started = threading.Barrier(4)

    def work(number):
        started.wait()
        for _ in range(5):
            plan.forward(0, False, (number,), ())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launches) == 2 * 4 * 5 and len({number for number, _ in launches}) == 4
    for (first, forward), (second, redo) in zip(launches[::2], launches[1::2], strict=True):
        assert first == second and (forward, redo) == ("forward", "redo")


COUNT = """
import torch
from strobe.kernels.sm90.config import choose
from strobe.kernels.sm90.forward import forward_kernel
from strobe.kernels.sm90.launch import compile_only
from strobe.device import KNOWN
from strobe.lab.binary.offline import pretend_gpu
from strobe.masks import Causal
from strobe.problem import AttentionProblem, Dense


def problem(batch, n_q, n_kv, heads, group):
    heads_kv = heads // group
    return AttentionProblem(Dense(batch, n_q, n_kv), heads, heads_kv, 128, 128, torch.bfloat16, 0.1, mask=Causal())


config = choose(problem(1, 4096, 4096, 4, 1))
with pretend_gpu(90):
    for sizes in ((1, 4096, 4096, 4, 1), (1, 1, 1, 1, 1), (3, 17, 333, 4, 2), (1, 512, 4096, 16, 16), (5, 2048, 2049, 3, 1)):
        compile_only(problem(*sizes), KNOWN["H200"], config)
    (cache, *_), = forward_kernel.device_caches.values()
    print(len(cache))
"""


def test_lengths_batch_and_heads_compile_nothing():
    """The Hopper forward of one config and one kind of mask is one kernel."""
    assert answer_of(COUNT) == 1


PARSE = """
import gc, sys, threading, time
sys.path.insert(0, TESTS)
import launch_kernels as kernels
from strobe.call import launcher
from strobe.kernels.sm90.layouts import accumulator
from strobe.lab.binary.offline import pretend_gpu

x, y, sums = kernels.rows(130, "cpu")
grid, arguments, keywords = kernels.scale_rows_arguments(x, y, sums)
with pretend_gpu(90):
    launcher.compiled_call(kernels.scale_rows, grid, *arguments, **keywords)
gc.callbacks.append(lambda *event: time.sleep(1e-4))  # a collection lets other threads run
gc.set_threshold(20)
failed = []


def parse():
    for _ in range(20):
        try:
            kernels.scale_rows.parse()
            accumulator.parse()  # what the compiler calls is parsed as kernels are
        except SystemError as error:
            failed.append(error)


threads = [threading.Thread(target=parse) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(failed))
"""


def test_threads_that_compileparse_in_turn():
    """CPython 3.11 fails where two of them parse at once."""
    script = PARSE.replace("TESTS", repr(str(Path(__file__).parents[1])))
    assert answer_of(script) == 0


# ---- on the GPU

gpu = pytest.mark.gpu


@pytest.fixture
def kernels():
    import launch_kernels

    return launch_kernels


def start(launch, *tensors) -> None:
    launch.on(torch.cuda.current_stream().cuda_stream)(tuple(x.data_ptr() for x in tensors))


def scaled(kernels, n):
    """x, y, sums, and a prepared launch for (x, y, sums)."""
    from strobe.call.launcher import compiled_call, prepare

    x, y, sums = kernels.rows(n, "cuda")
    grid, arguments, keywords = kernels.scale_rows_arguments(x, y, sums)
    call = compiled_call(kernels.scale_rows, grid, *arguments, **keywords)
    return x, y, sums, prepare([call], (x, y, sums))


def by_triton(kernels, x):
    y, sums = torch.zeros_like(x), torch.zeros(x.shape[0], device="cuda")
    grid, arguments, keywords = kernels.scale_rows_arguments(x, y, sums)
    kernels.scale_rows[grid](*arguments, **keywords)
    return y, sums


@gpu
@pytest.mark.parametrize("n", [1, 64, 1000])
def test_same_as_triton(kernels, n):
    from strobe.call.launcher import PreparedLaunches

    x, y, sums, launch = scaled(kernels, n)
    assert isinstance(launch, PreparedLaunches)
    for _ in range(300):  # more addresses than descriptors are kept
        x, y, sums = (torch.zeros_like(t) for t in (x, y, sums))
        x.normal_()
        start(launch, x, y, sums)
        for got, want in zip((y, sums), by_triton(kernels, x), strict=True):
            assert torch.equal(got, want)


@gpu
def test_triton_launches_what_is_unknown(kernels, monkeypatch, caplog):
    from strobe.call import launcher

    monkeypatch.setattr(launcher, "ptx_sizes", lambda ptx, name: [])
    launcher._warn.cache_clear()
    _, y, sums, launch = scaled(kernels, 200)
    scaled(kernels, 200)
    assert [record.message for record in caplog.records if "launched by Triton" in record.message][1:] == []
    assert "scale_rows is launched by Triton" in caplog.text
    other = torch.randn(200, 64, device="cuda").bfloat16()
    start(launch, other, y, sums)
    assert torch.equal(y, by_triton(kernels, other)[0])


@gpu
def test_descriptors_are_tritons(kernels):
    """Byte for byte, but for the bit that newer Tritons clear for small tensors, which Hopper does not read."""
    import ctypes

    from triton.backends.nvidia import driver

    from strobe.call.launcher import Descriptor, encoder

    x, y, sums = kernels.rows(70_000, "cuda")
    grid, arguments, keywords = kernels.scale_rows_arguments(x, y, sums)
    compiled = kernels.scale_rows.warmup(*arguments, grid=grid, **keywords)
    meta = compiled.metadata.tensordesc_meta[0]
    made = encoder(Descriptor(arguments[0], meta))[x.data_ptr()]
    make = driver.make_tensordesc_arg
    theirs = make(arguments[0], meta, None) if make.__code__.co_argcount == 3 else make(arguments[0], meta)
    start = -(-(id(theirs[0]) + 16) // 128) * 128
    assert made == ctypes.string_at(start, 128)


@gpu
def test_a_graph_of_prepared_launches(kernels):
    x, y, sums, launch = scaled(kernels, 500)
    start(launch, x, y, sums)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start(launch, x, y, sums)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        assert torch.equal(y, by_triton(kernels, x)[0])


@gpu
def test_threads_share_a_launch(kernels):
    """Among them threads that never used the GPU before."""
    x, _, _, launch = scaled(kernels, 300)
    wrong, started = [], threading.Barrier(8)

    def work(seed):
        started.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                mine = torch.full_like(x, seed)
                y, sums = torch.zeros_like(x), torch.zeros(300, device="cuda")
                start(launch, mine, y, sums)
                if not (y == 2 * seed + 5).all():  # 2^40 + 3 is 5 modulo 7
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- on the GPU: attention


@gpu
def test_attention_by_plans_is_the_operators():
    cases = [
        (1, 300, 300, 4, 4, 128, strobe.Causal()),
        (2, 1000, 700, 4, 2, 64, None),
        (3, 70, 900, 8, 1, 128, strobe.Window(left=100)),
    ]
    prepared_calls.forget()
    for batch, n_q, n_kv, heads_q, heads_kv, dim, mask in cases:
        q = torch.randn(batch, n_q, heads_q, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = torch.randn(2, batch, n_kv, heads_kv, dim, device="cuda", dtype=torch.bfloat16).unbind()

        def both(q=q, k=k, v=v, mask=mask):
            out, lse = strobe.attention(q, k, v, mask=mask, return_lse=True, deterministic=True)
            return out, lse, *torch.autograd.grad(out.sum() + lse.sum(), q)

        first, again = both(), both()
        assert any(entry.launches is not None for entry, _got in prepared_calls._known._entries.values())
        with without_plans():
            want = both()
        for x, y, z in zip(first, again, want, strict=True):
            assert torch.equal(x, z) and torch.equal(y, z)


@gpu
def test_attention_by_plans_in_graphs_and_streams():
    q, k, v = torch.randn(3, 2, 600, 4, 128, device="cuda", dtype=torch.bfloat16).unbind()
    want = strobe.attention(q, k, v, mask=strobe.Causal())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = strobe.attention(q, k, v, mask=strobe.Causal())
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outs = []
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 4]):
            outs.append(strobe.attention(q, k, v, mask=strobe.Causal()))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


def leave_nan_in_free_memory(like: torch.Tensor) -> None:
    """Where tensors of this size come next: else they may hold what they are about to hold from the last time."""
    held = [torch.full_like(like, torch.nan) for _ in range(64)]
    torch.cuda.synchronize()
    del held


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_launch_waits_for_those_ahead(head_dim):
    """A launch may begin while the one ahead of it ends (`kernels.common.turn`), and reads what that wrote: attentions in a
    row, each of the last one's result, give the same bits with a pause after each, without, and in a graph; so do gradients.
    They have few tiles, so that the GPU has room for the next; no other kernel comes in between, which would wait; and they all
    wait behind a kernel that does nothing for long, as it takes longer to launch one than to run it."""
    first, second, k, v, dout = torch.randn(5, 1, 700, 2, head_dim, device="cuda", dtype=torch.bfloat16).unbind()

    def chain(x, pause=False):
        for _ in range(8):
            x = strobe.attention(x, k, v, mask=strobe.Causal(), deterministic=True)
            if pause:
                torch.cuda.synchronize()
                if x.requires_grad:
                    x.register_hook(lambda _: torch.cuda.synchronize())
        return x

    q = first.clone().requires_grad_()
    want = chain(q, True)
    (want_dq,) = torch.autograd.grad(want, q, dout)
    for _ in range(5):
        leave_nan_in_free_memory(q)
        torch.cuda._sleep(10_000_000)
        got = chain(q)
        torch.cuda._sleep(10_000_000)
        (got_dq,) = torch.autograd.grad(got, q, dout)
        assert torch.equal(got, want) and torch.equal(got_dq, want_dq)
    graph, x = torch.cuda.CUDAGraph(), first.clone()
    wants = [chain(x, True), chain(second, True)]
    with torch.cuda.graph(graph):
        got = chain(x)
    for turn in range(6):  # in turn: what an early launch finds is the other's
        x.copy_((first, second)[turn % 2])
        graph.replay()
        assert torch.equal(got, wants[turn % 2])


@gpu
def test_strides_and_addresses_compile_nothing():
    from strobe.kernels.sm90.forward import forward_kernel

    def compiled() -> int:
        return len(forward_kernel.device_caches[torch.cuda.current_device()][0])

    q, k, v = torch.randn(3, 2, 500, 4, 128, device="cuda", dtype=torch.bfloat16).unbind()
    strobe.attention(q, k, v, mask=strobe.Causal(), backend="sm90")
    before, plans = compiled(), len(prepared_calls._known)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wide = torch.randn(2, 500, 3, 4, 128, device="cuda", dtype=torch.bfloat16).unbind(2)
    shifted = [torch.cat([x.flatten()[:8], x.flatten()])[8:].view(x.shape) for x in (q, k, v)]
    for other in (turned, wide, shifted, [x[:1] for x in (q, k, v)]):
        strobe.attention(*other, mask=strobe.Causal(), backend="sm90")
    assert len(prepared_calls._known) >= plans + 3 and compiled() == before
