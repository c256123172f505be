"""Small cases of every GPU kernel, for NVIDIA's checker.

    python benchmarks/sanitize.py --compile H200 [PART ...]     compile what these parts need, on any machine
    compute-sanitizer --tool memcheck python benchmarks/sanitize.py [PART ...]     (likewise racecheck, initcheck, synccheck)

Under the checker a kernel takes several times as long to compile, so compile them ahead, into the same TRITON_CACHE_DIR; which
config a call gets may depend on the GPU's name. What was compiled after all is counted. Parts can run at the same time, and so
can shares of a part (`--share 2/4`: every fourth case, from the second on). `lying` (lengths that cannot be:
see tests/lying.py) runs where it is named.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice, product
from os import cpu_count
from pathlib import Path
from typing import TypeVar
from unittest import mock

import torch
from triton import knobs

import strobe
from strobe import api
from strobe.call import cached_calls, dispatch, launches, operators, prepared_calls
from strobe.call.launcher import compiled_call
from strobe.cpu import append as append_cpu
from strobe.device import KNOWN, Arch
from strobe.fp8 import attention_fp8
from strobe.kernels.common.call import Call
from strobe.kernels.decode import append
from strobe.lab.binary.offline import pretend_gpu
from strobe_cli.precompile import kind_of

sys.path += [str(Path(__file__).parent.parent / "tests" / folder) for folder in ("", "serving")]

from requests_at_random import draw, with_queries

DEVICE = "cuda"
"""Where tensors are; "cpu" while kernels are compiled for a GPU that need not be there."""

BEGIN = time.perf_counter()

SHARE = (1, 1)
"""Which share of each part's cases runs, of how many."""

Case = TypeVar("Case")


def cases(every: Iterable[Case]) -> Iterator[Case]:
    """The cases of this process's share."""
    return islice(every, SHARE[0] - 1, None, SHARE[1])


def problem(head_dim: int, n_q: int, n_kv: int, head_dim_v: int | None = None, heads: int = 4, dtype=torch.bfloat16):
    shapes = ((2, n_q, heads, head_dim), (2, n_kv, 2, head_dim), (2, n_kv, 2, head_dim_v or head_dim))
    return [torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in shapes]


def packed(head_dim: int, lengths: tuple[int, ...]):
    """Sequences of these lengths, of queries and keys; and the keywords that say so."""
    q, k, v = (torch.randn(sum(lengths), heads, head_dim, dtype=torch.bfloat16, device=DEVICE) for heads in (4, 2, 2))
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    keywords = dict(cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    return (q, k, v), keywords


MASKS = (strobe.Full(), strobe.Causal(), strobe.Window(100, 20), strobe.Prefix(70))


@torch.no_grad()
def hopper() -> None:
    for dims, mask in cases(product(((8, 8), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)), MASKS)):
        q, k, v = problem(dims[0], 200, 300, dims[1])
        strobe.attention(q, k, v, mask=mask, backend="sm90")
    for head_dim, mask in cases(product((64, 96, 256), MASKS)):
        inputs, keywords = packed(head_dim, (130, 0, 300, 1))
        strobe.attention(*inputs, mask=mask, backend="sm90", **keywords)
    for head_dim, n_kv in cases(((8, 1), (64, 77), (80, 128), (64, 197))):  # few keys, which have a kernel of their own
        strobe.attention(*problem(head_dim, 300, n_kv, heads=64), backend="sm90")
    for heads, mask in cases(product((6, 10), MASKS)):  # on 2: three fill a tile, of five one is alone
        strobe.attention(*problem(64, 90, 100, heads=heads), mask=mask, backend="sm90")
    # More tiles than CTAs; tiles that see nothing; noted rows, for a NaN and for a late key; the safe softmax.
    strobe.attention(*problem(64, 300, 100, heads=64), mask=strobe.Causal(), backend="sm90")
    q, k, v = problem(64, 200, 300)
    poisoned, late = v.clone(), k.clone()
    poisoned[:, 150] = float("nan")
    late[:, 299] *= 1000.0
    strobe.attention(q, k, poisoned, mask=strobe.Causal(), backend="sm90")
    strobe.attention(q, late, v, backend="sm90")
    strobe.use_optimistic_softmax(False)
    for mask in cases(MASKS):
        strobe.attention(q, k, v, mask=mask, backend="sm90")
    strobe.use_optimistic_softmax(True)
    # What changes scores, and what masks pair by pair.
    score = strobe.Score(softcap=5.0, alibi=torch.rand(4, device=DEVICE), sinks=torch.rand(4, device=DEVICE))
    bias = strobe.Score(bias=torch.randn(2, 1, 200, 300, device=DEVICE))
    documents = strobe.Document(*(torch.randint(0, 3, (2, n), device=DEVICE).sort().values for n in (200, 300)))
    used = {"seqused_q": torch.tensor([200, 70], device=DEVICE), "seqused_kv": torch.tensor([0, 170], device=DEVICE)}
    strobe.attention(q, k, v, mask=strobe.Causal(), score=score, backend="sm90")
    strobe.attention(q, k, v, score=bias, backend="sm90")
    strobe.attention(q, k, v, mask=documents, dropout_p=0.1, backend="sm90")
    strobe.attention(q, k, v, **{name: x.to(torch.int32) for name, x in used.items()}, backend="sm90")


@torch.no_grad()
def hopper_fp8() -> None:
    for head_dim, mask in cases(product((64, 96, 256), MASKS)):
        inputs = (x.to(torch.float8_e4m3fn) for x in problem(head_dim, 200, 300))
        attention_fp8(*inputs, mask=mask, score=strobe.Score(sinks=torch.rand(4, device=DEVICE)))


def hopper_backward() -> None:
    for dims, mask in cases(product(((8, 8), (64, 64), (96, 96), (128, 128), (64, 128), (192, 128), (256, 256)), MASKS)):
        q, k, v = problem(dims[0], 200, 300, dims[1])
        strobe.attention(q, k, v, mask=mask, backend="sm90").sum().backward()
        synchronize(f"backward of head dims {dims}, {mask}")
    for head_dim in cases((64, 96, 256)):
        inputs, keywords = packed(head_dim, (130, 0, 300, 1))
        q, k, v = (x.requires_grad_() for x in inputs)
        strobe.attention(q, k, v, mask=strobe.Causal(), backend="sm90", **keywords).sum().backward()
    few_keys = (((8, 8), 1, 64), ((64, 64), 77, 10), ((80, 128), 90, 10), ((128, 128), 128, 10))
    for dims, n_kv, heads in cases(few_keys):
        strobe.attention(*problem(dims[0], 900, n_kv, dims[1], heads), backend="sm90").sum().backward()
        synchronize(f"backward of head dims {dims}, {n_kv} keys")
    # More blocks than CTAs; keys that nobody sees; a block to be computed again; the same bits in every run; changed scores.
    strobe.attention(*problem(64, 300, 100, heads=64), mask=strobe.Causal(), backend="sm90").sum().backward()
    q, k, v = problem(128, 200, 300)
    q.data[:, 20] = float("nan")
    strobe.attention(q, k, v, mask=strobe.Window(100, 20), backend="sm90").sum().backward()
    # Additions in an order, or dS stored.
    for dims, mask in cases(product(((64, 64), (96, 96), (192, 128), (256, 256)), MASKS)):
        q, k, v = problem(dims[0], 200, 300, dims[1])
        strobe.attention(q, k, v, mask=mask, deterministic=True, backend="sm90").sum().backward()
        synchronize(f"deterministic backward of head dims {dims}, {mask}")


def hopper_changed_backward() -> None:
    """What changes scores, what is compared pair by pair, what is dropped; a bias's gradient, of every pair and added up."""
    for deterministic in cases((False, True)):
        for bias in (torch.randn(2, 4, 200, 300, device=DEVICE), torch.randn(1, 4, 1, 300, device=DEVICE)):
            q, k, v = problem(64, 200, 300)
            score = strobe.Score(softcap=5.0, alibi=torch.rand(4, device=DEVICE), bias=bias.requires_grad_())
            strobe.attention(q, k, v, score=score, deterministic=deterministic, backend="sm90").sum().backward()
        for head_dim in (64, 128, 192):
            q, k, v = problem(head_dim, 200, 300, min(head_dim, 128))
            ids = (torch.randint(0, 3, (2, n), device=DEVICE).sort().values for n in (200, 300))
            mask = strobe.Document(*ids) & strobe.Window(100, 20)
            strobe.attention(q, k, v, mask=mask, dropout_p=0.1, deterministic=deterministic, backend="sm90").sum().backward()


def portable() -> None:
    for mask in cases((*MASKS, strobe.Prefix(30) & strobe.Document(torch.randint(0, 3, (2, 130), device=DEVICE)))):
        q, k, v = problem(40, 130, 130)
        strobe.attention(q, k, v, mask=mask, score=strobe.Score(softcap=5.0), backend="portable").sum().backward()
    inputs, keywords = packed(64, (17, 0, 63))
    q, k, v = (x.requires_grad_() for x in inputs)
    strobe.attention(q, k, v, mask=strobe.Causal(), backend="portable", **keywords).sum().backward()


def decode() -> None:
    """Requests at random over caches of every kind, missing pages and lengths that cannot be among them."""
    for seed in cases(range(24)):
        call = draw(seed, torch.bfloat16, honest=seed % 3 > 0, device=DEVICE, deterministic=seed % 5 == 0)
        strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
        lengths = torch.full_like(call.cache.lengths, (10**6, -7)[seed % 2])
        strobe.decode(call.q, strobe.Cache(**{**vars(call.cache), "lengths": lengths}), **call.keywords)
        synchronize(f"decode, seed {seed}")


def several_queries() -> None:
    """One group of wgmma, or eight warps."""
    shapes = ((4, 8, 64), (3, 7, 16), (16, 4, None), (5, 8, 48), (16, 8, 64), (16, 8, 16))
    for seed, (n_q, group, page) in cases(enumerate(shapes)):
        call = draw(seed, torch.bfloat16, device=DEVICE, n_q=n_q, group=group, page=page, room=700, batch=2, head_dim=128)
        strobe.decode(call.q, call.cache, **call.keywords)
        synchronize(f"several queries, seed {seed}")


def shares() -> None:
    """Key heads that have CTAs of their own: clusters, even shares, whole jobs, fixed splits."""
    one, several = ((None, 4, 2), (16, 8, 2), (64, 1, 4), (None, 8, 8), (16, 8, 8)), ((64, 8, 2), (None, 4, 4), (16, 7, 3))
    for batch, room, (page, group, heads_kv) in cases([*product((1,), (1500,), one), *product((2, 7, 60), (700,), several)]):
        call = draw(1, torch.bfloat16, device=DEVICE, n_q=1, group=group, heads_kv=heads_kv, page=page, room=room, batch=batch,
                    head_dim=128, head_dim_v=128, mask=strobe.Causal(), ragged=False, tree=False, leftpad=False)  # fmt: skip
        strobe.decode(call.q, call.cache, **call.keywords)
        synchronize(f"{batch} requests, {heads_kv} key heads")
    for page, n_q in cases(((None, 1), (16, 1), (64, 4))):
        call = draw(1, torch.bfloat16, device=DEVICE, deterministic=True, n_q=n_q, group=8, heads_kv=8, page=page, room=1000,
                    batch=1, head_dim=128, head_dim_v=128, mask=strobe.Causal(), ragged=False, tree=False,
                    leftpad=False)  # fmt: skip
        strobe.decode(call.q, call.cache, **call.keywords)
        synchronize(f"fixed splits, {n_q} queries")


def queries_by_tma() -> None:
    """16 queries, whose rows TMA copies where memory is fast; with 8 key heads who comes last adds parts to its own."""
    shapes = ((7, 4, 64, 1700), (8, 8, None, 1700), (8, 8, 16, 4500), (7, 4, None, 4500))
    for (group, heads_kv, page, room), ragged in cases([*product(shapes, (False,)), (shapes[0], True), (shapes[2], True)]):
        call = draw(1, torch.bfloat16, device=DEVICE, n_q=16, group=group, heads_kv=heads_kv, page=page, room=room, batch=10,
                    head_dim=128, head_dim_v=128, mask=strobe.Causal(), ragged=ragged, tree=False, leftpad=False)  # fmt: skip
        strobe.decode(call.q, call.cache, **call.keywords)
        synchronize(f"16 queries of {group} heads, room {room}{', packed' * ragged}")


def fixed_bits() -> None:
    """Splits whose references move late where memory is fast: one group, eight warps of one role and of two; pieces that
    are taken again, as some scores are far above those of a split's first step."""
    shapes = ((1, 1, 64, 1700), (4, 2, 16, 1700), (16, 2, 64, 1700), (16, 1, None, 9000), (16, 40, 64, 2048))
    for (n_q, batch, page, room), far in cases(product(shapes, (1.0, 256.0))):
        call = draw(1, torch.bfloat16, device=DEVICE, deterministic=True, n_q=n_q, group=8, heads_kv=8, page=page, room=room,
                    batch=batch, lengths=[room - 300 * (b % 5) for b in range(batch)], head_dim=128, head_dim_v=128,
                    mask=strobe.Causal(), alibi=False, ragged=False, tree=False, leftpad=False)  # fmt: skip
        call.cache.k[:, 7::16] *= far
        strobe.decode(call.q, call.cache, **call.keywords)
        synchronize(f"fixed bits, {n_q} queries of {batch} requests, some keys {far:g} times as large")


def held_queries() -> None:
    """One to four queries with room for very many keys, of which there are few."""
    for n_q, page in cases(((1, 64), (1, 16), (4, None))):
        call = draw(1, torch.bfloat16, device=DEVICE, n_q=n_q, group=8, heads_kv=8, page=page, room=4096, batch=33,
                    lengths=[100 + 20 * b for b in range(33)], head_dim=128, head_dim_v=128, mask=strobe.Causal(), alibi=False,
                    ragged=False, tree=False, leftpad=False)  # fmt: skip
        strobe.decode(call.q, call.cache, **call.keywords)
        synchronize(f"held queries, {n_q} of each request")


def heads_abreast() -> None:
    """Requests of unequal lengths whose key heads, or tiles, are walked along together, by each kernel that takes them."""
    shapes = ((1, 128, 16, 9), (4, 128, 64, 9), (16, 128, 64, 40), (16, 96, 64, 9), (16, 80, None, 9), (2, 96, 64, 9),
              (4, 144, 16, 9), (4, 160, 64, 9), (20, 128, 64, 9), (20, 160, 16, 9))  # fmt: skip
    for n_q, head_dim, page, batch in cases(shapes):
        call = draw(1, torch.bfloat16, device=DEVICE, n_q=n_q, group=8, heads_kv=8, page=page, room=2100, batch=batch,
                    lengths=[2100 - 500 * (b % 5) for b in range(batch)], head_dim=head_dim, head_dim_v=head_dim,
                    mask=strobe.Causal(), ragged=False, tree=False, leftpad=False)  # fmt: skip
        strobe.decode(call.q, call.cache, **call.keywords)
        synchronize(f"abreast, {n_q} queries of {batch} requests, {head_dim} columns")


def latent_and_bits() -> None:
    """The latent of MLA; caches of 8 bits."""
    for heads in cases((16, 128)):
        latent, q = (torch.randn(*shape, 576, dtype=torch.bfloat16, device=DEVICE) for shape in ((40, 64, 1), (2, 1, heads)))
        lengths, table = torch.tensor([1300, 17], dtype=torch.int32), torch.arange(40, dtype=torch.int32).view(2, 20)
        strobe.decode(q, strobe.Cache(latent, None, lengths.to(DEVICE), table.to(DEVICE), head_dim_v=512))
        synchronize(f"a latent, {heads} heads")
    for dtype in cases((torch.float8_e4m3fn, torch.float8_e5m2)):
        call = draw(2, torch.bfloat16, device=DEVICE, page=16, room=700, leftpad=False)
        k, v = (x.nan_to_num(nan=448.0).to(dtype) for x in (call.cache.k, call.cache.v))
        strobe.decode(call.q, strobe.Cache(**{**vars(call.cache), "k": k, "v": v}), **call.keywords)
        synchronize(f"a cache of {dtype}")
    for n_q, page, room in cases(((4, 64, 500), (8, 16, 2100), (16, None, 2100))):  # shared evenly, converted for wgmma
        call = draw(2, torch.bfloat16, device=DEVICE, n_q=n_q, group=8, heads_kv=1, batch=2, page=page, room=room, head_dim=128,
                    head_dim_v=128, mask=strobe.Causal(), ragged=False, tree=False, leftpad=False)  # fmt: skip
        k, v = (x.nan_to_num(nan=448.0).to(torch.float8_e4m3fn) for x in (call.cache.k, call.cache.v))
        strobe.decode(call.q, strobe.Cache(**{**vars(call.cache), "k": k, "v": v}), **call.keywords)
        synchronize(f"{n_q} queries over a cache of 8 bits")


def head_dims() -> None:
    """129 to 256 columns, and 33 to 64: by each of the kernels that they have on Hopper."""
    wide = ((256, 1, 1, 900, 64), (256, 4, 3, 700, 16), (256, 16, 3, 2900, 64), (192, 16, 40, 300, 16), (256, 4, 3, 700, 64))
    narrow = ((64, 1, 1, 1500, 16), (64, 1, 32, 2100, None), (64, 8, 16, 2100, 64), (64, 16, 9, 2100, 16))
    for number, (dim, n_q, batch, room, page) in cases(enumerate(wide + narrow)):
        call = draw(1, torch.bfloat16, device=DEVICE, n_q=n_q, group=8, heads_kv=2, page=page, room=room, batch=batch,
                    head_dim=dim, head_dim_v=dim, mask=strobe.Causal(), ragged=False, tree=False, leftpad=False)  # fmt: skip
        cache = call.cache
        if number == len(wide) - 1:
            k, v = (x.nan_to_num(nan=448.0).to(torch.float8_e4m3fn) for x in (cache.k, cache.v))
            cache = strobe.Cache(**{**vars(cache), "k": k, "v": v})
        strobe.decode(call.q, cache, **call.keywords)
        synchronize(f"{n_q} queries of {batch} requests, {dim} columns")


def prompts() -> None:
    """Over pages; an append, and a step in a graph."""
    for seed, page in cases(enumerate((16, 48, 64, 128, None, 16))):  # prompts, of which the last ones leave notes
        call = draw(seed, torch.bfloat16, seed < 4, device=DEVICE, n_q=200, page=page, tree=False, leftpad=False)
        strobe.decode(call.q, call.cache, backend="sm90_cache", **call.keywords)
        synchronize(f"prompts, seed {seed}")
    for dim, group in cases(((64, 4), (128, 4), (256, 4), (64, 3), (128, 5))):  # of which two heads a tile leave one alone
        call = draw(5, torch.bfloat16, device=DEVICE, n_q=130, batch=6, lengths=[250, 200, 1, 60, 257, 129], room=257, page=16,
                    head_dim=dim, head_dim_v=dim, heads_kv=2, group=group, tree=False, leftpad=False)  # fmt: skip
        call = with_queries(call, [1, 5, 1, 40, 200, 128])
        strobe.decode(call.q, call.cache, backend="sm90_cache", **call.keywords)
        synchronize(f"prompts and single tokens, {dim} columns, {group} heads a key head")
    call = draw(1, torch.bfloat16, device=DEVICE, ragged=False, tree=False, leftpad=False, n_q=1, page=16)
    new_k, new_v = (torch.randn_like(x[: call.q.shape[0], :1]) for x in (call.cache.k, call.cache.v))
    rotary = strobe.Rotary(*(torch.randn(300, 16, device=DEVICE) for _ in range(2)))
    many = torch.randn(3, 2, 40, 128, device=DEVICE)  # heads that several programs have
    places = torch.zeros(3, 8, 40, 128, device=DEVICE)
    strobe.append(
        strobe.Cache(places, places.clone(), call.cache.lengths.new_tensor([0, 3, 6])), many, many, q=many, rotary=rotary
    )
    synchronize("an append of many heads")
    cache, q = strobe.append(call.cache, new_k, new_v, q=call.q, rotary=rotary)
    if DEVICE == "cpu":
        strobe.decode(q, cache)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strobe.decode(q, cache)
    graph.replay()
    graph.replay()
    synchronize("decode in a graph")


def lying() -> None:
    """Lengths that cannot be, with each kernel that takes lengths: no access leaves its tensors."""
    from lying import LIES, all_lengths, backward_of, inputs

    from strobe.call import launches
    from strobe.call.dispatch import backend_module
    from strobe.kernels.sm90 import fp8_backend
    from strobe.problem import Upstream

    lies = [all_lengths(lie) for lie in LIES if not lie.wide]
    for name, deterministic in (("sm90", False), ("sm90", True), ("portable", False)):
        backend = backend_module(name)
        for lie in lies:
            t, problem, operands = inputs(lie, (64, 64), device=DEVICE, mask=strobe.Causal())
            out, lse = launches.forward(backend, problem, operands)
            upstream = Upstream(out, lse, torch.ones_like(out))
            launches.backward(backend, backward_of(problem, deterministic), operands, upstream)
            synchronize(f"{name}, {lie}")
    for lie in LIES:
        if lie.packed and not lie.wide and lie.used_q is None and lie.used_kv is None:
            t, problem, operands = inputs(lie, (64, 64), device=DEVICE, mask=strobe.Causal())
            q, k, v = (x.to(torch.float8_e4m3fn) for x in (t.q, t.k, t.v))
            launches.forward(fp8_backend, replace(problem, dtype=q.dtype), operands._replace(q=q, k=k, v=v))
            synchronize(f"fp8, {lie}")


def synchronize(name: str) -> None:
    """Wait for the GPU, and say what has run and when; RuntimeError with its name if that was wrong."""
    if DEVICE == "cpu":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {error}") from None
    say(name)


def say(what: str) -> None:
    print(f"{time.perf_counter() - BEGIN:6.1f} s  {what}", flush=True)


PARTS = {
    "decode": decode,
    "several": several_queries,
    "shares": shares,
    "queries": queries_by_tma,
    "fixed": fixed_bits,
    "held": held_queries,
    "abreast": heads_abreast,
    "latent": latent_and_bits,
    "dims": head_dims,
    "prompts": prompts,
    "forward": hopper,
    "fp8": hopper_fp8,
    "backward": hopper_backward,
    "changed": hopper_changed_backward,
    "portable": portable,
    "lying": lying,
}


# ---- compiled ahead


@contextmanager
def compiling(arch: Arch) -> Iterator[None]:
    """Within it, calls with tensors on the CPU are those of a GPU, and kernels are compiled instead of launched, in threads. At
    its end all are."""
    begun: dict[tuple, Future] = {}

    def compile_once(call: Call) -> None:
        key = kind_of(call)
        if key not in begun:
            begun[key] = pool.submit(compiled_call, call.kernel, call.grid, *call.arguments, **call.keywords)

    with ExitStack() as stack:
        for module in (api, append, cached_calls, dispatch, launches, prepared_calls):
            stack.enter_context(mock.patch.object(module, "arch_of", lambda device: arch))
        for module, name in ((cached_calls, "check_contents"), (operators, "_check_lengths")):  # a CPU refuses what lies
            stack.enter_context(mock.patch.object(module, name, lambda *_: None))
        stack.enter_context(mock.patch.object(append_cpu, "append", append.append))
        stack.enter_context(mock.patch.object(Call, "launch", compile_once))
        stack.enter_context(pretend_gpu(arch.capability))
        pool = stack.enter_context(ThreadPoolExecutor(cpu_count()))
        yield
        for kernel in begun.values():
            kernel.result()


@contextmanager
def counting() -> Iterator[list[bool]]:
    """What it yields gets an entry for each kernel that Triton is asked for, whether it was in its cache."""
    there: list[bool] = []

    def listener(*, src, cache_hit: bool, **_) -> None:
        there.append(cache_hit)
        if not cache_hit and DEVICE == "cuda":
            say(f"compiled: {src.name}")

    with mock.patch.object(knobs.compilation, "listener", listener):
        yield there


def main() -> None:
    global DEVICE, SHARE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--compile", metavar="GPU", choices=[name for name, arch in KNOWN.items() if arch.capability == 90])
    parser.add_argument("--share", metavar="I/N", type=share, default=SHARE)
    arguments = parser.parse_args()
    parts = arguments.parts or [part for part in PARTS if part != "lying"]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"PART must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    SHARE = arguments.share
    for part in parts:
        torch.manual_seed(0)
        with counting() as there:
            if arguments.compile:
                DEVICE = "cpu"
                with compiling(KNOWN[arguments.compile]):
                    PARTS[part]()
            else:
                PARTS[part]()
                synchronize(f"{part}: all kernels ran")
        say(f"{part}: {there.count(False)} kernels compiled, {there.count(True)} were there")


def share(text: str) -> tuple[int, int]:
    """The share "2/4" as two numbers."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, got {text}")
    return int(number), int(of)


if __name__ == "__main__":
    main()
