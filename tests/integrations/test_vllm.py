"""The attention backend for vLLM: with vLLM's own classes where it is installed, else with a stand-in for them.

A test is the life of a batch as vLLM's model runner and its attention layer have it: metadata is built once, each layer writes
its new keys to the pages and then attends. The expectation is the specification over each request's own keys.
"""

import importlib.util
import inspect
import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import strobe
from strobe.integrations import vllm as door
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.reference import dense
from strobe.scores import Score

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "vllm_interface"
D, PAGE = 64, 16


@pytest.fixture(scope="module")
def vllm():
    """Strobe's classes, vLLM's and what was registered."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("vllm") is None:
            patch.syspath_prepend(STAND_IN)
        door.register()
        door.register()  # vLLM may load a plugin more than once
        from vllm import envs
        from vllm.v1.attention import backend as interface
        from vllm.v1.attention.backends import registry

        ours = registry.AttentionBackendEnum["STROBE"].get_class()
        yield SimpleNamespace(backend=ours, interface=interface, registry=registry, envs=envs)
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "vllm" or name == "strobe.integrations.vllm.backend"
    ]:
        del sys.modules[name]


def test_vllm_finds_it_by_the_entry_point(vllm):
    text = (ROOT / "pyproject.toml").read_text()
    (value,) = re.findall(r'\[project\.entry-points\."vllm\.general_plugins"\]\nstrobe = "(.*)"', text)
    assert EntryPoint("strobe", value, "vllm.general_plugins").load() is door.register
    assert vllm.backend.get_name() == "STROBE" and issubclass(vllm.backend, vllm.interface.AttentionBackend)
    assert vllm.registry.AttentionBackendEnum[vllm.backend.get_name()].get_class() is vllm.backend


def test_signatures_are_those_that_vllm_calls(vllm):
    for ours, theirs in (
        (vllm.backend.get_impl_cls(), vllm.interface.AttentionImpl),
        (vllm.backend.get_builder_cls(), vllm.interface.AttentionMetadataBuilder),
        (vllm.backend, vllm.interface.AttentionBackend),
    ):
        assert issubclass(ours, theirs) and not getattr(ours, "__abstractmethods__", None)
        for name, function in vars(ours).items():
            if callable(getattr(ours, name)) and hasattr(theirs, name) and not name.startswith("supported"):
                wanted = list(inspect.signature(getattr(theirs, name)).parameters)
                assert list(inspect.signature(getattr(ours, name)).parameters)[: len(wanted)] == wanted, (function, name)


def test_an_older_vllm_is_told(vllm, monkeypatch, caplog):
    monkeypatch.setattr(vllm.registry, "AttentionBackendEnum", SimpleNamespace(__members__={}))
    with caplog.at_level("WARNING", "strobe"):
        door.register()
    assert "takes no attention backends by name" in caplog.text


def reasons(vllm, **changes) -> str:
    asked = dict(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=False,
        use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=(9, 0), attn_type="decoder",
    )  # fmt: skip
    return " ".join(vllm.backend.validate_configuration(**asked | changes))


def test_what_it_takes(vllm):
    taken = [
        {}, {"head_size": 80}, {"has_sink": True}, {"has_sliding_window": True}, {"attn_type": "encoder_only"},
        {"kv_cache_dtype": "fp8"}, {"block_size": 64}, {"device_capability": (8, 0)}, {"use_batch_invariant": True},
        {"kv_cache_dtype": "fp8_e5m2", "device_capability": (8, 0)},
    ]  # fmt: skip
    assert [reasons(vllm, **changes) for changes in taken] == [""] * len(taken)
    refused = {
        "head_size": {"head_size": 512}, "dtype": {"dtype": torch.float32}, "MLA": {"use_mla": True},
        "compute capability": {"device_capability": (7, 5)}, "non-causal": {"use_non_causal": True},
        "8.9 on": {"kv_cache_dtype": "fp8", "device_capability": (8, 0)}, "block_size": {"block_size": 8},
        "partial multimodal": {"use_mm_prefix": True},
    }  # fmt: skip
    for words, changes in refused.items():
        assert words in reasons(vllm, **changes), changes


class Server:
    """Requests with their keys, and the pages, in an order of their own, in which a layer of vLLM keeps them."""

    def __init__(self, vllm, heads, heads_kv, dtype=torch.bfloat16, kv_cache_dtype="auto", layout="NHD", **options):
        self.vllm, self.heads, self.heads_kv, self.dtype = vllm, heads, heads_kv, dtype
        self.impl = vllm.backend.get_impl_cls()(heads, D, 0.2, heads_kv, kv_cache_dtype=kv_cache_dtype, **options)
        self.builder = vllm.backend.get_builder_cls()(None, ["layer"], None, torch.get_default_device())
        eight = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(kv_cache_dtype)
        shape = (40, heads_kv, PAGE, 2 * D) if layout == "HND" else (40, PAGE, heads_kv, 2 * D)
        cache = torch.full(shape, float("nan")).to(eight or dtype)
        cache = cache.view(torch.uint8) if eight else cache
        self.cache = cache if layout == "HND" else cache.transpose(1, 2)
        one = torch.tensor(1.0)
        scale = torch.tensor(0.5)
        self.layer = SimpleNamespace(_q_scale=one, _k_scale=scale if eight else one, _v_scale=scale if eight else one)
        self.keys, self.values, self.pages = {}, {}, {}
        self.free = torch.randperm(39, generator=torch.Generator().manual_seed(1), device="cpu").add(1).tolist()

    def step(self, news: dict[int, int], padding: int = 0, causal: bool = True):
        """A step with so many new tokens of each request: (rows of the result, those of the specification)."""
        starts, q, k, v, slots, lengths = [0], [], [], [], [], []
        for name, new in news.items():
            q.append(torch.randn(new, self.heads, D).to(self.dtype))
            k.append(torch.randn(new, self.heads_kv, D).to(self.dtype))
            v.append(torch.randn(new, self.heads_kv, D).to(self.dtype))
            before = len(self.keys.get(name, ()))
            self.keys[name] = torch.cat([self.keys[name], k[-1]]) if before else k[-1]
            self.values[name] = torch.cat([self.values[name], v[-1]]) if before else v[-1]
            table = self.pages.setdefault(name, [])
            while len(table) * PAGE < before + new:
                table.append(self.free.pop())
            slots += [table[at // PAGE] * PAGE + at % PAGE for at in range(before, before + new)]
            starts.append(starts[-1] + new)
            lengths.append(before + new)
        n, i32 = starts[-1], dict(dtype=torch.int32)
        table = torch.zeros(len(news), 8, **i32)
        for row, name in zip(table, news, strict=True):
            row[: len(self.pages[name])] = torch.tensor(self.pages[name])
        common = self.vllm.interface.CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, **i32), query_start_loc_cpu=torch.tensor(starts, **i32, device="cpu"),
            seq_lens=torch.tensor(lengths, **i32), num_reqs=len(news), num_actual_tokens=n, max_query_len=max(news.values()),
            max_seq_len=max(lengths), block_table_tensor=table, slot_mapping=torch.tensor(slots + [-1] * padding),
            causal=causal, seq_lens_cpu_upper_bound=torch.tensor(lengths, **i32, device="cpu"),
        )  # fmt: skip
        self.metadata = self.builder.build(0, common)
        extra = torch.full((padding, 1, D), 7.0, dtype=self.dtype)
        q, k, v = (torch.cat([*parts, extra.expand(-1, parts[0].shape[1], -1)]) for parts in (q, k, v))
        out = torch.full((n + padding, self.heads, D), 7.0, dtype=self.dtype)
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, common.slot_mapping)
        if self.cache.is_floating_point() and self.impl.attn_type != "encoder_only":
            assert (~self.cache.isnan()).sum() == 2 * D * self.heads_kv * sum(map(len, self.keys.values())), "nothing else"
        returned = self.impl.forward(self.layer, q, k, v, self.cache, self.metadata, out)
        assert returned.data_ptr() == out.data_ptr() and (out[n:] == 7.0).all(), "padding stays"
        self.rows = list(zip(news, torch.split(q[:n], list(news.values())), strict=True))
        return out[:n]

    def expected(self, mask, score=None, kept=lambda x: x) -> torch.Tensor:
        """The specification of the last step. kept: what the cache makes of keys and values."""
        score, rows = score or Score(), []
        for name, q in self.rows:
            k, v = kept(self.keys[name].double()), kept(self.values[name].double())
            problem = AttentionProblem(
                Dense(1, len(q), len(k)), self.heads, self.heads_kv, D, D, torch.float64, 0.2, mask=mask, score=score.facts()
            )
            given = {"alibi": score.alibi, "sinks": score.sinks}
            operands = Operands(q.double()[None], k[None], v[None], **{x: y for x, y in given.items() if y is not None})
            rows.append(dense.attention(problem, operands)[0][0])
        return torch.cat(rows)


def close(out, expected, atol=2e-2):
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prompts_then_tokens_then_both(vllm, layout):
    server = Server(vllm, 4, 2, layout=layout)
    close(server.step({0: 20, 1: 33}), server.expected(strobe.Causal()))
    assert server.metadata.prompts, "nothing is cached yet"
    close(server.step({0: 1, 1: 1}, padding=3), server.expected(strobe.Causal()))
    assert not server.metadata.prompts
    close(server.step({1: 1, 2: 40, 0: 5}), server.expected(strobe.Causal()))


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize(
    ("options", "mask", "score"),
    [
        ({"sliding_window": 9}, strobe.Causal() & strobe.Window(left=8), None),
        ({"logits_soft_cap": 3.0}, strobe.Causal(), Score(3.0)),
        ({"sinks": torch.nn.Parameter(SINKS)}, strobe.Causal(), Score(sinks=SINKS)),
        ({"alibi_slopes": SLOPES}, strobe.Causal(), Score(alibi=torch.tensor(SLOPES))),
    ],
    ids=["window", "softcap", "sinks", "alibi"],
)
def test_what_layers_ask_for(vllm, options, mask, score):
    server = Server(vllm, 4, 2, **options)
    for news in ({0: 20, 1: 33}, {0: 1, 1: 4}):
        close(server.step(news), server.expected(mask, score))


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_a_cache_of_8_bits(vllm, name, dtype):
    server = Server(vllm, 2, 2, kv_cache_dtype=name)
    server.step({0: 20})
    out = server.step({0: 2})
    close(out, server.expected(strobe.Causal(), kept=lambda x: (x / 0.5).to(dtype).double() * 0.5))


def test_an_encoder_has_no_cache(vllm):
    server = Server(vllm, 2, 2, attn_type="encoder_only", sliding_window=6)
    close(server.step({0: 20, 1: 33}), server.expected(strobe.Window(5, 5)))
    assert server.cache.isnan().all()


def test_cross_attention(vllm):
    for window, mask in ((None, strobe.Full()), (6, strobe.Window(5, 5))):
        server = Server(vllm, 2, 2, attn_type="encoder_decoder", sliding_window=window)
        close(server.step({0: 20}, causal=False), server.expected(mask))
        assert not server.metadata.prompts, "the keys are not those of the rows"
        close(server.step({0: 3}, causal=False), server.expected(mask))


def test_a_layer_that_shares_keys_reads_the_cache(vllm):
    server = Server(vllm, 2, 2, kv_sharing_target_layer_name="another")
    out = server.step({0: 20})
    close(out, server.expected(strobe.Causal()))
    fresh = server.impl.forward(
        server.layer, server.rows[0][1], torch.zeros(20, 2, D), torch.zeros(20, 2, D), server.cache, server.metadata,
        torch.empty_like(out),
    )  # fmt: skip
    close(fresh, server.expected(strobe.Causal()))


def test_batch_invariant(vllm, monkeypatch):
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    monkeypatch.setattr(sys.modules["strobe.integrations.vllm.backend"], "attention", None)  # its bits depend on the batch
    torch.manual_seed(3)
    alone = Server(vllm, 2, 2).step({0: 20})
    torch.manual_seed(3)
    assert torch.equal(Server(vllm, 2, 2).step({0: 20, 1: 5})[:20], alone)


def test_what_it_does_not_do_is_a_sentence(vllm):
    server = Server(vllm, 2, 2)
    out = server.step({0: 3})
    given = (server.layer, out, out, out, server.cache, server.metadata, out)
    with pytest.raises(NotImplementedError, match="output_scale must be None"):
        server.impl.forward(*given, torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"kv_cache must have shape \[pages, heads, keys of a page, 128\]"):
        server.impl.do_kv_cache_update(server.layer, out, out, server.cache[None], torch.tensor([0, 1, 2]))
    with pytest.raises(NotImplementedError, match="choose another attention backend"):
        server.step({0: 3}, causal=torch.tensor([True]))
    assert (server.impl.forward(*given[:5], None, out) == 0).all(), "a profiling run"


def test_a_captured_graph_is_of_the_cache(vllm):
    server = Server(vllm, 2, 2)
    server.step({0: 20})
    common = SimpleNamespace(
        num_actual_tokens=20, max_query_len=20, query_start_loc=torch.tensor([0, 20]), seq_lens=torch.tensor([20]),
        block_table_tensor=torch.zeros(1, 2), slot_mapping=torch.arange(20), causal=True,
        query_start_loc_cpu=torch.tensor([0, 20]), seq_lens_cpu_upper_bound=torch.tensor([20]),
    )  # fmt: skip
    assert server.builder.build(0, common).prompts and not server.builder.build_for_cudagraph_capture(common).prompts
    table = torch.ones(1, 2)
    assert server.builder.update_block_table(server.metadata, table, None).block_table is table


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_on_a_gpu(vllm, layout):
    with torch.device("cuda"):
        server = Server(vllm, 4, 2, layout=layout)
        for news, padding in (({0: 20, 1: 33}, 0), ({0: 1, 1: 1}, 3), ({1: 1, 2: 40, 0: 5}, 0)):
            close(server.step(news, padding), server.expected(strobe.Causal()))


@pytest.mark.gpu
def test_a_graph_on_a_gpu_is_replayed_over_other_lengths(vllm):
    """A step of one token a request is captured once, as vLLM does; each replay reads its own lengths, pages and slots."""
    with torch.device("cuda"):
        server = Server(vllm, 4, 2)
        server.step({0: 20, 1: 33})
        close(server.step({0: 1, 1: 1}), server.expected(strobe.Causal()))
        metadata = replace(server.metadata, **{
            name: x.clone() for name, x in vars(server.metadata).items() if isinstance(x, torch.Tensor)
        })  # fmt: skip
        q, k, v = (torch.empty(2, heads, D, dtype=torch.bfloat16) for heads in (4, 2, 2))
        out = torch.empty_like(q)

        def layer():
            server.impl.do_kv_cache_update(server.layer, k, v, server.cache, metadata.slot_mapping)
            server.impl.forward(server.layer, q, k, v, server.cache, metadata, out)

        written = server.cache.clone()
        with torch.cuda.stream(torch.cuda.Stream()):
            layer()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                layer()
        server.cache.copy_(written)
        for _ in range(40):  # past the pages that it was captured with
            server.step({0: 1, 1: 1})
            for name, kept in vars(metadata).items():
                if isinstance(kept, torch.Tensor):
                    kept.copy_(getattr(server.metadata, name))
            q.copy_(torch.cat([rows for _, rows in server.rows]))
            k.copy_(torch.stack([server.keys[name][-1] for name in (0, 1)]))
            v.copy_(torch.stack([server.values[name][-1] for name in (0, 1)]))
            graph.replay()
            close(out, server.expected(strobe.Causal()))
