"""DTensor: attention of tensors that are sharded along the batch or the heads, each device on its own part.

PyTorch's interface for this is experimental and imports its distributed package, so it is asked for:

    strobe.integrations.dtensor.register()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strobe.call.operators import of_backward
from strobe.call.options import NAMES, Options
from strobe.problem import LEARNED, OPTIONAL

_BATCH_OF = {"seqused_q": 0, "seqused_kv": 0, "document_q": 0, "document_kv": 0, "bias": 0}
"""Tensor of the options -> the dim that is the batch; a bias may have 1 there."""

_HEADS_OF = {"bias": 1, "sinks": 0}
"""Tensor of the options -> the dim that is the heads of queries; a bias may have 1 there."""


def register() -> None:
    """Tell DTensor how `strobe.attention` and its backward are sharded: dense q, k, v along the batch (dim 0) or the heads
    (dim 2), with the bias, sinks, ALiBi slopes, documents and used lengths that belong to a part.

    What else is sharded (sequences, packed rows, head dims, key heads that the devices do not divide) is gathered first; so is
    everything with dropout, a function of pairs or blocks, for these count batch entries and heads from 0."""
    from torch.distributed.tensor.experimental import register_sharding

    for forward in (torch.ops.strobe.forward, torch.ops.strobe.forward_band):
        register_sharding(forward.default)(_forward)
    for backward in (torch.ops.strobe.backward, torch.ops.strobe.backward_band):
        register_sharding(backward.default)(_backward)


def _forward(q, k, v, *options) -> list[tuple[list, list]]:
    """Pairs of the placements of (out, lse) and of all arguments, None for one that is no tensor."""
    found = []
    for qkv, lse, of_options, _ in _ways(k, Options(*options)):
        found.append(([qkv, lse], [qkv, qkv, qkv, *of_options[: len(options)]]))
    return found


def _backward(dout, dlse, q, k, v, out, lse, *arguments) -> list[tuple[list, list]]:
    """Pairs of the placements of the gradients (of q, k, v, and of bias and sinks) and of all arguments."""
    options, learned = of_backward(arguments)
    found = []
    for qkv, of_lse, of_options, of_learned in _ways(k, Options(*options), learned):
        inputs = [qkv, None if dlse is None else of_lse, qkv, qkv, qkv, qkv, of_lse, *of_options[: len(options)]]
        inputs += [None] * (len(arguments) - len(options))
        found.append(([qkv, qkv, qkv, *of_learned], inputs))
    return found


def _ways(k, options: Options, learned: Sequence[str] = ()):
    """Ways to shard a call: the placements of q, k, v and out, of the LSE, of each option, and of gradients of `LEARNED`."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    everywhere = [Replicate() if name in OPTIONAL and getattr(options, name) is not None else None for name in NAMES]
    yield Replicate(), Replicate(), everywhere, [Replicate() for _ in LEARNED]
    if options.cu_seqlens_q is not None or options.dropout or options.mask_function or options.score_function:
        return
    if options.block_kinds is not None:
        return
    alibi = options.alibi
    groups_stay = k.shape[2] % k.mesh.size() == 0  # else a part would not have the key heads of its query heads
    for dim, of_lse, places in ((0, 0, _BATCH_OF), (2, 1, _HEADS_OF)):
        if dim == 2 and not groups_stay:
            continue
        if alibi is not None and (dim == 2 or alibi.ndim == 2):
            places = places | {"alibi": alibi.ndim - 1 if dim == 2 else 0}
        cut = {
            name: Shard(place)
            for name, place in places.items()
            if getattr(options, name) is not None and (name != "bias" or options.bias.shape[place] != 1)  # type: ignore[union-attr]
        }
        of_options = [cut.get(name, whole) for name, whole in zip(NAMES, everywhere, strict=True)]
        of_learned = [cut.get(name, Partial()) if name in learned else Replicate() for name in LEARNED]
        yield Shard(dim), Shard(of_lse), of_options, of_learned
