"""What vLLM 0.32 asks of an attention backend, as its own selector, layers and model runner ask it: names, signatures,
and which methods must be there. Nothing of how it works."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class MultipleOf(NamedTuple):
    base: int


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
    ):
        return None

    @classmethod
    def validate_configuration(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
        use_per_head_quant_scales, device_capability, attn_type, has_sliding_window=False, use_non_causal=False,
        use_batch_invariant=False, **others,
    ):  # fmt: skip
        """The reasons why this backend does not do."""
        sizes = [size.base if isinstance(size, MultipleOf) else size for size in cls.get_supported_kernel_block_sizes()]
        combined = cls.supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
        )
        checks = {
            "head_size": cls.supports_head_size(head_size),
            "dtype": dtype in cls.supported_dtypes,
            "kv_cache_dtype": kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes,
            "block_size": block_size is None or any(block_size % size == 0 for size in sizes),
            "partial multimodal": not use_mm_prefix,
            "MLA": not use_mla,
            "sparse": not use_sparse,
            "sinks": not has_sink or cls.supports_sink(),
            "per-head": not use_per_head_quant_scales,
            "compute capability": cls.supports_compute_capability(device_capability),
            "attention type": cls.supports_attn_type(attn_type),
            "sliding window": not has_sliding_window or cls.supports_sliding_window(),
            "non-causal": not use_non_causal,
            "batch invariance": not use_batch_invariant or cls.supports_batch_invariance(),
        }
        reasons = [f"{name} not supported" for name, fits in checks.items() if not fits]
        return reasons + ([combined] if combined else [])


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImplBase(ABC, Generic[T]):
    supports_quant_query_input = False

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)


class AttentionImpl(AttentionImplBase[T], Generic[T]):
    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
        logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...
