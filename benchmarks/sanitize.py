"""Small cases of every GPU kernel, for NVIDIA's checker.

    compute-sanitizer --tool memcheck python benchmarks/sanitize.py [PART ...]     (likewise racecheck, initcheck, synccheck)

Most of the time kernels are compiled, one after the other: parts can run at the same time. `lying` (lengths that cannot be: see
tests/lying.py) runs where it is named.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

import strobe
from strobe.fp8 import attention_fp8


def problem(head_dim: int, n_q: int, n_kv: int, head_dim_v: int | None = None, heads: int = 4, dtype=torch.bfloat16):
    shapes = ((2, n_q, heads, head_dim), (2, n_kv, 2, head_dim), (2, n_kv, 2, head_dim_v or head_dim))
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]


def packed(head_dim: int, lengths: tuple[int, ...]):
    """Sequences of these lengths, of queries and keys; and the keywords that say so."""
    q, k, v = (torch.randn(sum(lengths), heads, head_dim, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    keywords = dict(cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    return (q, k, v), keywords


MASKS = (strobe.Full(), strobe.Causal(), strobe.Window(100, 20), strobe.Prefix(70))


@torch.no_grad()
def hopper() -> None:
    for dims in ((8, 8), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)):
        for mask in MASKS:
            q, k, v = problem(dims[0], 200, 300, dims[1])
            strobe.attention(q, k, v, mask=mask, backend="sm90")
    for head_dim in (64, 96, 256):
        for mask in MASKS:
            inputs, keywords = packed(head_dim, (130, 0, 300, 1))
            strobe.attention(*inputs, mask=mask, backend="sm90", **keywords)
    for head_dim, n_kv in ((8, 1), (64, 77), (80, 128), (64, 197)):  # few keys, which have a kernel of their own
        strobe.attention(*problem(head_dim, 300, n_kv, heads=64), backend="sm90")
    # More tiles than CTAs; tiles that see nothing; noted rows, for a NaN and for a late key; the safe softmax.
    strobe.attention(*problem(64, 300, 100, heads=64), mask=strobe.Causal(), backend="sm90")
    q, k, v = problem(64, 200, 300)
    poisoned, late = v.clone(), k.clone()
    poisoned[:, 150] = float("nan")
    late[:, 299] *= 1000.0
    strobe.attention(q, k, poisoned, mask=strobe.Causal(), backend="sm90")
    strobe.attention(q, late, v, backend="sm90")
    strobe.use_optimistic_softmax(False)
    for mask in MASKS:
        strobe.attention(q, k, v, mask=mask, backend="sm90")
    strobe.use_optimistic_softmax(True)
    # What changes scores, and what masks pair by pair.
    score = strobe.Score(softcap=5.0, alibi=torch.rand(4, device="cuda"), sinks=torch.rand(4, device="cuda"))
    bias = strobe.Score(bias=torch.randn(2, 1, 200, 300, device="cuda"))
    documents = strobe.Document(*(torch.randint(0, 3, (2, n), device="cuda").sort().values for n in (200, 300)))
    used = {"seqused_q": torch.tensor([200, 70], device="cuda"), "seqused_kv": torch.tensor([0, 170], device="cuda")}
    strobe.attention(q, k, v, mask=strobe.Causal(), score=score, backend="sm90")
    strobe.attention(q, k, v, score=bias, backend="sm90")
    strobe.attention(q, k, v, mask=documents, dropout_p=0.1, backend="sm90")
    strobe.attention(q, k, v, **{name: x.to(torch.int32) for name, x in used.items()}, backend="sm90")


@torch.no_grad()
def hopper_fp8() -> None:
    for head_dim in (64, 96, 256):
        for mask in MASKS:
            inputs = (x.to(torch.float8_e4m3fn) for x in problem(head_dim, 200, 300))
            attention_fp8(*inputs, mask=mask, score=strobe.Score(sinks=torch.rand(4, device="cuda")))


def hopper_backward() -> None:
    for dims in ((8, 8), (64, 64), (96, 96), (128, 128), (64, 128), (192, 128), (256, 256)):
        for mask in MASKS:
            q, k, v = problem(dims[0], 200, 300, dims[1])
            strobe.attention(q, k, v, mask=mask, backend="sm90").sum().backward()
    for head_dim in (64, 96, 256):
        inputs, keywords = packed(head_dim, (130, 0, 300, 1))
        q, k, v = (x.requires_grad_() for x in inputs)
        strobe.attention(q, k, v, mask=strobe.Causal(), backend="sm90", **keywords).sum().backward()
    for dims, n_kv, heads in (((8, 8), 1, 64), ((64, 64), 77, 10), ((80, 128), 90, 10), ((128, 128), 128, 10)):  # few keys
        strobe.attention(*problem(dims[0], 900, n_kv, dims[1], heads), backend="sm90").sum().backward()
    # More blocks than CTAs; keys that nobody sees; a block to be computed again; the same bits in every run; changed scores.
    strobe.attention(*problem(64, 300, 100, heads=64), mask=strobe.Causal(), backend="sm90").sum().backward()
    q, k, v = problem(128, 200, 300)
    q.data[:, 20] = float("nan")
    strobe.attention(q, k, v, mask=strobe.Window(100, 20), backend="sm90").sum().backward()
    for dims in ((64, 64), (96, 96), (192, 128), (256, 256)):  # additions in an order, or dS stored
        for mask in MASKS:
            q, k, v = problem(dims[0], 200, 300, dims[1])
            strobe.attention(q, k, v, mask=mask, deterministic=True, backend="sm90").sum().backward()


def hopper_changed_backward() -> None:
    """What changes scores, what is compared pair by pair, what is dropped; a bias's gradient, of every pair and added up."""
    for deterministic in (False, True):
        for bias in (torch.randn(2, 4, 200, 300, device="cuda"), torch.randn(1, 4, 1, 300, device="cuda")):
            q, k, v = problem(64, 200, 300)
            score = strobe.Score(softcap=5.0, alibi=torch.rand(4, device="cuda"), bias=bias.requires_grad_())
            strobe.attention(q, k, v, score=score, deterministic=deterministic, backend="sm90").sum().backward()
        for head_dim in (64, 128, 192):
            q, k, v = problem(head_dim, 200, 300, min(head_dim, 128))
            ids = (torch.randint(0, 3, (2, n), device="cuda").sort().values for n in (200, 300))
            mask = strobe.Document(*ids) & strobe.Window(100, 20)
            strobe.attention(q, k, v, mask=mask, dropout_p=0.1, deterministic=deterministic, backend="sm90").sum().backward()


def portable() -> None:
    for mask in (*MASKS, strobe.Prefix(30) & strobe.Document(torch.randint(0, 3, (2, 130), device="cuda"))):
        q, k, v = problem(40, 130, 130)
        strobe.attention(q, k, v, mask=mask, score=strobe.Score(softcap=5.0), backend="portable").sum().backward()
    inputs, keywords = packed(64, (17, 0, 63))
    q, k, v = (x.requires_grad_() for x in inputs)
    strobe.attention(q, k, v, mask=strobe.Causal(), backend="portable", **keywords).sum().backward()


def decode() -> None:
    """Requests at random over caches of every kind, missing pages and lengths that cannot be among them; an append, a graph."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "serving"))
    from requests_at_random import draw

    for seed in range(24):
        call = draw(seed, torch.bfloat16, honest=seed % 3 > 0, device="cuda", deterministic=seed % 5 == 0)
        strobe.decode(call.q, call.cache, return_lse=True, **call.keywords)
        lengths = torch.full_like(call.cache.lengths, (10**6, -7)[seed % 2])
        strobe.decode(call.q, strobe.Cache(**{**vars(call.cache), "lengths": lengths}), **call.keywords)
        synchronize(f"decode, seed {seed}")
    for seed, (n_q, group, page) in enumerate(((4, 8, 64), (3, 7, 16), (16, 4, None), (5, 8, 48))):  # one group of wgmma
        call = draw(seed, torch.bfloat16, device="cuda", n_q=n_q, group=group, page=page, room=700, batch=2, head_dim=128)
        strobe.decode(call.q, call.cache, **call.keywords)
        synchronize(f"several queries, seed {seed}")
    for seed, page in enumerate((16, 48, 64, 128, None, 16)):  # prompts, of which the last ones leave notes
        call = draw(seed, torch.bfloat16, seed < 4, device="cuda", n_q=200, page=page, tree=False, leftpad=False)
        strobe.decode(call.q, call.cache, backend="sm90_cache", **call.keywords)
        synchronize(f"prompts, seed {seed}")
    call = draw(1, torch.bfloat16, device="cuda", ragged=False, tree=False, leftpad=False, n_q=1, page=16)
    new_k, new_v = (torch.randn_like(x[: call.q.shape[0], :1]) for x in (call.cache.k, call.cache.v))
    rotary = strobe.Rotary(*(torch.randn(300, 16, device="cuda") for _ in range(2)))
    cache, q = strobe.append(call.cache, new_k, new_v, q=call.q, rotary=rotary)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strobe.decode(q, cache)
    graph.replay()
    graph.replay()
    synchronize("decode in a graph")


def lying() -> None:
    """Lengths that cannot be, with each kernel that takes lengths: no access leaves its tensors."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from lying import LIES, all_lengths, backward_of, inputs

    from strobe.call import launches
    from strobe.call.dispatch import backend_module
    from strobe.kernels.sm90 import fp8_backend
    from strobe.problem import Upstream

    lies = [all_lengths(lie) for lie in LIES if not lie.wide]
    for name, deterministic in (("sm90", False), ("sm90", True), ("portable", False)):
        backend = backend_module(name)
        for lie in lies:
            t, problem, operands = inputs(lie, (64, 64), device="cuda", mask=strobe.Causal())
            out, lse = launches.forward(backend, problem, operands)
            upstream = Upstream(out, lse, torch.ones_like(out))
            launches.backward(backend, backward_of(problem, deterministic), operands, upstream)
            synchronize(f"{name}, {lie}")
    for lie in LIES:
        if lie.packed and not lie.wide and lie.used_q is None and lie.used_kv is None:
            t, problem, operands = inputs(lie, (64, 64), device="cuda", mask=strobe.Causal())
            q, k, v = (x.to(torch.float8_e4m3fn) for x in (t.q, t.k, t.v))
            launches.forward(fp8_backend, replace(problem, dtype=q.dtype), operands._replace(q=q, k=k, v=v))
            synchronize(f"fp8, {lie}")


def synchronize(name: str) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {error}") from None


PARTS = {
    "decode": decode,
    "forward": hopper,
    "fp8": hopper_fp8,
    "backward": hopper_backward,
    "changed": hopper_changed_backward,
    "portable": portable,
    "lying": lying,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parts = parser.parse_args().parts or [part for part in PARTS if part != "lying"]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"PART must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    torch.manual_seed(0)
    for part in parts:
        PARTS[part]()
        synchronize(part)
        print(f"{part}: all kernels ran", flush=True)


if __name__ == "__main__":
    main()
