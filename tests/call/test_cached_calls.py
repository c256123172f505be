"""The short ways of `strobe.decode` and `strobe.append` launch what a call that looked the same prepared, and leave others to
the operator."""

from types import SimpleNamespace

import pytest
import torch

import strobe
from strobe.call import cached_calls, known_calls, launcher, launches
from strobe.call.launches import Ahead
from strobe.kernels import workspace
from strobe.kernels.common.call import Buffer, Buffers, Call


class Plan:
    """In place of prepared launches: keeps the addresses that it is launched with."""

    def __init__(self):
        self.launched: list[tuple[int, ...]] = []

    def decode(self, stream, addresses):
        self.launched.append(tuple(addresses))

    launch = decode


def append_launch(operands, options) -> Ahead:
    return Ahead(None, [], [x.clone() for x in (operands.lengths, operands.q) if x is not None])


@pytest.fixture
def plans(monkeypatch) -> list[Plan]:
    """All that are made."""
    made: list[Plan] = []

    def launches(operands, options, *new):
        made.append(Plan())
        return made[-1]

    monkeypatch.setattr(known_calls, "may_be_prepared", lambda x: True)
    monkeypatch.setattr(cached_calls, "_launches", launches)
    monkeypatch.setattr(cached_calls, "_append_launch", append_launch)
    monkeypatch.setattr(cached_calls.launches, "prepared_call", launches)
    monkeypatch.setattr(cached_calls, "raw_stream", lambda device: 0)
    cached_calls.forget()
    yield made
    cached_calls.forget()


def ints(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def call(batch=2, **changes) -> dict:
    q, (k, v) = torch.randn(batch, 1, 4, 16), torch.randn(2, 6, 8, 2, 16)
    cache = strobe.Cache(k, v, ints(*[8] * batch), ints(*[[2, 4]] * batch))
    return {"q": q, "cache": cache, **changes}


def addresses(q, cache, **others) -> tuple[int, ...]:
    tensors = (q, cache.k, cache.v, cache.lengths, cache.page_table, *others.values())
    return tuple(x.data_ptr() for x in tensors if isinstance(x, torch.Tensor))


def test_calls_that_look_the_same_run_the_same_launches(plans):
    first, second = call(), call(scale=None, mask=None)
    out = torch.empty_like(first["q"])
    for one in (first, second, first):
        found = strobe.decode(**one)
        assert found.shape == one["q"].shape and found.is_contiguous()
        assert plans[0].launched[-1] == (*addresses(one["q"], one["cache"]), found.data_ptr())
    assert strobe.decode(**first, out=out) is out and plans[1].launched == [addresses(**first, out=out)]
    assert len(plans) == 2


OTHERS = {
    "batch": lambda: call(3), "scale": lambda: call(scale=2.0), "mask": lambda: call(mask=strobe.Full()),
    "window": lambda: call(mask=strobe.Window(3, 0)), "softcap": lambda: call(score=strobe.Score(softcap=3.0)),
    "sinks": lambda: call(score=strobe.Score(sinks=torch.zeros(4))), "lse": lambda: call(return_lse=True),
    "alibi": lambda: call(score=strobe.Score(alibi=torch.zeros(4))), "deterministic": lambda: call(deterministic=True),
    "tree": lambda: call(tree=torch.ones(1, 1, dtype=torch.bool)),
    "alignment": lambda: call(q=torch.randn(129)[1:].view(2, 1, 4, 16)),
    "strides": lambda: call(q=torch.randn(2, 2, 4, 16)[:, :1]),
    "parameter": lambda: call(q=torch.nn.Parameter(torch.randn(2, 1, 4, 16), requires_grad=False)),
    "backend": lambda: call(backend="cached_cpu"),
}  # fmt: skip


def test_others_have_launches_of_their_own(plans):
    strobe.decode(**call())
    for number, (name, make) in enumerate(OTHERS.items()):
        one = make()
        for _ in range(2):
            strobe.decode(**one)
        assert len(plans) == number + 2 and len(plans[-1].launched) == 2, name
    strobe.decode(**call())
    assert len(plans) == len(OTHERS) + 1


@pytest.mark.parametrize("latent", [False, True])
def test_what_is_repeated_is_recognised_by_its_guard(plans, monkeypatch, latent):
    """A latent comes twice, as keys and as values."""
    cache = (
        strobe.Cache(torch.randn(6, 8, 2, 16), None, ints(8, 8), ints([2, 4], [1, 3]), head_dim_v=8)
        if latent
        else call()["cache"]
    )
    q = torch.randn(2, 1, 4, 16)
    strobe.decode(q, cache)
    monkeypatch.setattr(known_calls, "likeness", lambda x: pytest.fail("a key was made"))
    strobe.decode(q, cache)
    strobe.decode(q.clone(), cache)
    assert [len(plan.launched) for plan in plans] == [3]


def test_more_likenesses_than_are_tried_first(plans):
    for batch in (*range(1, 9), *range(1, 9)):
        strobe.decode(**call(batch))
    assert [len(plan.launched) for plan in plans] == [2] * 8


def test_packed_rows_begin_as_zeros(plans):
    """A row may belong to no request."""
    cache = call()["cache"]
    for _ in range(2):
        assert not strobe.decode(torch.randn(7, 4, 16), cache, cu_seqlens_q=ints(0, 2, 3)).any()


def test_what_the_operator_must_run(plans):
    """A subclass, a tensor that is negated lazily, numbers without a hash, what is wrong."""
    one = call()
    wanted = strobe.attention(one["q"], *(torch.stack([x[2], x[2]]) for x in (one["cache"].k, one["cache"].v)))
    lazy = torch._neg_view(-one["q"])
    for q in (one["q"].as_subclass(type("Own", (torch.Tensor,), {})), lazy):
        torch.testing.assert_close(strobe.decode(q, one["cache"]).as_subclass(torch.Tensor), wanted)
    assert not plans
    for wrong in ({"scale": [1.0]}, {"mask": {}}, {"score": 3}, {"deterministic": 1}, {"max_seqlen_q": 1}, {"q": 3}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            strobe.decode(**{**one, **wrong})
    with pytest.raises(TypeError, match="lengths must be a tensor"):
        strobe.decode(one["q"], strobe.Cache(one["cache"].k, one["cache"].v, [8, 8]))
    assert not plans


NUMBERS = {
    "causal": {"causal": True}, "scale": {"softmax_scale": 2.0}, "window": {"window_size": (1, 0)},
    "window in a list": {"window_size": [2, 0]}, "softcap": {"softcap": 1.0}, "lse": {"return_softmax_lse": True},
    "deterministic": {"deterministic": True}, "sinks": {"s_aux": torch.zeros(4)},
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_flash_attns_functions_are_recognised_by_their_own_arguments(plans, packed, monkeypatch):
    cache, q = call()["cache"], torch.randn(2, 1, 4, 16)

    def run(**numbers):
        if packed:
            numbers |= {"seqused_k": cache.lengths, "max_seqlen_q": 1, "block_table": cache.page_table}
            return strobe.flash_attn_varlen_func(q[:, 0], cache.k, cache.v, ints(0, 1, 2), **numbers)
        numbers |= {"cache_seqlens": cache.lengths, "block_table": cache.page_table}
        return strobe.flash_attn_with_kvcache(q, cache.k, cache.v, **numbers)

    many = [{}, *NUMBERS.values()]
    for numbers in many:
        run(**numbers)
    assert len(plans) == len(many)
    with monkeypatch.context() as patch:
        patch.setattr(known_calls, "likeness", lambda x: pytest.fail("a key was made"))
        descales = {name: torch.ones(2, 2) for name in ("q_descale", "k_descale", "v_descale")}  # beside 16 bits: nothing
        for numbers in (*many, {"num_splits": 1}, {"window_size": None, "causal": 1}, descales):
            run(**numbers)
    assert [len(plan.launched) for plan in plans] == [3, 3, 2, 2, 2, 2, 2, 3, 2]
    for wrong in ({"softcap": True}, {"window_size": (True, 0)}, {"softmax_scale": "2"}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong)).removesuffix("_size").removeprefix("softmax_")):
            run(**wrong)
    number = torch.tensor(4)
    for _ in range(2):  # it is another one in the next call
        run(window_size=(number, 0))
        number += 1
    assert [len(plan.launched) for plan in plans[len(many) :]] == [1, 1]


@pytest.mark.parametrize("made", ["q", "lengths"])
def test_what_is_made_for_a_call_is_not_taken_from_the_next(plans, made):
    """Queries of 8 bits become some of 16, a number becomes a tensor of lengths: in every call."""
    kind = torch.float8_e4m3fn
    k, v = torch.randn(2, 6, 8, 2, 16).to(kind)
    given = {"cache_seqlens": 8 if made == "lengths" else ints(8, 8), "block_table": ints([2, 4], [1, 3])}
    for _ in range(2):
        q = torch.randn(2, 1, 4, 16).to(kind if made == "q" else torch.float32)
        strobe.flash_attn_with_kvcache(q, k, v, **given)
        at = plans[0].launched[-1]
        assert len(at) == 6 and at[1:3] == (k.data_ptr(), v.data_ptr()) and (at[0] == q.data_ptr()) == (made != "q")
    assert [len(plan.launched) for plan in plans] == [2]


def test_append(plans):
    """Calls that look the same run one launch, others one of their own; what copies is left to the operator."""
    cache = call()["cache"]
    short = strobe.Cache(cache.k, cache.v, ints(3, 8), cache.page_table)
    k, v, q = (torch.randn(2, 1, heads, 16) for heads in (2, 2, 4))
    rotary = strobe.Rotary(torch.randn(20, 8), torch.randn(20, 8))
    for _ in range(2):
        longer, turned = strobe.append(short, k, v)
        pages = short.k, short.v, k, v, short.lengths, short.page_table
        assert plans[0].launched[-1] == tuple(x.data_ptr() for x in (*pages, longer.lengths)) and turned is None
        assert longer.k is short.k and longer.page_table is short.page_table and short.lengths.tolist() == [3, 8]
    for _ in range(2):
        longer, turned = strobe.append(short, k, v, q=q, rotary=rotary)
        assert turned.shape == q.shape
        assert plans[1].launched[-1] == tuple(x.data_ptr() for x in (*pages, q, *rotary[:2], longer.lengths, turned))
    strobe.append(short, k, v, q=q, rotary=rotary._replace(interleaved=True))
    strobe.append(short, k, v, q=q, rotary=rotary, one_position=True)
    assert [len(plan.launched) for plan in plans] == [2, 2, 1, 1]
    wide = strobe.Rotary(*(torch.randn(20, 16)[:, :8] for _ in range(2)))
    longer, _ = strobe.append(short, k, v, q=q, rotary=wide)
    assert len(plans) == 4 and longer.lengths.tolist() == [4, 9]
    with pytest.raises(ValueError, match="v must be given"):
        strobe.append(short, k)
    with pytest.raises(TypeError, match=r"cache must be a strobe\.Cache"):
        strobe.append(3, k, v)


ROTARY = (torch.randn(20, 8), torch.randn(20, 8))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("options", [{}, {"out": True}, {"sinks": True, "leftpad": True, "return_softmax_lse": True}])
def test_what_is_appended_and_attended_is_recognised_at_once(plans, turned, options, monkeypatch):
    """flash-attn's function runs both launches of an earlier call at once, the second one over what the first one made."""
    cache = call()["cache"]
    k, v, q = (torch.randn(2, 1, heads, 16) for heads in (2, 2, 4))
    given, behind, out = {"cache_seqlens": ints(3, 6), "block_table": cache.page_table, "causal": True}, [], []
    if "leftpad" in options:
        given |= {"cache_leftpad": ints(1, 0), "s_aux": torch.zeros(4), "return_softmax_lse": True}
        behind = [given["cache_leftpad"], given["s_aux"]]
    if "out" in options:
        given["out"] = torch.empty_like(q)
        out = [given["out"]]
    for _ in range(3):
        q, k = q.clone(), k.clone()
        found = strobe.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, *(ROTARY if turned else ()), **given)
        result = found[0] if "leftpad" in options else found
        pages, turns = (cache.k, cache.v), (q, *ROTARY) if turned else ()
        appended = *pages, k, v, given["cache_seqlens"], cache.page_table, *turns
        attended = *(() if turned else (q,)), *pages, cache.page_table, *behind, result
        assert plans[0].launched[-1] == tuple(x.data_ptr() for x in (*appended, *attended))
        assert not out or result is out[0]
        monkeypatch.setattr(known_calls, "likeness", lambda x: pytest.fail("a key was made"))
    assert [len(plan.launched) for plan in plans] == [3]


@pytest.mark.parametrize("lengths", [(3, 5), (ints(3)[0], ints(5)[0]), (None, None)])
def test_lengths_may_be_a_number(plans, lengths, monkeypatch):
    """Another number is no other call."""
    q, (k, v) = torch.randn(2, 1, 4, 16), torch.randn(2, 2, 8, 2, 16)
    new = [torch.randn(2, 1, 2, 16)] * 2 if lengths[0] is not None else []
    for length in lengths:
        found = strobe.flash_attn_with_kvcache(q, k, v, *[x.clone() for x in new], cache_seqlens=length)
        assert plans[0].launched[-1][-1] == found.data_ptr()
        monkeypatch.setattr(known_calls, "likeness", lambda x: pytest.fail("a key was made"))
    assert [len(plan.launched) for plan in plans] == [2]


@pytest.fixture
def addressed(monkeypatch) -> list[dict[str, int]]:
    """Where each launch finds each tensor, by the names of its arguments; those of the attention begin with "read"."""
    launched: list[dict[str, int]] = []

    class Prepared:
        def __init__(self, calls, tensors, all_shared):
            assert all_shared  # an append's launch leaves room for the attention's
            self.calls, self.ids = calls, [id(x) for x in tensors]

        def on(self, stream):
            def launch(addresses):
                at = dict(zip(self.ids, addresses, strict=True))
                named = {name: x for one in self.calls for name, x in one.keywords.items() if isinstance(x, torch.Tensor)}
                launched.append({name: at[id(x)] for name, x in named.items()})

            return launch

    def buffers(problem, arch):
        lse = {"lse": Buffer((4 * problem.batch,), torch.float32)} if problem.with_lse else {}
        return Buffers(lse, {
            "arrivals": Buffer((problem.batch,), torch.int32, 0.0), "parts": Buffer((3 * problem.batch,), torch.float32),
        })  # fmt: skip

    def calls(problem, tensors, arch):
        return [Call(None, (1,), (), {f"read_{name}": x for name, x in vars(tensors).items()})]

    backend = SimpleNamespace(buffers=buffers, calls=calls)
    monkeypatch.setattr(launches, "_has_driver", lambda x: True)
    monkeypatch.setattr(known_calls, "may_be_prepared", lambda x: True)
    monkeypatch.setattr(cached_calls.dispatch, "select", lambda *_: backend)
    monkeypatch.setattr(cached_calls, "raw_stream", lambda device: 0)
    monkeypatch.setattr(launcher, "prepare", Prepared)
    monkeypatch.setattr(launcher, "compiled_call", lambda kernel, grid, **keywords: Call(kernel, grid, (), keywords))
    monkeypatch.setattr(launches.workspace, "scratch", lambda device, numel: SCRATCH[:numel])
    cached_calls.forget()
    yield launched
    cached_calls.forget()


SCRATCH = torch.empty(2048)


@pytest.mark.parametrize("turned", [False, True])
def test_what_an_append_tells_lies_in_memory_of_the_stream(addressed, turned):
    """Both launches find each tensor where its user, or the append ahead, has it."""
    cache = call()["cache"]
    for _ in range(2):
        k, v, q = (torch.randn(2, 1, heads, 16) for heads in (2, 2, 4))
        out = strobe.flash_attn_with_kvcache(
            q, cache.k, cache.v, k, v, *(ROTARY if turned else ()), cache_seqlens=cache.lengths, block_table=cache.page_table
        )
        at = addressed[-1]
        lengths, of_q = at["new_lengths"], at["turned"] if turned else q.data_ptr()
        assert not turned or at["q"] == q.data_ptr()
        wanted = {"k_cache": cache.k, "v_cache": cache.v, "k": k, "v": v, "lengths": cache.lengths, "table": cache.page_table}
        wanted |= {"read_k": cache.k, "read_v": cache.v, "read_page_table": cache.page_table, "read_out": out}
        assert {name: at[name] for name in wanted} == {name: x.data_ptr() for name, x in wanted.items()}
        assert at["read_lengths"] == lengths == SCRATCH.data_ptr() and at["read_q"] == of_q
        assert not turned or of_q == lengths + 512
        assert at["read_parts"] == lengths + (1024 if turned else 512)
    assert len(addressed) == 2


@pytest.mark.parametrize("with_lse", [False, True])
def test_calls_of_all_looks_share_the_memory_of_the_stream(addressed, with_lse):
    """But for what a later call has to find as an earlier one left it."""
    for batch in (1, 2, 3, 2):
        found = strobe.decode(**call(batch), return_lse=with_lse)
        if with_lse:
            assert addressed[-1]["read_lse"] == found[1].data_ptr()
    assert {at["read_parts"] for at in addressed} == {SCRATCH.data_ptr() + 512 * with_lse}
    first, second, third, again = (at["read_arrivals"] for at in addressed)
    assert second == again and len({first, second, third}) == 3


def test_the_memory_of_a_stream_grows_seldom(monkeypatch):
    monkeypatch.setattr(workspace, "_current", lambda device: (0, 0))
    monkeypatch.setattr(workspace, "_scratch", {})
    first, second, same, third = (workspace.scratch(torch.device("cpu"), numel) for numel in (10, 11, 20, 50))
    assert [len(first), len(second), len(third)] == [10, 20, 50] and same is second


def test_nothing_is_appended_where_the_attention_is_refused(plans):
    cache, k = call()["cache"], torch.randn(2, 1, 2, 16)
    with pytest.raises(TypeError, match="out must have q's dtype"):
        strobe.flash_attn_with_kvcache(
            torch.randn(2, 1, 4, 16), cache.k, cache.v, k, k.clone(), cache_seqlens=ints(3, 6), block_table=cache.page_table,
            out=torch.empty(2, 1, 4, 16, dtype=torch.float64),
        )  # fmt: skip
    assert not any(plan.launched for plan in plans)
