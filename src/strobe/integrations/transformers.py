"""transformers: any model that uses its attention interface runs on Strobe with `attn_implementation="strobe"`.

A model asks twice. Once per forward pass its mask is made: transformers hands over the mask as nested Python functions
of (batch, head, query, key), and `_model_mask` reads from them which `strobe.Mask` they mean. Then each layer calls
`_attention` with that mask. Padding and chunks become document numbers: a padded key belongs to no query's document. What
no `strobe.Mask` means becomes a bias for every pair, of 0 and -inf.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from strobe.api import attention
from strobe.masks import Causal, Document, Documents, Full, Mask, Window, visible
from strobe.scores import Score
from strobe.serving.api import decode
from strobe.serving.cache import Cache

log = logging.getLogger("strobe")

_WAY_OUT = 'load the model with attn_implementation="eager"'

_NO_CACHE = "use_cache=False, so that position_ids say where they begin"

_REFUSED = {
    "output_attentions": "attention weights are never in memory",
    "head_mask": "heads are not masked",
    "layer_head_mask": "heads are not masked",
    "cache": "paged caches are not read",
    "block_table": "paged caches are not read",
    "indices": "keys are not chosen one by one",
    "block_indices": "blocks of keys are not chosen one by one",
    "sinks": "a sink is one number for each head (s_aux), not one for each query",
}
"""Arguments that models are known to pass and that change the result, with what Strobe does not do."""

_HARMLESS = frozenset(
    {
        *("cache_position", "is_cross_attention", "labels", "layer_idx", "logits_to_keep", "mm_token_type_ids"),
        *("num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values"),
        *("position_embeddings", "return_dict", "seq_idx", "shift_labels", "token_type_ids", "use_cache"),
    }
)
"""Arguments of models and losses that reach attention as well and say nothing that it needs: position_ids restart where seq_idx
changes."""


_NO_DOCUMENT = -1 << 30
"""The number of a key that no query sees."""


def register(name: str = "strobe") -> None:
    """Make `attn_implementation=name` run on Strobe, in `from_pretrained`, `from_config` and `set_attn_implementation`.

    docs/transformers.md lists what is honoured. What Strobe cannot do raises a ValueError when the model runs; a model that
    does not use the attention interface is found by `check`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _model_mask)


def check(model) -> list[str]:
    """Names of the model's attention classes that compute attention on their own, so that they do not run on Strobe.

    model: a model, or a config, of which an empty model is made on the meta device, without weights.

    Raises:
        ValueError: no attention of the model runs on Strobe.
    """
    from transformers import AutoModel, PretrainedConfig

    if isinstance(model, PretrainedConfig):
        with torch.device("meta"):
            model = AutoModel.from_config(copy.deepcopy(model), attn_implementation="eager")
    classes = {type(module) for module in model.modules() if _is_attention(module)}
    others = sorted(cls.__name__ for cls in classes if not _uses_interface(cls))
    if classes and len(others) == len(classes):
        raise ValueError(
            f"{model.config.model_type} computes attention without transformers' attention interface, in {', '.join(others)}, "
            f"so it does not run on strobe: {_WAY_OUT}"
        )
    return others


def _is_attention(module: torch.nn.Module) -> bool:
    """Whether a module computes attention itself: it is called so, and nothing in it is."""
    return "Attention" in type(module).__name__ and not any("Attention" in type(x).__name__ for x in list(module.modules())[1:])


def _uses_interface(cls: type[torch.nn.Module]) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(cls.forward).__code__.co_names


class NotATensorError(ValueError, AttributeError):
    """A model reads the mask that it should hand on."""

    def __init__(self, model: str):
        super().__init__(
            f"{model} reads the attention mask itself instead of leaving it to transformers' attention interface, so it does "
            f"not run on strobe: {_WAY_OUT}"
        )


# ---- what a forward pass's layers are given


@dataclass(frozen=True, eq=False)
class ModelMask:
    """What layers get as `attention_mask`: the mask of n_q queries among the first `keys` of n_kv keys.

    keys < n_kv where a static cache is longer than the positions written so far. A model that takes it for a tensor does not
    use the attention interface, and is told so.
    """

    mask: Mask
    n_q: int
    n_kv: int
    keys: int
    model: str = "the model"
    """The model's model_type, for messages."""
    documents_of: frozenset[str] = frozenset()
    """What the mask's documents keep apart: "padding", "packed" sequences, "chunks"."""
    may_be_packed: bool = False
    """Nobody looked yet whether position_ids restart."""
    _packed: list[Mask] = field(default_factory=list)
    """What `packed_by` found: one look serves all layers."""
    _leftpad: list[torch.Tensor] = field(default_factory=list)
    """What `leftpad` found."""

    ndim: ClassVar[int] = 4
    """transformers takes what has four dimensions for a mask that is ready, and passes it on as it is."""

    def contiguous(self) -> ModelMask:
        """generate() asks this of every mask."""
        return self

    def packed_by(self, position_ids: torch.Tensor | None, batch: int) -> Mask:
        """The mask, with a document for each sequence where position_ids [batch or 1, n_q] restart or jump.

        transformers looks at position_ids itself, but only without a cache, and models make one unless they are told not to.
        """
        if not self.may_be_packed or position_ids is None or position_ids.shape[1:] != (self.n_q,):
            return self.mask
        if _cannot_wait(position_ids):
            return self.mask
        if not self._packed:
            starts = torch.diff(position_ids, dim=1) != 1
            packed = bool(starts.any())
            if packed and "chunks" in self.documents_of:
                raise ValueError(f"chunks of packed sequences need {_NO_CACHE}")
            numbers = torch.nn.functional.pad(starts.cumsum(1), (1, 0)).expand(batch, -1)
            self._packed.append(self.mask & Document(numbers) if packed else self.mask)
        return self._packed[0]

    def leftpad(self) -> torch.Tensor | None:
        """The first key of each sequence that is no padding, int32 [batch], where all padding is on the left; None where there
        is none."""
        if self.mask.documents is None:
            return None
        if self.documents_of != {"padding"} or self.mask.function is not None:
            raise ValueError("packed sequences and chunks are not taken over a PagedCache: leave past_key_values out")
        if not self._leftpad:
            hidden = self.mask.documents.kv == _NO_DOCUMENT
            if not _cannot_wait(hidden) and bool((hidden[:, 1:] & ~hidden[:, :-1]).any()):
                raise ValueError("padding on the right is not taken over a PagedCache: pad on the left (padding_side)")
            self._leftpad.append(hidden.sum(1, dtype=torch.int32))
        return self._leftpad[0]

    def __getattr__(self, name: str):
        raise NotATensorError(self.model)

    def _is_no_tensor(self, *_):
        raise NotATensorError(self.model)

    __getitem__ = __invert__ = __rsub__ = _is_no_tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        masks = (x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        raise NotATensorError(next(masks, cls).model)


def _attention(
    module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, is_causal=None, sliding_window=None, softcap=None,
    s_aux=None, position_bias=None, position_ids=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None,
    max_length_k=None, deterministic=None, **others,
):  # fmt: skip
    """transformers' attention function: q, k, v [batch, heads, length, D] -> (out [batch, length, heads, D], None)."""
    _check_others(others)
    paged = getattr(key, "strobe_cache", None)
    if paged is not None:
        refused = dict(dropout=dropout, position_bias=position_bias, cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        cache, length = paged
        mask, cache = _mask_over_pages(query, cache, length, attention_mask, causal, sliding_window, refused)
        score = _score(softcap, None, s_aux)
        return decode(_operand(query), cache, mask=mask, score=score, scale=scaling, deterministic=bool(deterministic)), None
    bias, packed = None, cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if isinstance(attention_mask, ModelMask):
        _check_lengths(attention_mask, query, key)
        mask = _packed_mask(attention_mask) if packed else attention_mask.packed_by(position_ids, query.shape[0])
        mask = _on_device(mask, query.device)
        if attention_mask.keys < attention_mask.n_kv:
            key, value = key[:, :, : attention_mask.keys], value[:, :, : attention_mask.keys]
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _implied_mask(causal, sliding_window, query.shape[2], key.shape[2])
    else:
        mask, bias = Full(), _bias_of_mask(attention_mask, query, key)
    if position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]]
        bias = position_bias if bias is None else bias + position_bias
    q, k, v = (_operand(x) for x in (query, key, value))
    if bias is not None and bias.dtype != torch.float32:
        bias = bias.to(q.dtype)
    options: dict[str, Any] = dict(
        mask=mask, score=_score(softcap, bias, s_aux), dropout_p=dropout,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, deterministic=bool(deterministic),
    )  # fmt: skip
    if max(query.shape[-1], value.shape[-1]) > 256:
        raise ValueError(f"strobe attention takes head dims up to 256, got {query.shape[-1]} and {value.shape[-1]}: {_WAY_OUT}")
    if packed:
        if bias is not None:
            raise ValueError("cu_seq_lens_q goes without a 4-D attention_mask and a position_bias")
        options |= _packed_options(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out: Any = attention(q, k, v, **options)
    if packed:
        out = out.view(query.shape[0], query.shape[2], *out.shape[-2:])
    return out if out.shape[-1] == value.shape[-1] else out[..., : value.shape[-1]], None


def _score(softcap: float | None, bias: torch.Tensor | None, sinks: torch.Tensor | None) -> Score | None:
    """None is the plain score, of which each layer would make and check one."""
    return Score(softcap=softcap or 0.0, bias=bias, sinks=sinks) if softcap or bias is not None or sinks is not None else None


def _mask_over_pages(
    query, cache: Cache, length: int, attention_mask, causal: bool, sliding_window: int | None, refused: dict[str, Any]
) -> tuple[Mask, Cache]:
    """The mask of queries over a `PagedCache` with `length` keys, padding included, and the cache that knows its padding.
    refused: arguments that must not be given."""
    for name, value in refused.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise ValueError(f"{name} is not taken over a PagedCache: leave past_key_values out")
    if attention_mask is None:
        return _implied_mask(causal, sliding_window, query.shape[2], length), cache
    if not isinstance(attention_mask, ModelMask):
        raise ValueError("a mask of every pair is not taken over a PagedCache: leave past_key_values out")
    made_for, given = (attention_mask.n_q, attention_mask.keys), (query.shape[2], length)
    if made_for != given:
        raise ValueError(f"attention_mask was made for {made_for} queries and keys, but this layer has {given}")
    leftpad, mask = attention_mask.leftpad(), attention_mask.mask
    if leftpad is not None:
        cache, mask = replace(cache, leftpad=leftpad.to(query.device)), replace(mask, documents=None)
    return mask, cache


def _check_others(others: dict[str, Any]) -> None:
    """Refuse what changes the result, and say once of what is unknown that it is ignored."""
    for name, value in others.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        if name in _REFUSED:
            raise ValueError(f"{name} is not supported by strobe attention, in which {_REFUSED[name]}: {_WAY_OUT}")
        _log_ignored(name)


@functools.cache
def _log_ignored(name: str) -> None:
    log.warning("strobe attention ignores the argument %s, which it does not know", name)


def _check_lengths(model_mask: ModelMask, query: torch.Tensor, key: torch.Tensor) -> None:
    made_for, given = (model_mask.n_q, model_mask.n_kv), (query.shape[2], key.shape[2])
    if made_for != given:
        raise ValueError(f"attention_mask was made for {made_for} queries and keys, but this layer has {given}")


def _packed_mask(model_mask: ModelMask) -> Mask:
    """The mask within sequences that cu_seq_lens keep apart, so that those found in position_ids are not needed."""
    if "padding" in model_mask.documents_of:
        raise ValueError("cu_seq_lens_q goes without padding, but attention_mask has some: leave attention_mask out")
    if "chunks" in model_mask.documents_of:
        raise ValueError(f"chunks of packed sequences need {_NO_CACHE}, without cu_seq_lens_q")
    return replace(model_mask.mask, documents=None)


def _packed_options(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k) -> dict[str, Any]:
    """transformers' arguments in Strobe's terms. ValueError if the bounds of queries or keys are missing."""
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k go together, got one of them")
    return dict(
        cu_seqlens_q=cu_seq_lens_q.to(torch.int32), cu_seqlens_kv=cu_seq_lens_k.to(torch.int32),
        max_seqlen_q=None if max_length_q is None else int(max_length_q),
        max_seqlen_kv=None if max_length_k is None else int(max_length_k),
    )  # fmt: skip


def _on_device(mask: Mask, device: torch.device) -> Mask:
    """The mask for a layer that may be on another device than the one that the mask was made on."""
    documents = mask.documents
    if documents is None or documents.q.device == device:
        return mask
    return replace(mask, documents=Documents(documents.q.to(device), documents.kv.to(device)))


def _bias_of_mask(attention_mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask of every pair, [batch or 1, heads or 1, n_q or 1, n_kv], as a bias: bool, True where visible, or floating point,
    added to the scores, whose least number means that a pair is hidden."""
    wanted, shape = [*query.shape[:3], key.shape[2]], list(attention_mask.shape)
    if len(shape) != 4 or any(n not in (1, full) for n, full in zip(shape, wanted, strict=True)):
        raise ValueError(f"attention_mask must have shape [batch, length], or {wanted}, any of which may be 1, got {shape}")
    if attention_mask.dtype == torch.bool:
        hidden, bias = ~attention_mask, torch.zeros_like(attention_mask, dtype=query.dtype)
    elif attention_mask.dtype.is_floating_point:
        hidden, bias = attention_mask <= torch.finfo(attention_mask.dtype).min / 2, attention_mask
    else:
        raise ValueError(f"a 4-D attention_mask must be bool or floating point, got {attention_mask.dtype}")
    return bias.masked_fill(hidden, -torch.inf)


def _operand(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, D] -> [batch, length, heads, D], with D filled with zeros to a multiple of 8."""
    if x.shape[-1] % 8:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)


def _implied_mask(causal: bool, sliding_window: int | None, n_q: int, n_kv: int) -> Mask:
    """The mask of a layer whose model made none."""
    if not causal:
        if sliding_window is not None:
            raise ValueError(f"sliding_window={sliding_window} without a causal mask needs an attention_mask, got None")
        return Full()
    if n_q not in (1, n_kv):
        raise ValueError(f"attention_mask is None for {n_q} causal queries and {n_kv} keys: where the queries stand is unknown")
    window = Full() if sliding_window is None else Window(left=sliding_window - 1)
    return (window & Causal()).within(n_q, n_kv)


# ---- a forward pass's mask


@torch.compiler.disable  # it reads closures: one graph break, before the layers
def _model_mask(**options) -> ModelMask | torch.Tensor:
    """transformers' mask function, called once per forward pass: the mask that its mask_function means, or if no Mask means it,
    bool [batch, 1 or heads, n_q, n_kv]."""
    if isinstance(options.get("attention_mask"), ModelMask):
        return options["attention_mask"]
    try:
        meaning = _translate(options["mask_function"])
    except NotImplementedError as unknown:
        from transformers import AttentionMaskInterface

        _log_dense(str(unknown))
        skips = dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return AttentionMaskInterface()["sdpa"](**options | skips)
    return _made_mask(meaning, **options)


@functools.cache
def _log_dense(name: str) -> None:
    log.warning("no strobe mask means %s: it takes memory for every pair of query and key", name)


@dataclass(frozen=True)
class _Meaning:
    """What a mask function means: a band, numbers of packed sequences [batch, n], and chunks (size, first position [batch],
    positions [batch, n] or None where they count from the first query or key on); or that no query sees any key."""

    band: Mask = field(default_factory=Full)
    packed: torch.Tensor | None = None
    chunks: tuple[int, torch.Tensor, torch.Tensor | None] | None = None
    nothing: bool = False


def _translate(function: Callable) -> _Meaning:
    """NotImplementedError, with the function's name, if a part of it is none of those below."""
    meaning = _Meaning()
    for name, bound, positions in _parts(function):
        if name == "packed_sequence_mask_function":
            meaning = replace(meaning, packed=bound["packed_sequence_mask"])
        elif name == "chunked_overlay":
            meaning = replace(meaning, chunks=(bound["chunk_size"], bound["left_padding"], positions))
        elif name == "sliding_window_overlay" and bound["sliding_window"] < 1:
            meaning = replace(meaning, nothing=True)  # Qwen2-MoE makes such a mask where no layer has a window
        else:
            meaning = replace(meaning, band=meaning.band & _band(name, bound))
    return meaning


def _parts(function: Callable, positions: torch.Tensor | None = None) -> Iterator[tuple[str, dict, torch.Tensor | None]]:
    """(name, what it binds, the positions that it is given instead of indices) of every function in a conjunction."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    names = code.co_freevars if code is not None else ()
    bound = dict(zip(names, (cell.cell_contents for cell in cells), strict=True))
    name = getattr(function, "__qualname__", type(function).__name__).partition(".<locals>")[0]
    if name == "and_masks":
        for one in bound["mask_functions"]:
            yield from _parts(one, positions)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(bound["mask_function"], bound["position_ids"])
    elif name == "or_masks":
        yield f"or_masks({', '.join(getattr(x, '__qualname__', str(x)) for x in bound['mask_functions'])})", bound, positions
    else:
        yield name, bound, positions


def _band(name: str, bound: dict) -> Mask:
    """Within one packed sequence positions differ by as much as indices do, so a band is the same of both."""
    if name == "causal_mask_function":
        return Causal()
    if name == "bidirectional_mask_function":
        return Full()
    if name == "sliding_window_overlay":
        return Window(left=bound["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":
        return Window(left=bound["sliding_window"], right=bound["sliding_window"])
    raise NotImplementedError(name)


def _made_mask(
    meaning: _Meaning, *, batch_size, kv_length, q_length=None, q_offset=0, kv_offset=0, attention_mask=None, device=None,
    cache_position=None, config=None, **_,
) -> ModelMask:  # fmt: skip
    """Queries stand at positions q_offset .. q_offset + q_length - 1 (up to transformers 4: cache_position), keys at
    kv_offset .. kv_offset + kv_length - 1. attention_mask: bool [batch, positions], False where there is padding.
    """
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    band, keys = meaning.band, kv_length
    seen = _real_keys(attention_mask, kv_offset, kv_length)
    if meaning.nothing:
        seen = torch.zeros(batch_size, kv_length, dtype=torch.bool, device=device)
    if band.left is None and band.right is None:
        pass  # without a band it does not matter where queries stand
    elif q_length == 1 and _on_gpu_only(q_offset):
        # A static cache while decoding: what the one query sees is computed where its position is known.
        in_band = visible(q_offset - kv_offset, torch.arange(kv_length, device=device), kv_length, *band.band)
        band, seen = Full(), in_band.expand(batch_size, -1) if seen is None else seen & in_band
    else:
        keys = _keys_in_reach(band, int(q_offset) + q_length - kv_offset, kv_length)
        seen = seen if seen is None else seen[:, :keys]
    if seen is not None and band is meaning.band and not _holds_padding(seen):
        seen = None
    numbers = _numbers(meaning, batch_size, q_length, keys, q_offset, kv_offset, device)
    mask = band.within(q_length, keys)
    if numbers is not None or seen is not None:
        q, kv = numbers or (torch.zeros(batch_size, n, dtype=torch.int32, device=device) for n in (q_length, keys))
        mask = mask & Document(q, kv if seen is None else kv.masked_fill(~seen, _NO_DOCUMENT))
    chunks = meaning.chunks is not None and numbers is not None
    kinds = {"padding": seen is not None, "packed": meaning.packed is not None, "chunks": chunks}
    return ModelMask(
        mask, q_length, kv_length, keys,
        model=getattr(config, "model_type", None) or ModelMask.model,
        documents_of=frozenset(kind for kind, there in kinds.items() if there),
        may_be_packed=attention_mask is None and meaning.packed is None and band.right == 0 and 1 < q_length == keys,
    )  # fmt: skip


def _real_keys(attention_mask, kv_offset: int, kv_length: int) -> torch.Tensor | None:
    """bool [batch, kv_length], True where a key is no padding; positions past the end of attention_mask hold none."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must have shape [batch, length], got {list(attention_mask.shape)}")
    missing = max(0, kv_offset + kv_length - attention_mask.shape[1])
    real = torch.nn.functional.pad(attention_mask, (0, missing)) if missing else attention_mask
    return real[:, kv_offset : kv_offset + kv_length]


def _on_gpu_only(q_offset) -> bool:
    """Whether reading the offset would wait for the GPU."""
    return isinstance(q_offset, torch.Tensor) and q_offset.device.type != "cpu"


def _keys_in_reach(mask: Mask, end: int, n_kv: int) -> int:
    """How many keys to keep so that the last query stands on the last key; it stands on key `end` - 1 of n_kv."""
    if end == n_kv or (end < n_kv and mask.right == 0):
        return end
    raise ValueError(f"the mask {mask} puts the last query on key {end - 1} of {n_kv}: strobe aligns it with the last key")


def _holds_padding(real: torch.Tensor) -> bool:
    """Whether some key is padding: without, a faster kernel may run.

    On a GPU this waits for it, once per forward pass, as transformers' own mask functions do; attention_mask=None spares it.
    Where nothing can be waited for, padding is assumed.
    """
    return _cannot_wait(real) or not bool(real.all())


def _cannot_wait(x: torch.Tensor) -> bool:
    """Whether x cannot be read: it is traced by a compiler, or a CUDA graph is captured."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _numbers(meaning: _Meaning, batch: int, n_q: int, keys: int, q_offset, kv_offset: int, device):
    """Document numbers of queries [batch, n_q] and of keys [batch, keys], or None: sequences, chunks, or both."""
    packed = None if meaning.packed is None else meaning.packed.expand(batch, -1)
    if meaning.chunks is None:
        return None if packed is None else (packed, packed)
    size, first, positions = meaning.chunks
    if packed is not None and positions is not None:
        chunks = (positions - first[:, None]) // size
        starts = (torch.diff(packed, dim=1) != 0) | (torch.diff(chunks, dim=1) != 0)
        numbers = torch.nn.functional.pad(starts.cumsum(1), (1, 0))
        return numbers, numbers
    if kv_offset + keys <= size:
        return None  # all that is no padding is in one chunk
    places = (offset + torch.arange(n, device=device) for offset, n in ((q_offset, n_q), (kv_offset, keys)))
    q, kv = ((x - first[:, None]) // size for x in places)
    return q, kv
