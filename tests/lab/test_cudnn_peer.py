"""cuDNN's own package as a contender, with a stand-in for it that computes on the CPU what the graphs describe."""

import sys
from types import SimpleNamespace

import pytest
import torch

import strobe
from strobe.lab.bench import cudnn_graph, decode_peers, peers
from strobe.lab.bench.accuracy import Gate
from strobe.lab.bench.inputs import input_sets
from strobe.lab.bench.plan import MASKS, Point

CACHE = ("seq_len_q", "seq_len_kv", "paged_attention_k_table", "paged_attention_v_table")
"""What a graph over a cache takes, in the order of `Graph.decoded`."""


class Described:
    """A tensor of a graph."""

    def __init__(self, dim=None, stride=None, data_type=None):
        self.dim, self.stride, self.data_type = dim, stride, data_type

    def set_output(self, output):
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self


class Graph:
    """Of one operation, which `execute` computes on the bound tensors."""

    def __init__(self, **options):
        self.built, self.cache = False, []

    def tensor(self, dim, stride, data_type):
        return Described(dim, stride, data_type)

    def sdpa(self, q, k, v, generate_stats, **options):
        self.cache = [options.pop(name) for name in CACHE if name in options]
        self.options, self.inputs, self.outputs = options, (q, k, v), (Described(), Described() if generate_stats else None)
        return self.outputs

    def sdpa_backward(self, q, k, v, o, dO, stats, **options):
        self.options, self.inputs, self.outputs = options, (q, k, v, dO), tuple(Described() for _ in range(3))
        self.not_needed_here = o, stats
        return self.outputs

    def build(self, heuristics):
        self.built = True

    def get_workspace_size(self):
        return 16

    def execute(self, bound, workspace, handle):
        assert self.built and workspace.numel() == 16
        for described, x in bound.items():
            assert (list(x.shape), list(x.stride())) == (described.dim, described.stride) and not x.requires_grad
            assert described.data_type == str(x.dtype)
        q, k, v, *dout = (bound[x].transpose(1, 2).clone() for x in self.inputs)
        if self.cache:
            return bound[self.outputs[0]].copy_(self.decoded(q, k, v, *(bound[x] for x in self.cache)).transpose(1, 2))
        window = strobe.Window(self.options["sliding_window_length"] - 1, 0 if self.options["use_causal_mask"] else None)
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out, lse = strobe.attention(*leaves, mask=window, scale=self.options["attn_scale"], return_lse=True)
        results = torch.autograd.grad(out, leaves, dout) if dout else (out, lse[..., None].transpose(1, 2))
        for described, x in zip(self.outputs, results, strict=True):
            if described is not None:
                bound[described].copy_(x.detach().transpose(1, 2))

    def decoded(self, q, k, v, lengths_q, lengths, *tables):
        """A step over a cache, as cuDNN masks it: by lengths."""
        assert self.options["use_padding_mask"] and set(lengths_q.flatten().tolist()) == {q.shape[1]}
        if tables:
            assert tables[0] is tables[1] and self.options["paged_attention_max_seq_len_kv"] == tables[0].shape[2] * k.shape[1]
            k, v = (x[tables[0].flatten().long()].view(len(q), -1, *x.shape[2:]) for x in (k, v))
        out = []
        for b, length in enumerate(lengths.flatten().tolist()):
            one = (q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length])
            out.append(strobe.attention(*one, scale=self.options["attn_scale"]))
        return torch.cat(out)


@pytest.fixture
def cudnn(monkeypatch):
    names = {"BFLOAT16": torch.bfloat16, "HALF": torch.float16, "FLOAT": torch.float32, "INT32": torch.int32}
    names["FP8_E4M3"] = torch.float8_e4m3fn
    module = SimpleNamespace(
        data_type=SimpleNamespace(**{name: str(dtype) for name, dtype in names.items()}),
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
        pygraph=Graph,
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
    )
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    cudnn_graph.handle.cache_clear()
    yield peers.Peer("cuDNN", peers._cudnn_graph, heads_first=True)
    cudnn_graph.handle.cache_clear()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_windows(cudnn, backward, dtype):
    point = Point(1, 2048, 2, 1, 16, 8, dtype, "window", backward)
    inputs = input_sets(point, torch.device("cpu"))[0]
    call = peers.bind(cudnn, point, inputs)
    for _ in range(2):
        result = call()
    standard = tuple(peers.standard(x, cudnn) for x in result) if backward else peers.standard(result, cudnn)
    assert Gate(inputs, MASKS["window"]).error(standard) < 1e-2


def test_what_it_does_not_take(cudnn):
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ValueError, match="cuDNN takes full, causal and causal windows, not"):
        cudnn.prepare(q, q, q, strobe.Window(3, 3))
    with pytest.raises(ValueError, match="in fp8"):
        cudnn.prepare(*[q.to(torch.float8_e4m3fn)] * 3, strobe.Window(3, 0))


@pytest.mark.parametrize("page", [0, 16])
def test_a_cache(cudnn, page):
    point = decode_peers.Point(3, 40, 4, 2, 16, 1, page, "fp32", ragged=True)
    inputs = decode_peers.Inputs(point, torch.device("cpu"), 0)
    call = decode_peers.peers_for(torch.device("cuda"))["cuDNN"].prepare(inputs)
    inputs.out.fill_(torch.nan)
    assert (call() - strobe.decode(inputs.q, inputs.cache)).abs().max() < 1e-5
    with pytest.raises(ValueError, match="a cache of 16 bits"):
        decode_peers._cudnn(decode_peers.Inputs(decode_peers.Point(1, 8, 1, 1, 16, cache="e4m3"), torch.device("cpu"), 0))
