"""Families of models on Strobe against transformers' eager attention: tiny, with random weights, nothing is downloaded.

`make test` runs each family once, `make test-all` every family in every mode. docs/transformers.md shows the families.
"""

import copy
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from strobe.integrations.transformers import check, register  # noqa: E402

DOCUMENT = Path(__file__).parents[2] / "docs/transformers.md"

TINY = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=99,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=98,
)  # fmt: skip
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
WINDOW = dict(sliding_window=7)
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
LOCAL_EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
ROUTED_EXPERTS = dict(n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, n_group=1, topk_group=1)
LATENT = ROUTED_EXPERTS | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    first_k_dense_replace=1,
)  # fmt: skip
WIDE = dict(head_dim=16)
"""Heads that are not hidden_size / num_attention_heads wide."""

DECODERS = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": WINDOW,
    "ctrl": GPT2 | dict(dff=48),
    "cwm": WINDOW,
    "deepseek_v2": LATENT | dict(head_dim=8),
    "deepseek_v3": LATENT,
    "diffllama": {},
    "ernie4_5": {},
    "exaone4": WINDOW,
    "gemma": WIDE,
    "gemma2": WIDE | WINDOW | dict(attn_logit_softcapping=2.0, query_pre_attn_scalar=25),
    "gemma3_text": WIDE | WINDOW | dict(layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=25),
    "glm": WIDE,
    "glm4": WIDE,
    "glm4_moe": WIDE | ROUTED_EXPERTS,
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": {},
    "gpt_oss": WIDE | WINDOW | LOCAL_EXPERTS,
    "granite": {},
    "granitemoe": LOCAL_EXPERTS,
    "helium": dict(head_dim=8),
    "hunyuan_v1_dense": dict(head_dim=8),
    "jetmoe": {},
    "lfm2": {},
    "llama": {},
    "llama4_text": WIDE | dict(attention_chunk_size=5, num_local_experts=1, intermediate_size_mlp=48),
    "mimo_v2_flash": ROUTED_EXPERTS,
    "mistral": WINDOW,
    "mixtral": WINDOW | LOCAL_EXPERTS,
    "moshi": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS,
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "persimmon": {},
    "phi": {},
    "phi3": WINDOW,
    "phimoe": LOCAL_EXPERTS,
    "qwen2": WINDOW | dict(use_sliding_window=True, max_window_layers=1),
    "qwen2_moe": EXPERTS | dict(shared_expert_intermediate_size=16),
    "qwen3": WIDE,
    "qwen3_moe": EXPERTS | WIDE,
    "seed_oss": WIDE,
    "smollm3": {},
    "stablelm": {},
    "starcoder2": WINDOW,
    "vaultgemma": WIDE | WINDOW | dict(query_pre_attn_scalar=25),
}

T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, decoder_start_token_id=0)
BART = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
    decoder_ffn_dim=48, decoder_start_token_id=2, forced_eos_token_id=None,
)  # fmt: skip
ENCODER_DECODERS = {
    "bart": BART,
    "blenderbot": BART,
    "m2m_100": BART,
    "marian": BART | dict(decoder_vocab_size=99),
    "mbart": BART,
    "mt5": T5,
    "pegasus": BART,
    "plbart": BART,
    "t5": T5,
    "umt5": T5,
}

CLIP = dict(projection_dim=32)
ENCODERS = {
    "albert": dict(embedding_size=16),
    "bert": {},
    "camembert": {},
    "clip_text_model": CLIP,
    "data2vec-text": {},
    "distilbert": dict(dim=32, n_heads=4, n_layers=2, hidden_dim=48),
    "electra": dict(embedding_size=16),
    "ernie": {},
    "esm": dict(position_embedding_type="rotary", mask_token_id=5),
    "eurobert": {},
    "layoutlm": {},
    "mobilebert": dict(embedding_size=16, intra_bottleneck_size=32, true_hidden_size=32),
    "modernbert": dict(local_attention=8, global_attn_every_n_layers=2),
    "roberta": {},
    "roberta-prelayernorm": {},
    "splinter": {},
    "xlm-roberta": {},
    "xmod": dict(languages=["en_XX"], default_language="en_XX"),
}

PICTURE = dict(image_size=32, patch_size=8, num_channels=3)
PICTURES = {
    "beit": PICTURE,
    "clip_vision_model": PICTURE | CLIP,
    "deit": PICTURE,
    "dinov2": PICTURE,
    "dinov2_with_registers": PICTURE,
    "dinov3_vit": PICTURE,
    "ijepa": PICTURE,
    "pixtral": PICTURE | dict(head_dim=8),
    "siglip_vision_model": PICTURE,
    "vit": PICTURE,
    "yolos": PICTURE | dict(image_size=[32, 32]),
}

CONVOLUTIONS = dict(conv_dim=(16, 16), conv_kernel=(10, 4), conv_stride=(5, 4), num_feat_extract_layers=2)
SOUND = CONVOLUTIONS | dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2)
SOUNDS = {
    "data2vec-audio": SOUND | dict(num_conv_pos_embeddings=5, conv_pos_kernel_size=5),
    "hubert": SOUND,
    "unispeech": SOUND,
    "unispeech-sat": SOUND,
    "wav2vec2": SOUND,
}

FAMILIES = {
    "Decoders": DECODERS,
    "Encoder-decoders": [*ENCODER_DECODERS, "whisper"],
    "Encoders of text": ENCODERS,
    "Encoders of pictures": PICTURES,
    "Encoders of sound": SOUNDS,
}
NOT_ON_STROBE = {"siglip_vision_model": ["MultiheadAttention"]}
"""What `check` names in these families: the pooling head is torch's own attention."""

LENGTHS = (17, 5, 11)
REAL = torch.arange(17) < torch.tensor(LENGTHS)[:, None]
IDS = torch.randint(2, 97, (3, 17), generator=torch.Generator().manual_seed(1))
DOCUMENTS = (6, 3, 8)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    # The CPU backends, as a user gets them, not Triton's interpreter, which the other tests run kernels in.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    register()


def models(name: str, extra: dict, auto):
    """The same random model twice, in eval mode: on eager attention and on Strobe's."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **TINY | extra)
    eager = auto.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for p in eager.parameters():  # a fresh model attends to everything alike, so that no mask mattered
            p.copy_(0.2 * torch.randn_like(p) + (0.0 if p.dim() > 1 else p))
    strobe = auto.from_config(copy.deepcopy(config), attn_implementation="strobe").eval()
    strobe.load_state_dict(eager.state_dict())
    assert check(strobe) == NOT_ON_STROBE.get(name, [])
    return eager, strobe


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    scale = want.abs().max().item()
    assert scale > 0
    torch.testing.assert_close(got, want, atol=tolerance * max(1.0, scale), rtol=tolerance)


def padded(side: str | None) -> tuple[dict, torch.Tensor]:
    """A batch, and bool [3, 17], True where there is no padding."""
    if side is None:
        return {"input_ids": IDS}, torch.ones_like(REAL)
    real = REAL if side == "right" else REAL.flip(-1)
    return {"input_ids": IDS * real, "attention_mask": real.long()}, real


def on(device: torch.device, inputs: dict) -> dict:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def compare_logits(pair, side: str | None, tolerance: float = 1e-4) -> None:
    inputs, real = padded(side)
    inputs = on(pair[0].device, inputs)
    with torch.no_grad():
        want, got = (model(**inputs).logits[real] for model in pair)
    assert_close(got, want, tolerance)


def compare_generation(pair, cache: str | None = None, side: str = "left", tokens: int = 4) -> None:
    inputs, _ = padded(side)
    options = dict(do_sample=False, num_beams=1, max_new_tokens=tokens, min_new_tokens=tokens, cache_implementation=cache)
    options |= dict(output_logits=True, return_dict_in_generate=True, disable_compile=True)
    want, got = (model.generate(**inputs, **options) for model in pair)
    assert torch.equal(got.sequences, want.sequences)
    assert_close(torch.stack(got.logits), torch.stack(want.logits))


def compare_packed(pair, tolerance: float = 1e-4, **options) -> None:
    """Documents packed into one row on Strobe, one by one on eager attention."""
    eager, strobe = pair
    row, positions = (x.to(eager.device) for x in (IDS[:1], torch.cat([torch.arange(n) for n in DOCUMENTS])[None]))
    with torch.no_grad():
        want = torch.cat([eager(input_ids=document).logits for document in row.split(DOCUMENTS, 1)], 1)
        assert_close(strobe(input_ids=row, position_ids=positions, **options).logits, want, tolerance)


def gradients(model, inputs: dict, real: torch.Tensor, output: str) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = getattr(model(**inputs), output)[real]
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.numel()}


def assert_gradients_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    largest = max(gradient.abs().max() for gradient in want.values())
    for name, gradient in got.items():
        # Some gradients are exactly 0 (that of a bias of the keys), and what is left of them is rounding.
        scale = want[name].abs().max().clamp(min=1e-2 * largest)
        torch.testing.assert_close(
            gradient / scale, want[name] / scale, atol=2e-4, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def compare_gradients(pair, inputs: dict, real: torch.Tensor, output: str = "logits") -> None:
    want, got = (gradients(model, inputs, real, output) for model in pair)
    assert_gradients_close(got, want)


def compare_checkpoints(pair, inputs: dict, real: torch.Tensor, output: str = "logits") -> None:
    """A training step on Strobe with checkpoints and without, in which the same is dropped."""
    _, strobe = pair
    if not strobe.supports_gradient_checkpointing:
        pytest.skip("this family has none")
    strobe.train()
    transformers.set_seed(3)
    want = gradients(strobe, inputs, real, output)
    strobe.gradient_checkpointing_enable({"use_reentrant": False})
    transformers.set_seed(3)
    assert_gradients_close(gradients(strobe, inputs, real, output), want)


# ---- decoders


@pytest.mark.parametrize("name", DECODERS)
def test_decoder(name):
    pair = models(name, DECODERS[name], transformers.AutoModelForCausalLM)
    compare_logits(pair, "right")
    compare_generation(pair)
    if name not in REFUSES_BOUNDS:
        compare_packed(pair, **bounds())


def bounds() -> dict:
    cu = torch.tensor([0, 6, 9, 17], dtype=torch.int32)
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 8, "max_length_k": 8}


REFUSES_BOUNDS = {"llama4_text"}
"""Chunks begin where a document does, which cu_seq_lens do not tell its mask."""
NO_POSITIONS = {"biogpt"}
"""They make their masks without position_ids."""
NO_POSITIONS_BESIDE_A_CACHE = NO_POSITIONS | {"ctrl", "gpt_bigcode", "llama4_text", "persimmon"}
"""They do not hand position_ids to attention."""

MODES = {
    "no padding": lambda pair: compare_logits(pair, None),
    "left": lambda pair: compare_logits(pair, "left"),
    "static cache": lambda pair: compare_generation(pair, "static"),
    "ten tokens": lambda pair: compare_generation(pair, tokens=10),
    "packed by position_ids": lambda pair: compare_packed(pair, use_cache=False),
    "packed by position_ids beside a cache": lambda pair: compare_packed(pair, use_cache=True),
    "training": lambda pair: compare_gradients(pair, *padded("right")),
    "checkpoints": lambda pair: compare_checkpoints(pair, *padded("right")),
    "bfloat16": lambda pair: compare_logits([model.bfloat16() for model in pair], "right", 0.1),
}
FEW_EXPERTS = {"jetmoe", "mixtral", "phimoe"}
"""In 8 bits of mantissa two experts may be alike, and rounding chooses."""
EXCEPT = {
    "packed by position_ids": NO_POSITIONS,
    "packed by position_ids beside a cache": NO_POSITIONS_BESIDE_A_CACHE,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_in_every_mode(name, mode):
    if mode == "bfloat16" and name in FEW_EXPERTS:
        pytest.skip("rounding chooses another expert")
    pair = models(name, DECODERS[name], transformers.AutoModelForCausalLM)
    if name in EXCEPT.get(mode, ()):
        with pytest.raises(AssertionError):  # eager attention mixes the documents, too
            MODES[mode](pair)
    else:
        MODES[mode](pair)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "deepseek_v3"])
def test_training_of_sinks_soft_caps_and_latent_heads(name):
    compare_gradients(models(name, DECODERS[name], transformers.AutoModelForCausalLM), *padded("right"))


def compare_steps(pair, tolerance: float) -> None:
    """The logits of a left-padded prompt in a static cache, and of two tokens after it, one at a time."""
    real = torch.nn.functional.pad(REAL.flip(-1), (0, 2), value=True).long()
    ids, results = torch.cat([IDS, IDS[:, :2]], 1), []
    for model in pair:
        cache, logits = transformers.StaticCache(config=model.config, max_cache_len=24), []
        for begin, end in ((0, 17), (17, 18), (18, 19)):
            inputs = on(model.device, {"input_ids": ids[:, begin:end], "attention_mask": real[:, :end]})
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, begin:]
            with torch.no_grad():
                logits.append(model(**inputs, past_key_values=cache).logits[:, -1])
        results.append(torch.stack(logits))
    assert_close(results[1], results[0], tolerance)


# One expert: rounding cannot choose another.
ON_A_GPU = ("llama", "mistral", "gemma2", "gpt_oss", "llama4_text")


@pytest.mark.parametrize("name", ON_A_GPU)
def test_steps_after_a_static_cache(name):
    compare_steps(models(name, DECODERS[name], transformers.AutoModelForCausalLM), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_decoder_on_a_gpu(name):
    experts = dict(num_local_experts=1) if name == "gpt_oss" else {}
    pair = [model.cuda() for model in models(name, DECODERS[name] | experts, transformers.AutoModelForCausalLM)]
    compare_logits(pair, "right", 1e-2)
    compare_logits(pair, "left", 1e-2)
    compare_steps(pair, 1e-2)
    if name != "llama4_text":  # transformers 5.17 does not keep its documents apart, with eager attention neither
        compare_packed(pair, 1e-2, use_cache=False)
    if name not in REFUSES_BOUNDS:
        compare_packed(pair, 1e-2, **on(pair[0].device, bounds()))


def test_chunks_of_packed_sequences():
    pair = models("llama4_text", DECODERS["llama4_text"], transformers.AutoModelForCausalLM)
    compare_packed(pair, use_cache=False)
    with pytest.raises(ValueError, match="chunks of packed sequences need use_cache=False"):
        compare_packed(pair, **bounds())


# ---- encoder-decoders


def both_sides() -> dict:
    inputs, _ = padded("right")
    return inputs | {"decoder_input_ids": IDS[:, :9].flip(0)}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoder(name):
    pair = models(name, ENCODER_DECODERS[name], transformers.AutoModelForSeq2SeqLM)
    with torch.no_grad():
        want, got = (model(**both_sides()).logits for model in pair)
    assert_close(got, want)
    compare_generation(pair, side="right")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["static cache", "training", "checkpoints"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoder_in_every_mode(name, mode):
    pair = models(name, ENCODER_DECODERS[name], transformers.AutoModelForSeq2SeqLM)
    if mode == "static cache":
        compare_generation(pair, "static", side="right")
    else:
        compare = compare_checkpoints if mode == "checkpoints" else compare_gradients
        compare(pair, both_sides(), torch.ones(3, 9, dtype=torch.bool))


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_packed_encoder(name):
    eager, strobe = models(name, ENCODERS[name], transformers.AutoModel)
    row, positions = IDS[:1], torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    with torch.no_grad():
        want = torch.cat([eager(input_ids=document).last_hidden_state for document in row.split(DOCUMENTS, 1)], 1)
        assert_close(strobe(input_ids=row, position_ids=positions, **bounds()).last_hidden_state, want)


def test_training_of_position_biases():
    pair = models("t5", T5, transformers.AutoModelForSeq2SeqLM)
    compare_gradients(pair, both_sides(), torch.ones(3, 9, dtype=torch.bool))


def test_position_biases_of_a_static_cache():
    compare_generation(models("t5", T5, transformers.AutoModelForSeq2SeqLM), "static", side="right")


def test_whisper():
    extra = BART | dict(num_mel_bins=8, max_source_positions=20, max_target_positions=32, suppress_tokens=None)
    pair = models("whisper", extra | dict(begin_suppress_tokens=None), transformers.AutoModelForSpeechSeq2Seq)
    sound = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want, got = (model(input_features=sound, decoder_input_ids=IDS[:, :9]).logits for model in pair)
    assert_close(got, want)
    options = dict(do_sample=False, max_new_tokens=4, min_new_tokens=4, decoder_input_ids=IDS[:, :2])
    want, got = (model.generate(input_features=sound, **options) for model in pair)
    assert torch.equal(got, want)


# ---- encoders


def inputs_of(name: str) -> tuple[dict, torch.Tensor | slice]:
    """What an encoder takes, and what of its result is no padding."""
    generator = torch.Generator().manual_seed(2)
    if name in PICTURES:
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}, slice(None)
    if name in SOUNDS:
        real = torch.arange(400) < torch.tensor([400, 250])[:, None]
        return {"input_values": torch.randn(2, 400, generator=generator) * real, "attention_mask": real.long()}, slice(None)
    return padded("right")


@pytest.mark.parametrize("name", [*ENCODERS, *PICTURES, *SOUNDS])
def test_encoder(name):
    pair = models(name, (ENCODERS | PICTURES | SOUNDS)[name], transformers.AutoModel)
    inputs, real = inputs_of(name)
    with torch.no_grad():
        want, got = (model(**inputs).last_hidden_state[real] for model in pair)
    assert_close(got, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["no padding", "left", "training", "checkpoints"])
@pytest.mark.parametrize("name", [*ENCODERS, *PICTURES, *SOUNDS])
def test_encoder_in_every_mode(name, mode):
    pair = models(name, (ENCODERS | PICTURES | SOUNDS)[name], transformers.AutoModel)
    inputs, real = inputs_of(name)
    if mode in ("training", "checkpoints"):
        compare = compare_checkpoints if mode == "checkpoints" else compare_gradients
        compare(pair, inputs, real, "last_hidden_state")
    elif name in ENCODERS:
        inputs, real = padded("left" if mode == "left" else None)
        with torch.no_grad():
            want, got = (model(**inputs).last_hidden_state[real] for model in pair)
        assert_close(got, want)


# ---- what is refused


def test_refuses_chosen_keys():
    extra = LATENT | dict(index_n_heads=4, index_head_dim=16, index_topk=4, head_dim=8)
    _, strobe = models("deepseek_v32", extra, transformers.AutoModelForCausalLM)
    with pytest.raises(ValueError, match="deepseek_v32 reads the attention mask itself"):
        strobe(input_ids=IDS)


def test_refuses_heads_that_are_too_wide():
    extra = WIDE | dict(layer_types=["sliding_attention", "full_attention"], vocab_size_per_layer_input=99)
    _, strobe = models("gemma4_text", extra | dict(global_head_dim=512), transformers.AutoModelForCausalLM)
    with pytest.raises(ValueError, match="strobe attention takes head dims up to 256, got 512 and 512"):
        strobe(input_ids=IDS)


# ---- the document


def test_the_packed_training_of_the_document():
    _, model = models("llama", {}, transformers.AutoModelForCausalLM)
    code = re.search(r"## Packed training.*?```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert code
    exec(code[1], names := {"model": model})
    assert names["batch"]["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert model.get_input_embeddings().weight.grad[5:10].any(dim=1).tolist() == [True, True, False, True, False]


def table() -> str:
    rows = [f"| {kind} ({len(names)}) | {', '.join(f'`{name}`' for name in names)} |" for kind, names in FAMILIES.items()]
    return "\n".join(["| | `model_type` |", "| --- | --- |", *rows])


def test_the_document_lists_the_families():
    shown = re.search(r"<!-- begin: families -->\n(.*?)\n<!-- end: families -->", DOCUMENT.read_text(), re.DOTALL)
    assert shown and shown[1] == table(), f"docs/transformers.md should show\n{table()}"
