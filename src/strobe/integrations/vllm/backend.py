"""The classes that vLLM 0.32 asks of an attention backend: what it takes, what a batch's layers share, a layer's attention.

A step's batch holds the newest tokens of all requests, packed. Their keys are in pages, [pages, heads, keys of a page, 2 D], K
beside V, so both are views with strides. `strobe.flash_attn_varlen_func` reads them through the block table. A batch of prompts
alone, of which nothing is in the cache yet, goes to the kernels of ordinary attention instead, which are made for many queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm.envs as envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from strobe.api import attention, flash_attn_varlen_func
from strobe.flash_arguments import NO_WINDOW, flash_mask, flash_score
from strobe.integrations.vllm import NAME

_OF_8_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""vLLM's names of caches of 8 bits."""

_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class StrobeBackend(AttentionBackend):
    """What Strobe takes of vLLM's attention: decoders, encoders and what crosses between them, without latents (MLA)."""

    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *_OF_8_BITS]  # type: ignore[list-item]  # noqa: RUF012
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[StrobeImpl]:
        return StrobeImpl

    @staticmethod
    def get_builder_cls() -> type[StrobeMetadataBuilder]:
        return StrobeMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability >= (8, 0)

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
    ) -> str | None:
        """The reason why a combination is refused of what is taken one by one."""
        if _OF_8_BITS.get(kv_cache_dtype) == torch.float8_e4m3fn and device_capability < (8, 9):
            return "strobe reads a cache of float8_e4m3fn from compute capability 8.9 on"
        return None

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_WITHOUT_CACHE)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class StrobeMetadata:
    """What the layers of a step share. n_tokens: rows of the batch without its padding. prompts: whether no request has keys in
    the cache from before."""

    n_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    prompts: bool


class StrobeMetadataBuilder(AttentionMetadataBuilder[StrobeMetadata]):
    """Makes a step's StrobeMetadata; nothing waits for the device, and a graph that was captured is replayed with other lengths
    and pages."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH  # a launch looks at no more queries than those it was captured with
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata, fast_build: bool = False) -> StrobeMetadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                "strobe takes no causal flag of its own for each request: choose another attention backend"
            )
        return StrobeMetadata(
            common.num_actual_tokens, common.max_query_len, common.query_start_loc, common.seq_lens, common.block_table_tensor,
            common.slot_mapping, common.causal, _of_prompts(common),
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata) -> StrobeMetadata:
        return replace(self.build(0, common_attn_metadata), prompts=False)

    def update_block_table(self, metadata: StrobeMetadata, blk_table, slot_mapping) -> StrobeMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


def _of_prompts(common) -> bool:
    """Whether each request has as many keys as queries, by the bounds of its keys that the host knows: none is cached yet."""
    most = common.seq_lens_cpu_upper_bound
    if most is None or common.max_query_len == 1 or not common.causal:
        return False
    return torch.equal(torch.diff(common.query_start_loc_cpu), most.to(common.query_start_loc_cpu.dtype))


class StrobeImpl(AttentionImpl[StrobeMetadata]):
    """The attention of one layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.softcap = logits_soft_cap or 0.0
        self.alibi = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = None if sinks is None else sinks.detach()
        self.own_keys = kv_sharing_target_layer_name is None
        self.window = NO_WINDOW
        if sliding_window is not None:
            reach = sliding_window - 1
            self.window = (reach, reach) if attn_type in _WITHOUT_CACHE else (reach, 0)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write new keys and values to their places in the pages; one whose place is negative is not written."""
        if self.attn_type in _WITHOUT_CACHE:
            return
        k_cache, v_cache = self._pages(kv_cache)
        if key.is_cuda:
            from vllm._custom_ops import reshape_and_cache_flash

            names = key, value, k_cache, v_cache, slot_mapping, self.kv_cache_dtype
            reshape_and_cache_flash(*names, layer._k_scale, layer._v_scale)
            return
        there = slot_mapping >= 0
        page, row = slot_mapping[there] // k_cache.shape[1], slot_mapping[there] % k_cache.shape[1]
        for new, cache, scale in ((key, k_cache, layer._k_scale), (value, v_cache, layer._v_scale)):
            rows = new[: len(slot_mapping)][there]
            cache[page, row] = (rows / scale if cache.dtype.itemsize == 1 else rows).to(cache.dtype)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata: StrobeMetadata | None, output: torch.Tensor,
        output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of a step's rows, written to `output`, [tokens, heads, head_size], and returned. query [tokens, heads,
        head_size], key and value [tokens, heads_kv, head_size]; rows of padding stay as they are."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("strobe writes no output of 8 bits: output_scale must be None")
        if attn_metadata is None:  # vLLM looks how much memory a step takes
            return output.fill_(0)
        n, data = attn_metadata.n_tokens, attn_metadata
        if self.alibi is not None:
            self.alibi = self.alibi.to(query.device)
        invariant = bool(envs.VLLM_BATCH_INVARIANT)
        if self.attn_type in _WITHOUT_CACHE or (data.prompts and self.own_keys and not invariant):
            output[:n].copy_(self._over_new_keys(query[:n], key[:n], value[:n], data))
            return output
        k_cache, v_cache = self._pages(kv_cache)
        scaled = k_cache.dtype.itemsize == 1
        flash_attn_varlen_func(
            query[:n], k_cache, v_cache, data.query_start_loc, None, data.max_query_len, None, block_table=data.block_table,
            seqused_k=data.seq_lens, softmax_scale=self.scale, causal=data.causal, window_size=self._window(data.causal),
            softcap=self.softcap, alibi_slopes=self.alibi, s_aux=self.sinks, out=output[:n], deterministic=invariant,
            k_descale=layer._k_scale if scaled else None, v_descale=layer._v_scale if scaled else None,
        )  # fmt: skip
        return output

    def _over_new_keys(self, query, key, value, data: StrobeMetadata) -> Any:
        """Attention of each request's rows over their own keys, which no cache holds but these tensors."""
        causal = data.causal and self.attn_type not in _WITHOUT_CACHE
        bounds, most = data.query_start_loc, data.max_query_len
        return attention(
            query, key, value, mask=flash_mask(causal, self._window(causal)),
            score=flash_score(self.softcap, self.alibi, self.sinks), scale=self.scale, cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds, max_seqlen_q=most, max_seqlen_kv=most,
        )  # fmt: skip

    def _window(self, causal: bool) -> tuple[int, int]:
        """A window reaches as far to the right as to the left where attention is not causal."""
        return self.window if causal or self.window == NO_WINDOW else (self.window[0], self.window[0])

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of K and of V, [pages, keys of a page, heads, head_size], views of [pages, heads, keys of a page, 2
        head_size]."""
        if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * self.head_size:
            wanted = f"[pages, heads, keys of a page, {2 * self.head_size}], as vLLM 0.32 has it"
            raise ValueError(f"kv_cache must have shape {wanted}, got {list(kv_cache.shape)}")
        if (dtype := _OF_8_BITS.get(self.kv_cache_dtype)) is not None and kv_cache.dtype != dtype:
            kv_cache = kv_cache.view(dtype)
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, -1)
        return k_cache, v_cache
