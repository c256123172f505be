"""Models of transformers on Strobe against the same models on transformers' own eager attention."""

import copy
from contextlib import nullcontext

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from strobe.integrations import transformers as integration  # noqa: E402
from strobe.integrations.paged_cache import PagedCache  # noqa: E402
from strobe.integrations.transformers import check, register  # noqa: E402
from strobe.masks import Causal  # noqa: E402

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


@pytest.mark.parametrize("padding", ["ones", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_over_pages(name, padding):
    """Token for token as eager attention over transformers' own cache."""
    eager, strobe = models(name, transformers.AutoModelForCausalLM)
    options = dict(do_sample=False, max_new_tokens=12, min_new_tokens=12, output_logits=True, return_dict_in_generate=True)
    want = eager.generate(**batch(padding), **options)
    cache = PagedCache(3, 31, page=4)
    got = strobe.generate(**batch(padding), past_key_values=cache, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert_close(torch.stack(got.logits), torch.stack(want.logits))
    assert cache.get_seq_length() == 30 and cache.layers[0].keys.shape[:2] == (3 * 8, 4)
    cache.reset()  # and once more in the same pages
    again = strobe.generate(**batch(padding), past_key_values=cache, **options)
    assert torch.equal(again.sequences, want.sequences)


def test_beams_over_pages():
    eager, strobe = models("llama", transformers.AutoModelForCausalLM)
    options = dict(do_sample=False, num_beams=3, max_new_tokens=9, min_new_tokens=9)
    want = eager.generate(**batch("left"), **options)
    assert torch.equal(strobe.generate(**batch("left"), past_key_values=PagedCache(9, 28, page=8), **options), want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["pages", "static"])
def test_steps_that_are_replays_of_a_graph(kind):
    """Token for token as eager attention over a cache that grows."""
    eager, strobe = (model.to("cuda") for model in models("llama", transformers.AutoModelForCausalLM))
    given = batch("none")["input_ids"].cuda()
    want = eager.generate(given, do_sample=False, max_new_tokens=12, min_new_tokens=12)
    if kind == "pages":
        eager, strobe = eager.bfloat16(), strobe.bfloat16()  # which the decode kernel takes
        want = eager.generate(given, do_sample=False, max_new_tokens=12, min_new_tokens=12)
    cache = PagedCache(3, 31, page=16) if kind == "pages" else transformers.StaticCache(eager.config, max_cache_len=31)
    with torch.no_grad():
        token = strobe(given, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        position = torch.full_like(token, 19)

        def step() -> None:
            token.copy_(strobe(token, past_key_values=cache, position_ids=position).logits[:, -1].argmax(-1, keepdim=True))
            position.add_(1)

        found = [token.clone()]
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            step()
        torch.cuda.synchronize()
        found.append(token.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(10):
            graph.replay()
            found.append(token.clone())
    agree = (torch.cat(found, 1) == want[:, 19:]).float().mean()
    assert agree == 1.0 if kind == "static" else agree > 0.8  # in bfloat16 two logits may be one


def test_pages_that_are_cropped_and_repeated():
    _, strobe = models("mistral")
    ids = batch("none")["input_ids"]
    wanted = strobe(input_ids=ids, use_cache=False).last_hidden_state
    cache = PagedCache(3, 19, page=4)
    with torch.no_grad():
        strobe(input_ids=ids[:, :15], past_key_values=cache)
        cache.crop(-4)
        assert cache.get_seq_length() == 11
        assert_close(strobe(input_ids=ids[:, 11:], past_key_values=cache).last_hidden_state, wanted[:, 11:])
        cache.crop(-8)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3, 4]))
        assert_close(strobe(input_ids=ids[[0, 1, 2], 11:], past_key_values=cache).last_hidden_state, wanted[[0, 1, 2], 11:])


def test_what_a_paged_cache_does_not_take():
    _, strobe = models("llama")
    inputs = batch("right")
    with torch.no_grad():
        with pytest.raises(ValueError, match="pad on the left"):
            strobe(**inputs, past_key_values=PagedCache(3, 20))
        with pytest.raises(ValueError, match="room for 18 keys, got 19"):
            strobe(input_ids=inputs["input_ids"], past_key_values=PagedCache(3, 18))
        with pytest.raises(ValueError, match="for the batch, 3, got one for 2"):
            strobe(input_ids=inputs["input_ids"], past_key_values=PagedCache(2, 20))
        dense = torch.ones(3, 1, 19, 19, dtype=torch.bool).tril()
        with pytest.raises(ValueError, match="a mask of every pair"):
            strobe(input_ids=inputs["input_ids"], attention_mask=dense, past_key_values=PagedCache(3, 20))
    with pytest.raises(ValueError, match="must not require a gradient"):
        strobe(input_ids=inputs["input_ids"], past_key_values=PagedCache(3, 20))
    for wrong in ({"batch": 0}, {"max_length": 1.5}, {"page": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PagedCache(**{"batch": 1, "max_length": 8, **wrong})


@pytest.mark.parametrize("name", DECODERS)
def test_several_queries_after_a_cache(name):
    eager, strobe = models(name)
    ids = batch("none")["input_ids"]
    for model, results in ((eager, want := []), (strobe, got := [])):
        first = model(input_ids=ids[:, :11], use_cache=True)
        results.append(model(input_ids=ids[:, 11:], past_key_values=first.past_key_values).last_hidden_state)
    assert_close(got[0], want[0])


def test_static_cache_position_that_only_the_gpu_knows(monkeypatch):
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


# ---- masks that no strobe.Mask means


def triangle(lengths=(19, 5, 12)) -> torch.Tensor:
    """The causal mask of a batch that is padded on the right, of every pair: bool [batch, 1, n, n]."""
    n = max(lengths)
    real = torch.arange(n) < torch.tensor(lengths)[:, None]
    return (torch.ones(n, n, dtype=torch.bool).tril() & real[:, None])[:, None]


@pytest.mark.parametrize("given", ["bool", "float", "half", "for each head"])
def test_a_mask_of_every_pair(given):
    eager, strobe = models("llama")
    inputs, seen = batch("right"), triangle()
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    half = torch.zeros(seen.shape, dtype=torch.float16).masked_fill(~seen, torch.finfo(torch.float16).min)
    mask = {"bool": seen, "float": added, "half": half, "for each head": seen.expand(-1, 4, -1, -1)}[given]
    real = inputs["attention_mask"].bool()
    want = eager(input_ids=inputs["input_ids"], attention_mask=added).last_hidden_state[real]
    assert_close(strobe(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state[real], want)
    assert_close(strobe(**inputs).last_hidden_state[real], want)


def test_a_mask_that_learns():
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    bias = torch.randn(2, 1, 9, 9).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), torch.finfo(torch.float32).min)
    gradients = []
    for implementation in ("strobe", "sdpa"):
        learned = bias.clone().requires_grad_()
        out, _ = transformers.AttentionInterface()[implementation](torch.nn.Module(), q, k, v, learned)
        out.square().sum().backward()
        gradients.append(learned.grad)
    assert gradients[1].abs().max() > 0.1
    assert_close(*gradients)


def test_refuses_masks_of_another_shape_or_dtype():
    _, strobe = models("llama")
    inputs = batch("none")
    with pytest.raises(ValueError, match=r"shape \[batch, length\], or \[3, 4, 19, 19\].*got \[3, 1, 19, 20\]"):
        strobe(**inputs, attention_mask=torch.zeros(3, 1, 19, 20))
    with pytest.raises(ValueError, match=r"bool or floating point, got torch.int64"):
        strobe(**inputs, attention_mask=torch.zeros(3, 1, 19, 19, dtype=torch.int64))


def first_three(batch, head, query, key):
    return key < 3


@pytest.mark.parametrize("how", ["or_mask_function", "and_mask_function"])
def test_user_mask_functions(how, caplog):
    combined = {how: first_three}
    _, strobe = models("llama")
    embeds = torch.zeros(2, 5, 64)
    where = {"inputs_embeds": embeds} if VERSION >= (5, 0) else {"input_embeds": embeds, "cache_position": torch.arange(5)}
    integration._log_dense.cache_clear()
    for _ in range(2):
        made = masking_utils.create_causal_mask(strobe.config, **where, attention_mask=None, past_key_values=None, **combined)
    query, key = torch.arange(5)[:, None], torch.arange(5)
    want = (key <= query) | (key < 3) if how == "or_mask_function" else (key <= query) & (key < 3)
    assert torch.equal(made.expand(2, 1, 5, 5), want.expand(2, 1, 5, 5))
    assert [record.message for record in caplog.records if "first_three" in record.message and "memory" in record.message] != []
    assert len(caplog.records) == 1


@pytest.mark.skipif(VERSION < (5, 0), reason="before, there were no blocks")
def test_blocks_of_pictures_tokens():
    eager, strobe = models("llama")
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1], [-1, -1, -1, 2, 2, 2, 2]])
    where = dict(inputs_embeds=torch.zeros(2, 7, 64), attention_mask=None, past_key_values=None, block_sequence_ids=blocks)
    made = masking_utils.create_causal_mask(strobe.config, **where)
    want = masking_utils.create_causal_mask(eager.config, **where)
    assert torch.equal(made, want == 0)
    assert made[0, 0, 1, 3] and not made[0, 0, 4, 5]


# ---- what Strobe cannot do


def test_falcon_is_transformers_key_error():
    config = transformers.FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(KeyError, match="strobe"):
        transformers.AutoModel.from_config(config, attn_implementation="strobe")


@pytest.mark.skipif(VERSION < (5, 0), reason="before, these models made their masks alone")
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_model_that_reads_the_mask_itself_is_named(name):
    config = transformers.AutoConfig.for_model(name, hidden_size=32, d_model=32, n_layer=1, n_layers=1, n_heads=4, n_head=4)
    model = transformers.AutoModel.from_config(config, attn_implementation="strobe")
    with pytest.raises(ValueError, match=f'{name} reads the attention mask itself.*attn_implementation="eager"'):
        model(**batch("none"))


def test_a_mask_is_no_tensor():
    mask = integration.ModelMask(Causal(), 4, 4, 4, model="lark")
    for use in (
        lambda: mask[:, :3], lambda: ~mask, lambda: 1.0 - mask, lambda: mask.to(torch.bool), lambda: torch.zeros(4, 4) + mask,
        lambda: torch.zeros(4, 4).masked_fill(mask, 1.0), lambda: torch.where(mask, 1.0, 0.0),
        lambda: torch.zeros(4, 4) * mask,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="lark reads the attention mask itself"):
            use()
    with pytest.raises(ValueError, match="the model reads the attention mask itself"):
        torch.cat([mask, mask])
    assert not hasattr(mask, "to"), "accelerate asks so before it moves anything"


@pytest.mark.parametrize("name", ["falcon", "deberta", "mpt"])
def test_check_names_models_without_the_interface(name):
    config = transformers.AutoConfig.for_model(name, num_hidden_layers=1, n_layers=1)
    with pytest.raises(ValueError, match=rf"{name} computes attention without.*Attention, so it.*=\"eager\""):
        check(config)


def test_check_says_what_does_not_run_on_strobe():
    eager, _ = models("llama")
    assert check(eager) == [] and check(eager.config) == []
    assert eager.config._attn_implementation == "eager"
    vision = transformers.SiglipVisionConfig(**SMALL, image_size=16, patch_size=8)
    assert check(vision) == ["MultiheadAttention"], "its pooling head is torch's"


@pytest.mark.parametrize("name", sorted(integration._REFUSED))
def test_refuses_arguments_that_change_the_result(name):
    q = torch.zeros(1, 2, 4, 16)
    attention = transformers.AttentionInterface()["strobe"]
    with pytest.raises(ValueError, match=f'^{name} is not supported by strobe attention, .*attn_implementation="eager"'):
        attention(torch.nn.Module(), q, q, q, None, **{name: torch.ones(2)})
    attention(torch.nn.Module(), q, q, q, None, **{name: None})


def test_refuses_attention_weights():
    _, strobe = models("llama")
    with pytest.raises(ValueError, match="output_attentions"):
        strobe(**batch("none"), output_attentions=True)


def test_names_unknown_arguments_once(caplog):
    q = torch.zeros(1, 2, 4, 16)
    integration._log_ignored.cache_clear()
    for _ in range(2):
        transformers.AttentionInterface()["strobe"](torch.nn.Module(), q, q, q, None, colour="red", use_cache=True, labels=q)
    assert [record.message for record in caplog.records] == [
        "strobe attention ignores the argument colour, which it does not know"
    ]


def test_refuses_large_head_dims():
    q = torch.zeros(1, 2, 4, 264)
    with pytest.raises(ValueError, match=r"head dims up to 256, got 264 and 264: load the model with"):
        transformers.AttentionInterface()["strobe"](torch.nn.Module(), q, q, q, None)


# ---- packed sequences

LENGTHS = (4, 9, 6)


def documents_one_by_one(model, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(input_ids=document).last_hidden_state for document in ids.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("how", ["cu_seq_lens", "cu_seq_lens alone", "position_ids", "position_ids and a cache"])
def test_packed_sequences_are_the_documents_one_by_one(name, how):
    eager, strobe = models(name)
    ids = batch("none")["input_ids"][:1]
    bounds = torch.tensor([0, 4, 13, 19], dtype=torch.int32)
    options = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    if how == "cu_seq_lens alone":
        options = {}  # positions count on, which rotations do not mind: they know differences only
    if "cu_seq_lens" in how:
        options |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    if how == "cu_seq_lens":
        options |= {"max_length_q": 9, "max_length_k": 9}
    assert_close(
        strobe(input_ids=ids, use_cache="and a cache" in how, **options).last_hidden_state, documents_one_by_one(eager, ids)
    )


def test_training_on_what_the_collator_packs():
    eager, strobe = models("llama", transformers.AutoModelForCausalLM)
    documents = [{"input_ids": ids.tolist()} for ids in batch("none")["input_ids"][0].split(LENGTHS)]
    packed = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents, return_tensors="pt")
    loss = strobe(**packed).loss
    loss.backward()
    apart = [eager(torch.tensor([d["input_ids"]]), labels=torch.tensor([d["input_ids"]])).loss for d in documents]
    want = sum(one * (n - 1) for one, n in zip(apart, LENGTHS, strict=True)) / sum(n - 1 for n in LENGTHS)
    want.backward()
    assert_close(loss, want)
    for (name, p), q in zip(strobe.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_position_ids_of_a_batch_are_looked_at_once(monkeypatch):
    eager, strobe = models("llama")
    ids, looks = batch("none")["input_ids"], []
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((19,), (4, 15), (10, 9))])
    diff = torch.diff
    monkeypatch.setattr(integration.torch, "diff", lambda *args, **options: looks.append(1) or diff(*args, **options))
    got = strobe(input_ids=ids, position_ids=positions).last_hidden_state
    assert len(looks) == 1
    monkeypatch.undo()
    assert_close(got, eager(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state)


def test_position_ids_after_a_cache_say_nothing_of_documents():
    eager, strobe = models("llama")
    ids, positions = batch("none")["input_ids"], torch.tensor([[7, 8, 9, 20, 21, 22, 23, 24]])
    for model, results in ((eager, want := []), (strobe, got := [])):
        first = model(input_ids=ids[:, :11], use_cache=True)
        rest = model(input_ids=ids[:, 11:], position_ids=positions, past_key_values=first.past_key_values)
        results.append(rest.last_hidden_state)
    assert_close(got[0], want[0])


def test_refuses_packed_sequences_that_it_would_get_wrong():
    q = torch.zeros(1, 2, 4, 16)
    attention, bounds = transformers.AttentionInterface()["strobe"], torch.tensor([0, 1, 4], dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    with pytest.raises(ValueError, match="go together"):
        attention(torch.nn.Module(), q, q, q, None, cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="goes without a 4-D attention_mask"):
        attention(torch.nn.Module(), q, q, q, torch.zeros(1, 1, 4, 4), **packed)
    with pytest.raises(ValueError, match="goes without a 4-D attention_mask and a position_bias"):
        attention(torch.nn.Module(), q, q, q, None, position_bias=torch.zeros(1, 2, 4, 4), **packed)
    _, strobe = models("llama")
    with pytest.raises(ValueError, match="attention_mask has some"):
        strobe(**batch("left"), **packed)


def test_refuses_chunks_that_would_not_begin_with_their_sequence():
    q, chunks = torch.randn(1, 2, 9, 16), masking_utils.chunked_causal_mask_function(4, torch.tensor([0]))
    for positions, refused in ((torch.arange(9), False), (torch.arange(9) % 5, True)):
        mask = transformers.AttentionMaskInterface()["strobe"](
            batch_size=1, q_length=9, kv_length=9, device=torch.device("cpu"), mask_function=chunks
        )
        with pytest.raises(ValueError, match="chunks of packed sequences need use_cache=False") if refused else nullcontext():
            transformers.AttentionInterface()["strobe"](torch.nn.Module(), q, q, q, mask, position_ids=positions[None])


# ---- arguments of a layer


@pytest.mark.parametrize("of_module", [None, False, True])
@pytest.mark.parametrize("given", [None, False, True])
def test_is_causal_of_the_call_goes_before_that_of_the_module(given, of_module):
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    module = torch.nn.Module()
    if of_module is not None:
        module.is_causal = of_module
    want, got = (
        transformers.AttentionInterface()[name](module, q, k, v, None, is_causal=given)[0] for name in ("sdpa", "strobe")
    )
    assert_close(got, want)


def test_a_window_of_a_layer_without_a_mask():
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    attention = transformers.AttentionInterface()["strobe"]
    out, _ = attention(torch.nn.Module(), q, k, v, None, is_causal=True, sliding_window=3)
    alone, _ = attention(torch.nn.Module(), q[:, :, -3:], k[:, :, -3:], v[:, :, -3:], None, is_causal=True)
    assert_close(out[:, -1], alone[:, -1])
    with pytest.raises(ValueError, match="sliding_window=3 without a causal mask"):
        attention(torch.nn.Module(), q, k, v, None, is_causal=False, sliding_window=3)
    with pytest.raises(ValueError, match="where the queries stand is unknown"):
        attention(torch.nn.Module(), q[:, :, :5], k, v, None, is_causal=True)


@pytest.mark.parametrize("head_dim, value_dim", [(20, 20), (5, 12), (16, 9)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_head_dims_that_kernels_do_not_take(head_dim, value_dim, scaling):
    q, k, v = torch.randn(2, 3, 9, head_dim), torch.randn(2, 3, 9, head_dim), torch.randn(2, 3, 9, value_dim)
    want = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], scale=scaling)[0].transpose(1, 2)
    module = torch.nn.Module()
    out, weights = transformers.AttentionInterface()["strobe"](module, q, k, v, None, scaling=scaling, is_causal=False)
    assert_close(out, want)
    assert weights is None


def test_deterministic_is_handed_on(monkeypatch):
    given = []
    monkeypatch.setattr(integration, "attention", lambda q, k, v, **options: given.append(options["deterministic"]) or q)
    q = torch.zeros(1, 2, 4, 16)
    for value in (None, False, True):
        transformers.AttentionInterface()["strobe"](torch.nn.Module(), q, q, q, None, deterministic=value)
    assert given == [False, False, True]


def test_no_queries():
    q, k = torch.zeros(1, 2, 0, 16), torch.zeros(1, 2, 4, 16)
    assert transformers.AttentionInterface()["strobe"](torch.nn.Module(), q, k, k, None, is_causal=False)[0].shape == (
        1,
        0,
        2,
        16,
    )


def test_head_dims_that_are_not_contiguous():
    q, k, v = torch.randn(3, 1, 2, 16, 16).transpose(-1, -2)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert_close(transformers.AttentionInterface()["strobe"](torch.nn.Module(), q, k, v, None, is_causal=False)[0], want)


@pytest.mark.skipif(VERSION < (5, 0), reason="before, there were no bidirectional mask functions")
def test_keys_past_the_end_of_the_padding_mask_are_padding():
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    real = torch.tensor([[False, True, True, True, True]])
    mask = transformers.AttentionMaskInterface()["strobe"](
        batch_size=1, q_length=9, kv_length=9, mask_function=masking_utils.bidirectional_mask_function, attention_mask=real,
        device=q.device,
    )  # fmt: skip
    want = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, 1:5], v[:, :, 1:5]).transpose(1, 2)
    assert_close(transformers.AttentionInterface()["strobe"](torch.nn.Module(), q, k, v, mask)[0], want)


@pytest.mark.skipif(VERSION < (5, 0), reason="before, there were no bidirectional mask functions")
@pytest.mark.parametrize("keys, window", [(5, None), (12, 3)])
def test_refuses_queries_that_do_not_end_on_the_last_key(keys, window):
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_bidirectional_mask_function(window)
    with pytest.raises(ValueError, match=f"puts the last query on key 8 of {keys}: strobe aligns it with the last key"):
        transformers.AttentionMaskInterface()["strobe"](batch_size=1, q_length=9, kv_length=keys, mask_function=function)


def test_a_window_of_no_keys_shows_none():
    q = torch.randn(2, 2, 9, 16)
    mask = transformers.AttentionMaskInterface()["strobe"](
        batch_size=2, q_length=9, kv_length=9, device=q.device,
        mask_function=masking_utils.sliding_window_causal_mask_function(0),
    )  # fmt: skip
    assert not transformers.AttentionInterface()["strobe"](torch.nn.Module(), q, q, q, mask)[0].any()


def test_a_mask_made_on_another_device():
    q = torch.zeros(2, 2, 9, 16, device="meta")
    real = torch.arange(9) < torch.tensor([[9], [4]])
    mask = transformers.AttentionMaskInterface()["strobe"](
        batch_size=2, q_length=9, kv_length=9, mask_function=masking_utils.causal_mask_function, attention_mask=real,
        device=real.device,
    )  # fmt: skip
    moved = integration._on_device(mask.mask, q.device).documents
    assert moved.q.device == moved.kv.device == q.device
    assert integration._on_device(mask.mask, real.device) is mask.mask


def test_gradient_checkpointing():
    eager, strobe = models("mistral")
    inputs, gradients = batch("right"), []
    for model in (eager, strobe):
        model.train()
        model.gradient_checkpointing_enable()
        (model(**inputs).last_hidden_state * inputs["attention_mask"][..., None]).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for want, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4 * want.abs().max().item(), rtol=1e-3)


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
