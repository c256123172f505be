"""`strobe precompile`: what it reads from a model's config, and that a process with its folder, moved, compiles nothing."""

import importlib
import json
import os
from pathlib import Path

import pytest
from commands import run
from tritons import answer_of, output_of

import strobe
from strobe.call import moved_cache, precompiled, triton_internals
from strobe.call.moved_cache import MovedCache
from strobe.call.precompiled import MARK, MOVED_CACHE
from strobe.masks import Causal, Full, Window
from strobe_cli.precompile import Layer, layers_of

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
LOCAL, SEEN = Causal() & Window(left=4095), Causal()
CONFIGS = {
    "llama": (LLAMA, [Layer(32, 8, 128, 128, SEEN)]),
    "its own head dim": (LLAMA | {"head_dim": 64}, [Layer(32, 8, 64, 64, SEEN)]),
    "every layer has a window": (
        LLAMA | {"sliding_window": 4096, "layer_types": ["sliding_attention"]},
        [Layer(32, 8, 128, 128, LOCAL)],
    ),
    "windows by turns, in the code": (
        LLAMA | {"sliding_window": 4096, "attn_logit_softcapping": 50.0},
        [Layer(32, 8, 128, 128, LOCAL, 50.0), Layer(32, 8, 128, 128, SEEN, 50.0)],
    ),
    "a window that is not used": (
        LLAMA | {"sliding_window": 4096, "use_sliding_window": False},
        [Layer(32, 8, 128, 128, SEEN)],
    ),
    "sinks": (LLAMA | {"model_type": "gpt_oss"}, [Layer(32, 8, 128, 128, SEEN, sinks=True)]),
    "an encoder": (
        {"architectures": ["BertModel"], "num_attention_heads": 12, "hidden_size": 768},
        [Layer(12, 12, 64, 64, Full())],
    ),
    "text beside images": (
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": LLAMA},
        [Layer(32, 8, 128, 128, SEEN)],
    ),
    "a latent": (
        {
            "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
        [Layer(128, 128, 192, 128, SEEN, latent=(576, 512))],
    ),
    "another family's names": ({"n_head": 12, "n_embd": 768}, [Layer(12, 12, 64, 64, SEEN)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_says(name):
    config, layers = CONFIGS[name]
    assert layers_of(config) == layers


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ("{}", [], "the config must say num_attention_heads"),
        ("no json", [], "a model is a config.json"),
        (None, [], "No such file"),
        (json.dumps(LLAMA | {"head_dim": 100}), [], "multiple of 8"),
        (json.dumps(LLAMA), ["--arch", "CPU"], "arch must be a GPU"),
        (json.dumps(LLAMA), ["--dtype", "fp32"], "dtype must be one of bf16, fp16"),
        (json.dumps(LLAMA), ["--max-length", "0"], "max-length must be 1 or more"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path, config, options, words):
    path, out = tmp_path / "config.json", tmp_path / "out"
    if config is not None:
        path.write_text(config)
    result = run("precompile", str(path), "--out", str(out), *(["--arch", "H200"] if "--arch" not in options else []), *options)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output, result.output
    assert not out.exists()


def test_a_folder_that_was_moved(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "here"))
    made = MovedCache("key")
    made.put_group("kernel.json", {name: made.put("text", name) for name in ("kernel.json", "kernel.cubin")})
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    found = MovedCache("key").get_group("kernel.json")
    there = tmp_path / "there/key"
    assert found == {name: str(there / name) for name in ("kernel.json", "kernel.cubin")}
    assert MovedCache("key").get_group("other.json") is None
    (there / "kernel.cubin").unlink()
    assert MovedCache("key").get_group("kernel.json") is None, "part of it is gone"
    (there / "__grp__kernel.json").write_text('{"child_')
    assert MovedCache("key").get_group("kernel.json") is None, "cut off"


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    """What is there is found, and what is compiled beside it goes elsewhere."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = MovedCache("key")
    made.put_group("kernel.json", {name: made.put("text", name) for name in ("kernel.json", "kernel.cubin")})
    makedirs = os.makedirs

    def read_only(path, exist_ok=False):
        if Path(path).is_relative_to(tmp_path) and not Path(path).exists():
            raise OSError("Read-only file system")
        makedirs(path, exist_ok=exist_ok)

    monkeypatch.setattr(os, "makedirs", read_only)
    assert MovedCache("key").get_group("kernel.json") is not None
    other = MovedCache("other")
    assert other.get_group("kernel.json") is None
    other.put_group("kernel.json", {"kernel.json": other.put("text", "kernel.json")})
    found = MovedCache("other").get_group("kernel.json")
    assert found is not None and Path(found["kernel.json"]).read_text() == "text" and not (tmp_path / "other").exists()
    moved_cache._spare_folder().cleanup()
    moved_cache._spare_folder.cache_clear()


def test_a_process_with_such_a_folder_begins_at_import(monkeypatch):
    begun = []
    monkeypatch.setattr(precompiled, "_get_ready", begun.append)
    monkeypatch.delenv("TRITON_CACHE_MANAGER", raising=False)
    precompiled.begin.cache_clear()
    assert precompiled.begin() is None
    monkeypatch.setenv("TRITON_CACHE_MANAGER", MOVED_CACHE)
    precompiled.begin.cache_clear()
    importlib.reload(strobe)
    precompiled.wait()
    assert begun == [{}]
    precompiled.begin.cache_clear()


READY = """
import json, os, sys
import strobe
from strobe.call import precompiled, triton_internals

said = []
precompiled.log.warning = said.append
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
in_child = not precompiled.begin().is_alive()
precompiled.wait()
from triton.runtime import cache, driver
from strobe.kernels.portable import forward

in_time = in_child, "strobe.kernels.sm90.forward" in sys.modules
key = cache.triton_key()
print(json.dumps([said, in_time, key, forward._redo.hash, type(driver._active).__name__, triton_internals.take_key({})]))
"""


@pytest.mark.parametrize("same_files", [True, False])
def test_what_a_first_call_waits_for_is_there(tmp_path, same_files):
    """The kernels are imported and hashed; if the files are the same, by the keys that were written down."""
    files = triton_internals.key_of_files()
    known = {**files, "key": "written down"} if same_files else {"files": "others", "key": "written down"}
    kernels = [["strobe.kernels.portable.forward", "_redo", "this too"], ["strobe.kernels.sm90.forward", "forward_kernel", ""]]
    sources = precompiled.hash_of_sources() if same_files else "others"
    (tmp_path / MARK).write_text(json.dumps({"triton": known, "sources": sources, "kernels": kernels}))
    cache = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_CACHE_MANAGER": MOVED_CACHE}
    said, in_time, key, of_redo, driver, without = answer_of(READY, **cache)
    assert said == [] and in_time == [True, True] and driver == "_Driver" and not without
    assert key == ("written down" if same_files else files["key"])
    assert of_redo == "this too" if same_files else len(of_redo) == 64


SECOND = """
import json, random, sys, torch, strobe
from triton import knobs
from strobe.arguments import options_of
from strobe.call import dispatch
from strobe.call.launcher import compiled_call
from strobe.call.options import describe, operands_of
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.lab.binary.offline import pretend_gpu

arch, phases, most_batch, most, calls = json.loads(sys.argv[1])
arch, draw, found = KNOWN[arch], random.Random(1), []
knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append([src.name, cache_hit])
for _ in range(calls):
    batch, length = draw.randint(1, most_batch), int(most ** draw.random())
    q, k, v = (torch.empty(batch, length, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    options = options_of(q, k, v, mask=strobe.Causal())
    for phase in phases:
        problem = describe(operands_of(q, k, v, options), options, phase, ())
        module = dispatch.select(problem, arch)
        with pretend_gpu(arch.capability):
            for call in module.calls(problem, unfilled(problem, module.buffers(problem, arch)), arch):
                compiled_call(call.kernel, call.grid, *call.arguments, **call.keywords)
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("arch", "phases", "most_batch", "most_length", "calls", "names"),
    [
        pytest.param("B200", ["forward"], 2, 64, 3, {"_forward"}, id="one kernel", marks=pytest.mark.exhaustive),
        pytest.param(
            "H200", ["forward", "backward"], 64, 32768, 60,
            {"forward_kernel", "_redo", "prepare", "backward_kernel", "convert", "redo_noted", "short_kernel",
             "short_backward_kernel"},  # one token sees all keys
            id="all kernels", marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_a_second_process_compiles_nothing(tmp_path, arch, phases, most_batch, most_length, calls, names):
    config, made = tmp_path / "config.json", tmp_path / "made"
    config.write_text(json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}))
    sizes = ["--max-batch", str(most_batch), "--max-length", str(most_length)]
    options = ["--out", str(made), "--arch", arch, *sizes, *(["--train"] if "backward" in phases else [])]
    program = "import sys; from strobe_cli.app import app; app(sys.argv[1:])"
    assert MOVED_CACHE in output_of(program, "precompile", str(config), *options)
    said = json.loads((made / MARK).read_text())
    assert said["arch"] == arch and said["compiled"] >= len(names) and said["there"] == 0
    moved = made.rename(tmp_path / "moved")
    asked = json.dumps([arch, phases, most_batch, most_length, calls])
    found = answer_of(SECOND, asked, TRITON_CACHE_DIR=str(moved), TRITON_CACHE_MANAGER=MOVED_CACHE)
    assert {name for name, _ in found} == names and all(there for _, there in found), found
    assert not list(Path(moved).glob("tmp*"))
