"""Models of transformers on Strobe against the same models on transformers' own eager attention."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from strobe.integrations.transformers import register  # noqa: E402

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
DECODER = SMALL | dict(num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=98)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "mistral": lambda: transformers.MistralConfig(**DECODER, sliding_window=7),
    "gemma2": lambda: transformers.Gemma2Config(
        **DECODER, head_dim=16, sliding_window=7, attn_logit_softcapping=2.0, query_pre_attn_scalar=25
    ),
}
if VERSION >= (5, 0):  # before, BERT had no attention interface
    CONFIGS["bert"] = lambda: transformers.BertConfig(**SMALL)
DECODERS = ("llama", "mistral", "gemma2")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    # The CPU backends, as a user gets them, not Triton's interpreter, which the other tests run kernels in.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    register()


def models(name: str, auto=transformers.AutoModel):
    """The same random model twice, in eval mode: on eager attention and on strobe's."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    eager = auto.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    strobe = auto.from_config(copy.deepcopy(config), attn_implementation="strobe").eval()
    strobe.load_state_dict(eager.state_dict())
    assert strobe.config._attn_implementation == "strobe"
    return eager, strobe


def batch(padding: str, lengths=(19, 5, 12)) -> dict:
    """Random tokens, padded on one side; padding: "none", "ones" (a mask that hides nothing), "left", "right"."""
    torch.manual_seed(1)
    longest = max(lengths)
    ids = torch.randint(1, 98, (len(lengths), longest))
    if padding == "none":
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    if padding in ("left", "right"):
        real = torch.arange(longest) < torch.tensor(lengths)[:, None]
        mask = (real.flip(-1) if padding == "left" else real).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padding", ["none", "ones", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_and_gradients(name, padding):
    eager, strobe = models(name)
    inputs = batch(padding)
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    results = []
    for model in (eager, strobe):
        hidden = model(**inputs).last_hidden_state
        direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
        (hidden * direction)[real].sum().backward()
        results.append((hidden[real], {key: p.grad for key, p in model.named_parameters() if p.grad is not None}))
    (want, want_gradients), (got, gradients) = results
    assert_close(got, want)
    assert gradients.keys() == want_gradients.keys()
    largest = max(gradient.abs().max() for gradient in want_gradients.values())
    for key, gradient in gradients.items():
        # Some gradients are exactly 0 (that of a bias of the keys), and what is left of them is rounding.
        scale = want_gradients[key].abs().max().clamp(min=1e-3 * largest)
        assert_close(gradient / scale, want_gradients[key] / scale)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", ["ones", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens(name, padding, cache):
    eager, strobe = models(name, transformers.AutoModelForCausalLM)
    options = dict(do_sample=False, max_new_tokens=12, min_new_tokens=12, cache_implementation=cache)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    want, got = (model.generate(**batch(padding), **options) for model in (eager, strobe))
    assert torch.equal(got.sequences, want.sequences)
    assert_close(torch.stack(got.logits), torch.stack(want.logits))


@pytest.mark.parametrize("name", DECODERS)
def test_several_queries_after_a_cache(name):
    eager, strobe = models(name)
    ids = batch("none")["input_ids"]
    for model, results in ((eager, want := []), (strobe, got := [])):
        first = model(input_ids=ids[:, :11], use_cache=True)
        results.append(model(input_ids=ids[:, 11:], past_key_values=first.past_key_values).last_hidden_state)
    assert_close(got[0], want[0])


def test_static_cache_position_that_only_the_gpu_knows(monkeypatch):
    from strobe.integrations import transformers as integration

    monkeypatch.setattr(integration, "_on_gpu_only", lambda q_offset: isinstance(q_offset, torch.Tensor))
    for name in DECODERS:
        test_greedy_tokens(name, "left", "static")


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences(name):
    eager, strobe = models(name)
    ids = batch("none")["input_ids"]
    positions = torch.cat([torch.arange(n) for n in (4, 9, 6)])[None].expand(3, -1)
    want, got = (model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state for model in (eager, strobe))
    alone = strobe(input_ids=ids[:, 4:13]).last_hidden_state
    assert_close(got, want)
    assert_close(got[:, 4:13], alone)


@pytest.mark.skipif(VERSION < (5, 0), reason="masks of cross attention became part of the interface in transformers 5")
def test_cross_attention_with_padding():
    config = transformers.BartConfig(
        d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=99, max_position_embeddings=64,
    )  # fmt: skip
    CONFIGS["bart"] = lambda: config
    eager, strobe = models("bart")
    inputs = batch("right") | {"decoder_input_ids": torch.randint(3, 98, (3, 8))}
    want, got = (model(**inputs, use_cache=False).last_hidden_state for model in (eager, strobe))
    assert_close(got, want)


def test_autocast():
    eager, strobe = models("llama")
    with torch.autocast("cpu", torch.bfloat16):
        want, got = (model(**batch("right")).last_hidden_state for model in (eager, strobe))
    real = batch("right")["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real], atol=0.05, rtol=0.05)


def test_autocast_of_mixed_inputs():
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    attention = transformers.AttentionInterface()["strobe"]
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = attention(torch.nn.Module(), q, k, v.bfloat16(), None, is_causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want.transpose(1, 2), atol=0.02, rtol=0.02)


def test_compiles():
    _, strobe = models("llama")
    torch._dynamo.reset()
    inputs, attentions = batch("right"), []

    def count(graph, example_inputs):
        calls = (torch.ops.strobe.forward, torch.ops.strobe.forward.default)
        attentions.append(sum(node.target in calls for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(strobe, backend=count)
    torch.testing.assert_close(compiled(**inputs).last_hidden_state, strobe(**inputs).last_hidden_state)
    assert attentions[-1] == 2 and len(attentions) <= 3, "one break for the mask, then all layers in one graph"


def test_padding_is_not_read():
    _, strobe = models("llama")
    inputs = batch("left")
    real = inputs["attention_mask"].bool()
    want = strobe(**inputs).last_hidden_state[real]
    poisoned = torch.where(real, inputs["input_ids"], 7)
    assert torch.equal(strobe(**inputs | {"input_ids": poisoned}).last_hidden_state[real], want)


# ---- what Strobe cannot represent


def test_refuses_a_custom_4d_mask():
    _, strobe = models("llama")
    inputs = batch("none")
    custom = torch.zeros(3, 1, 19, 19)
    with pytest.raises(ValueError, match=r"custom one of shape \[3, 1, 19, 19\]"):
        strobe(**inputs, attention_mask=custom)


def first_three(batch, head, query, key):
    return key < 3


@pytest.mark.parametrize("how", ["or_mask_function", "and_mask_function"])
def test_refuses_user_mask_functions(how):
    combined = {how: first_three}
    _, strobe = models("llama")
    embeds = torch.zeros(2, 5, 64)
    where = {"inputs_embeds": embeds} if VERSION >= (5, 0) else {"input_embeds": embeds, "cache_position": torch.arange(5)}
    with pytest.raises(ValueError, match="first_three"):
        masking_utils.create_causal_mask(strobe.config, **where, attention_mask=None, past_key_values=None, **combined)


def test_refuses_chunked_attention():
    config = transformers.Llama4TextConfig(
        **DECODER, head_dim=16, attention_chunk_size=4, num_local_experts=1, intermediate_size_mlp=64
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="strobe")
    with pytest.raises(ValueError, match="chunked_overlay"):
        model(**batch("none"))


def test_refuses_sinks():
    config = transformers.GptOssConfig(**DECODER, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    model = transformers.AutoModel.from_config(config, attn_implementation="strobe").eval()
    with pytest.raises(ValueError, match="s_aux"):
        model(**batch("none"))


def test_drops_in_training_only():
    config = transformers.LlamaConfig(**DECODER, attention_dropout=0.5)
    model, inputs = transformers.AutoModel.from_config(config, attn_implementation="strobe"), batch("none")

    def states(seed):
        torch.manual_seed(seed)
        return model(**inputs).last_hidden_state

    model.eval()
    assert torch.equal(states(1), states(2))
    model.train()
    assert torch.equal(states(1), states(1)) and not torch.equal(states(1), states(2))


def test_refuses_attention_weights():
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match="output_attentions"):
        transformers.AttentionInterface()["strobe"](torch.nn.Module(), q, q, q, None, output_attentions=True)
