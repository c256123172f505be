"""cuDNN's own package as a contender, with a stand-in for it that computes on the CPU what the graphs describe."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import strobe
from strobe.lab.bench import decode_peers, peers
from strobe.lab.bench.accuracy import Gate
from strobe.lab.bench.inputs import input_sets
from strobe.lab.bench.plan import MASKS, Point


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
        self.built = False

    def tensor(self, dim, stride, data_type):
        return Described(dim, stride, data_type)

    def sdpa(self, q, k, v, generate_stats, **options):
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
        if "paged_attention_k_table" in self.options:
            return self._execute_over_pages(bound)
        q, k, v, *dout = (bound[x].transpose(1, 2).clone() for x in self.inputs)
        window = strobe.Window(self.options["sliding_window_length"] - 1, 0 if self.options["use_causal_mask"] else None)
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out, lse = strobe.attention(*leaves, mask=window, scale=self.options["attn_scale"], return_lse=True)
        results = torch.autograd.grad(out, leaves, dout) if dout else (out, lse[..., None].transpose(1, 2))
        for described, x in zip(self.outputs, results, strict=True):
            if described is not None:
                bound[described].copy_(x.detach().transpose(1, 2))

    def _execute_over_pages(self, bound):
        q, k, v = (bound[x].transpose(1, 2) for x in self.inputs)
        names = ("paged_attention_k_table", "paged_attention_v_table", "seq_len_q", "seq_len_kv")
        table, other_table, queries, used = (bound[self.options[name]] for name in names)
        batch, columns = table.shape[0], table.shape[2]
        assert table.shape == (batch, 1, columns, 1) and torch.equal(table, other_table)
        assert queries.flatten().tolist() == [q.shape[1]] * batch and self.options["use_padding_mask"]
        assert self.options["paged_attention_max_seq_len_kv"] == columns * k.shape[1]
        assert self.options["use_causal_mask_bottom_right"] == (q.shape[1] > 1)
        cache = strobe.Cache(k, v, used.flatten(), table[:, 0, :, 0])
        bound[self.outputs[0]].copy_(strobe.decode(q, cache, scale=self.options["attn_scale"]).transpose(1, 2))


@pytest.fixture
def cudnn(monkeypatch):
    names = {"BFLOAT16": torch.bfloat16, "HALF": torch.float16, "FLOAT": torch.float32, "FP8_E4M3": torch.float8_e4m3fn}
    names["INT32"] = torch.int32
    module = SimpleNamespace(
        data_type=SimpleNamespace(**{name: str(dtype) for name, dtype in names.items()}),
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
        pygraph=Graph,
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
    )
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    peers._cudnn_handle.cache_clear()
    yield peers.Peer("cuDNN", peers._cudnn_graph, heads_first=True)
    peers._cudnn_handle.cache_clear()


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


@pytest.mark.parametrize("queries", [1, 3])
def test_pages(cudnn, queries):
    point = decode_peers.Point(2, 40, 4, 2, 16, queries, 8, ragged=True)
    inputs = decode_peers.Inputs(point, torch.device("cpu"), 0)
    call = decode_peers._cudnn_paged(inputs)
    for _ in range(2):
        found = call()
    torch.testing.assert_close(found, strobe.decode(inputs.q, inputs.cache), rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="takes pages of 16 bits"):
        decode_peers._cudnn_paged(decode_peers.Inputs(replace(point, page=0), torch.device("cpu"), 0))


def test_what_it_does_not_take(cudnn):
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ValueError, match="cuDNN takes full, causal and causal windows, not"):
        cudnn.prepare(q, q, q, strobe.Window(3, 3))
    with pytest.raises(ValueError, match="in fp8"):
        cudnn.prepare(*[q.to(torch.float8_e4m3fn)] * 3, strobe.Window(3, 0))
