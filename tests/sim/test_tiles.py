"""Masks cost on boundary tiles only: which blocks the Hopper forward loads, works on and masks, counted in the simulator."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from problems import Case, describe, tensors

import strobe
from strobe.kernels.gluon import gluon
from strobe.kernels.sm90 import forward, scores
from strobe.kernels.sm90.config import Config
from strobe.masks import Mask, TileClass, kv_full
from strobe.sim.attention import simulate_forward
from strobe.sim.lift import _registered, lift

TILE_KV = 64
# As many stages as let a group pass over all blocks that it does not see.
CONFIGS = [Config(64, 64, groups, TILE_KV, 8, q_stages) for groups, q_stages in ((2, 2), (2, 1), (3, 1))]
MASKS = {
    "full": strobe.Full(),
    "causal": strobe.Causal(),
    "window": strobe.Window(150, 20),
    "narrow": strobe.Window(37, 11),
    "one key": strobe.Window(0, 0),
    "causal window": strobe.Causal() & strobe.Window(200),
    "prefix": strobe.Prefix(141),
    "window and prefix": strobe.Window(90, 60) & strobe.Prefix(70),
}
SIZES = [(128, 64), (300, 300), (77, 333), (333, 130), (500, 90), (1, 200), (200, 1)]


class Counted:
    """What the kernel did. tiles: in the order of the loads, (first rows of the groups, blocks of K, blocks of V). worked: for
    each block that a group worked on, (position of the group's first row, block). masked: those of them that it masked."""

    def __init__(self, monkeypatch):
        self.tiles: list[tuple[list[int], list[int], list[int]]] = []
        self.worked: list[tuple[int, int]] = []
        self.masked: list[tuple[int, int]] = []
        self._instead(monkeypatch, forward.copy_in, self._copy)
        self._instead(monkeypatch, forward.masked_scores, self._work)
        self._instead(monkeypatch, scores.apply_mask, self._mask)

    def _instead(self, monkeypatch, function, note):
        """Whatever calls the function tells `note` of it first."""
        again = gluon.jit(function.fn)
        monkeypatch.setitem(_registered, id(function), (function, lambda *x: note(*x) or lift(again)(*x)))

    def _copy(self, descriptors, _chunks, _barrier, _start, _n, _batch, _head, row):
        name, row = descriptors[0].name[0], int(row)
        if name == "k" and (not self.tiles or len(self.tiles[-1][1]) == len(self.tiles[-1][2])):
            self.tiles.append(([], [], []))  # K leads, V comes last
        self.tiles[-1]["qkv".index(name)].append(row if name == "q" else row // TILE_KV)

    def _work(self, K, _s, i, _documents, tile):
        if tile.go:
            self.worked.append((int(tile.p) if K.MASKED else None, int(i)))

    def _mask(self, _s, i, tile, *_others):
        if tile.go:
            self.masked.append((int(tile.p), int(i)))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("n_q, n_kv", SIZES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_blocks(mask, n_q, n_kv, config, monkeypatch):
    t = tensors(Case(n_q, n_kv, 1, 1, 1, head_dim=64), torch.float16)
    counted = Counted(monkeypatch)
    simulate_forward(*describe(replace(t, keywords={"mask": mask, "score": None})), "sm90", config, "random", 0)
    mask = mask.within(n_q, n_kv)
    expected = Expected(mask, n_q, n_kv, config)
    assert [(rows[0], sorted(k)) for rows, k, _ in counted.tiles] == expected.loads
    assert all(k == v for _, k, v in counted.tiles)
    if mask == strobe.Full() and n_kv % TILE_KV == 0:
        assert not counted.masked and len(counted.worked) == expected.pairs
    else:
        exist = {p for p, _ in counted.worked if p < n_kv}  # a tile may have groups beyond the last row
        assert sorted(pair for pair in counted.worked if pair[0] in exist) == sorted(expected.worked)
        assert sorted(pair for pair in counted.masked if pair[0] in exist) == sorted(expected.masked)


class Expected:
    """The same, by the mask's own arithmetic on the host."""

    def __init__(self, mask: Mask, n_q: int, n_kv: int, config: Config):
        self._mask, self._n_q, self._n_kv = mask, n_q, n_kv
        blocks = range(-(-n_kv // TILE_KV))
        self.loads, self.worked, self.masked, self.pairs = [], [], [], 0
        for row in reversed(range(0, n_q, config.tile_q)):
            last = min(row + config.tile_q, n_q) - 1
            kinds = {block: self._kind(row, last, block) for block in blocks}
            seen = [block for block in blocks if kinds[block] is not TileClass.EMPTY]
            if not seen:
                continue
            self.loads.append((row, seen))
            self.pairs += config.groups * len(seen)
            lead = self._lead(seen, kinds, row, last)
            for first in range(row, last + 1, 64):
                own = [b for b in seen if b == lead or self._kind(first, first + 63, b) is not TileClass.EMPTY]
                here = [(first + n_kv - n_q, block) for block in range(own[0], own[-1] + 1)]
                self.worked += here
                self.masked += [(p, block) for p, block in here if kinds[block] is TileClass.PARTIAL]

    def _kind(self, row: int, last: int, block: int) -> TileClass:
        """A block that crosses the end of the keys is never full."""
        key = block * TILE_KV
        return self._mask.tile_class(row, last, key, key + TILE_KV - 1, self._n_q, self._n_kv)

    def _lead(self, seen: list[int], kinds: dict[int, TileClass], row: int, last: int) -> int:
        """The first full block; without one the one in which the keys end that all rows see."""
        full = [block for block in seen if kinds[block] is TileClass.FULL]
        shift = self._n_kv - self._n_q
        end = kv_full(row + shift, last + shift, self._n_kv, *self._mask.band)[1] // TILE_KV
        return full[0] if full else min(max(end, seen[0]), seen[-1])


def test_a_packed_batch_loads_what_its_sequences_see(monkeypatch):
    """Sequences of 0 to 300 rows and 0 to 400 keys: tiles beyond the end of theirs, or that see no key, load nothing."""
    lengths = [(300, 400), (0, 100), (65, 64), (200, 0), (200, 70)]
    starts_q, starts_kv = ([sum(n[i] for n in lengths[:b]) for b in range(len(lengths) + 1)] for i in (0, 1))
    q, k = (torch.randn(starts[-1], 1, 64).to(torch.float16) for starts in (starts_q, starts_kv))
    keywords = {
        "cu_seqlens_q": torch.tensor(starts_q, dtype=torch.int32), "cu_seqlens_kv": torch.tensor(starts_kv, dtype=torch.int32),
        "max_seqlen_q": 300, "max_seqlen_kv": 400, "mask": strobe.Causal(), "score": None,
    }  # fmt: skip
    counted = Counted(monkeypatch)
    simulate_forward(*describe(SimpleNamespace(q=q, k=k, v=k, keywords=keywords)), "sm90", CONFIGS[0], "random", 0)
    expected = [load for n_q, n_kv in lengths for load in Expected(strobe.Causal(), n_q, n_kv, CONFIGS[0]).loads]
    assert sorted((rows[0], sorted(k)) for rows, k, _ in counted.tiles) == sorted(expected)
