"""Shapes of attention in real models: what `strobe bench zoo` measures.

A shape is a name, where its numbers are published (a paper, or a model's config.json), and a point. Batches are ours: as many
sequences as a GPU is given at a time when it works on such a model. Lengths of packed sequences are drawn from a log-normal
law (`lengths_like`), because mean lengths are published and whole distributions are not.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from statistics import NormalDist

from strobe.lab.bench.plan import Point


@dataclass(frozen=True)
class Shape:
    """A point and where its numbers come from. trained: whether its backward is measured, too."""

    point: Point
    source: str
    trained: bool = False


SPREAD = 1.0
"""The standard deviation of the logarithms of packed lengths: an assumption."""


def lengths_like(mean: float, number: int, seed: int = 0) -> tuple[int, ...]:
    """`number` lengths of a log-normal law with this mean: its quantiles, in a random order that depends on the seed alone."""
    law = NormalDist(math.log(mean) - SPREAD**2 / 2, SPREAD)
    lengths = [max(1, round(math.exp(law.inv_cdf((i + 0.5) / number)))) for i in range(number)]
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)


def _shape(
    model: str, source: str, batch: int, length: int, heads: int, head_dim: int, mask: str = "full", *,
    heads_kv: int | None = None, head_dim_v: int | None = None, trained: bool = False, **more,
) -> Shape:  # fmt: skip
    dims = heads, heads_kv or heads, head_dim, head_dim_v or head_dim
    return Shape(Point(batch, length, *dims, "bf16", mask, False, model, **more), source, trained)


def _packed(model: str, source: str, packed: tuple[int, ...], heads: int, head_dim: int, mask: str, **more) -> Shape:
    return _shape(model, source, len(packed), max(packed), heads, head_dim, mask, packed=packed, **more)


_BERT = "arXiv 1810.04805, section 3"
_VIT = "arXiv 2010.11929, table 1"
_SD = "runwayml/stable-diffusion-v1-5, unet/config.json"
_SDXL = "stabilityai/stable-diffusion-xl-base-1.0, unet/config.json"
_LLAMA = "arXiv 2407.21783, table 3"
_WAN = "arXiv 2503.20314; Wan-AI/Wan2.1-T2V, config.json; 81 frames at 832 x 480"
_SHAREGPT = "mean length of ShareGPT: arXiv 2309.06180, figure 11"
_NONE = "no model known to us"

FORWARD = (
    # few tiles, few keys
    _shape("OLMo 1B, a prompt of 1k", "allenai/OLMo-1B-hf, config.json", 1, 1024, 16, 128, "causal"),
    _shape("Llama 2 7B, a prompt of 2k", "arXiv 2307.09288", 1, 2048, 32, 128, "causal"),
    _shape("SDXL, cross attention 64 x 64", _SDXL, 8, 4096, 10, 64, length_kv=77, trained=True),
    _shape("SDXL, cross attention 32 x 32", _SDXL, 8, 1024, 20, 64, length_kv=77),
    # head dims that are no power of two
    _shape("Zamba2 2.7B", "Zyphra/Zamba2-2.7B, config.json", 4, 4096, 32, 160, "causal", trained=True),
    _shape("Phi-2", "microsoft/phi-2, config.json", 8, 2048, 32, 80, "causal", trained=True),
    _shape("SD 1.5, self attention 64 x 64", _SD, 8, 4096, 8, 40),
    _shape("SigLIP So400m, 384 pixels", "google/siglip-so400m-patch14-384, config.json", 32, 729, 16, 72, trained=True),
    _shape("head dim 112", _NONE, 4, 4096, 16, 112, "causal"),
    _shape("Zamba2 7B", "Zyphra/Zamba2-7B, config.json", 2, 4096, 32, 224, "causal"),
    _shape("Phi-3 mini", "microsoft/Phi-3-mini-4k-instruct, config.json", 4, 4096, 32, 96, "window 2048", trained=True),
    # encoders and images
    _shape("BERT large", _BERT, 32, 512, 16, 64, trained=True),
    _shape("ViT-B/16, 224 pixels", _VIT, 128, 197, 12, 64),
    _shape("ViT-L/16, 384 pixels", _VIT, 32, 577, 16, 64, trained=True),
    _shape("CLIP ViT-L/14, text", "arXiv 2103.00020, appendix F", 128, 77, 12, 64, "causal"),
    _shape("Whisper large, encoder", "arXiv 2212.04356, table 1", 8, 1500, 20, 64),
    _shape("Whisper large, cross attention", "arXiv 2212.04356, table 1", 8, 448, 20, 64, length_kv=1500),
    _shape("SD 1.5, cross attention 64 x 64", _SD, 8, 4096, 8, 40, length_kv=77),
    _shape("SD 1.5, self attention 32 x 32", _SD, 8, 1024, 8, 80),
    _shape("SD 1.5, self attention 16 x 16", _SD, 16, 256, 8, 160),
    _shape("SDXL, self attention 64 x 64", _SDXL, 8, 4096, 10, 64),
    _shape("PixArt-alpha, 1024 pixels", "arXiv 2310.00426; PixArt-alpha/PixArt-XL-2-1024-MS, config.json", 4, 4096, 16, 72),
    _shape("Flux.1", "black-forest-labs/FLUX.1-dev, transformer/config.json", 1, 4608, 24, 128),
    _shape("Wan 2.1 1.3B, video", _WAN, 1, 32760, 12, 128),
    _shape("Wan 2.1 14B, cross attention", _WAN, 1, 32760, 40, 128, length_kv=512),
    _shape("HunyuanVideo, 960 x 544", "arXiv 2412.03603; 129 frames and 256 of text", 1, 67576, 24, 128),
    # language models
    _shape("Llama 3 8B", _LLAMA, 2, 8192, 32, 128, "causal", heads_kv=8, trained=True),
    _shape("Llama 3 70B", _LLAMA, 1, 8192, 64, 128, "causal", heads_kv=8),
    _shape("Qwen 2.5 7B", "Qwen/Qwen2.5-7B, config.json", 1, 8192, 28, 128, "causal", heads_kv=4, trained=True),
    _shape("Qwen3 14B", "Qwen/Qwen3-14B, config.json", 1, 8192, 40, 128, "causal", heads_kv=8),
    _shape("Qwen3 14B, the last 2k of 8k", "Qwen/Qwen3-14B, config.json", 1, 2048, 40, 128, "causal", heads_kv=8,
           length_kv=8192),
    _shape("Gemma 2 9B, all keys", "google/gemma-2-9b, config.json", 1, 8192, 16, 256, "causal", heads_kv=8, softcap=50.0),
    _shape("Gemma 3 12B, all keys", "google/gemma-3-12b-pt, config.json", 1, 16384, 16, 256, "causal", heads_kv=8),
    _shape("Gemma 3 12B, window", "google/gemma-3-12b-pt, config.json", 1, 16384, 16, 256, "window 1024", heads_kv=8),
    _shape("gpt-oss, all keys", "openai/gpt-oss-20b, config.json", 1, 8192, 64, 64, "causal", heads_kv=8, sinks=True),
    _shape("gpt-oss, window", "openai/gpt-oss-20b, config.json", 1, 8192, 64, 64, "window 128", heads_kv=8, sinks=True,
           trained=True),
    _shape("Mistral 7B", "arXiv 2310.06825, table 1", 1, 16384, 32, 128, "window 4096", heads_kv=8),
    _shape("DeepSeek-V3", "arXiv 2412.19437, section 4.2", 1, 4096, 128, 192, "causal", head_dim_v=128),
    # odd lengths and heads, packed sequences
    _shape("odd lengths and heads", _NONE, 3, 1999, 13, 128, "causal"),
    _packed("Llama 3 8B, packed", f"{_LLAMA}; {_SHAREGPT}", lengths_like(499, 32), 32, 128, "causal", heads_kv=8, trained=True),
    _packed("BERT base, packed", f"{_BERT}; mean length of Alpaca: arXiv 2309.06180, figure 11", lengths_like(78, 256), 12, 64,
            "full"),
)  # fmt: skip
"""The shapes of the zoo, those that were once weak first."""


def points(backward: bool | None = None, only: tuple[str, ...] = ()) -> tuple[Point, ...]:
    """The points of the zoo: of a phase, or (None) first all forwards, then the backwards of what is trained. only: words, of
    which a model's name must have one, whatever their case. ValueError if nothing is left."""
    found = [shape.point for shape in FORWARD if backward is not True]
    found += [replace(shape.point, backward=True) for shape in FORWARD if shape.trained and backward is not False]
    found = [point for point in found if not only or any(word.lower() in point.model.lower() for word in only)]
    if not found:
        raise ValueError(f"only must name some of the zoo's models, got {','.join(only)}; it has "
                         f"{', '.join(shape.point.model for shape in FORWARD)}")  # fmt: skip
    return tuple(found)


HEADS = ((32, 8), (64, 8), (28, 4), (40, 8), (16, 2), (24, 8), (8, 1), (16, 16), (12, 12), (32, 32), (5, 5))
DIMS = (*4 * ((128, 128),), (64, 64), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256))
DRAWN_MASKS = (*4 * ("causal",), "full", "full", "window 128", "window 1024")
"""What shapes at random are drawn from: a value that is there twice is drawn twice as often."""

SHORTEST, LONGEST, TOKENS = 30, 8192, 32768
"""Tokens of a sequence, and of all."""


def drawn(number: int, seed: int = 0, backward: bool | None = None) -> tuple[Point, ...]:
    """Shapes that nobody chose, with numbers for names: sequences of any length, as likely of 30 to 60 tokens as of 3k to 6k,
    any number of them, in half of the shapes packed, of log-normal lengths with that mean; forward, or `backward` alone."""
    rng, found = random.Random(seed), []
    for i in range(number):
        length = round(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
        batch = round((TOKENS // length) ** rng.random())
        heads, dims, mask = rng.choice(HEADS), rng.choice(DIMS), rng.choice(DRAWN_MASKS)
        packed = lengths_like(length, batch, seed=i) if rng.random() < 0.5 else None
        longest = length if packed is None else max(packed)
        name = f"shape {i + 1} of seed {seed}"
        found.append(Point(batch, longest, *heads, *dims, "bf16", mask, bool(backward), name, packed=packed))
    return tuple(found)


def source_of(model: str) -> str:
    """Where the numbers of a model's shape are published."""
    return next((shape.source for shape in FORWARD if shape.point.model == model), "drawn at random")
