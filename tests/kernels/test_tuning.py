"""The choice of the Hopper forward's config: candidates, tables, the rule between measured points, what the compiler makes of
the kept ones."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from commands import run as strobe_command
from tritons import TRITONS, answer_by

import strobe
from strobe.device import KNOWN
from strobe.kernels.sm90 import config as sm90
from strobe.kernels.sm90.config import Config, candidates, choose, origin
from strobe.lab.bench.tune import flaw, keep, merged, name
from strobe.lab.binary.sass import Audit
from strobe.problem import AttentionProblem, Dense, Lengths, Varlen
from strobe.tuning.table import SCHEMA, entries, read, shipped, users

HOPPER = KNOWN["H200"]
PADDED = (64, 96, 128, 160, 192, 256)
SMALL, LARGE = "groups=2,tile_kv=128,num_stages=4", "groups=3,tile_kv=128,num_stages=4"


FULL = strobe.Full()
LONG = Dense(4, 4096, 4096)


def problem(head_dim=64, head_dim_v=None, lengths: Lengths = LONG, heads=32, mask: strobe.Mask = FULL) -> AttentionProblem:
    return AttentionProblem(lengths, heads, heads, head_dim, head_dim_v or head_dim, torch.bfloat16, 0.1, mask)


def fits(config: Config) -> bool:
    """By the GPU's own limits: shared memory with some for the compiler, registers of all warpgroups (producer's included)."""
    warpgroups = config.groups * config.consumer_registers + config.producer_registers
    return config.smem_bytes() + 512 <= HOPPER.smem_per_block and 128 * warpgroups <= HOPPER.registers_per_sm


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing of a table in memory, before and after, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("STROBE_TUNING", raising=False)
    forget()
    yield
    monkeypatch.undo()
    forget()


def forget() -> None:
    entries.cache_clear()
    sm90._ranked.cache_clear()


def point(mask: str, keys: int, small: float, large: float, length: int | None = None) -> dict:
    shape = {"mask": mask, "keys": keys, "batch": 4, "length": length or keys, "heads": 32}
    return shape | {"tflops": {SMALL: small, LARGE: large}}


def entry(*points: dict, kept=(SMALL, LARGE), head_dim: int = 64) -> dict:
    """What a table says of a head dim."""
    made = {"date": "2026-01-02T03:04:05", "device": {"name": "A GPU"}}
    return made | {"head_dim": head_dim, "head_dim_v": head_dim, "kept": list(kept), "rejected": {}, "points": points}


def table(*points: dict, **changes) -> str:
    """JSON of a table for head dim 64."""
    whole = {"schema": SCHEMA, "arch": "sm90", "head_dims": [entry(*points)]} | changes
    return json.dumps({name: value for name, value in whole.items() if value is not None})


@pytest.fixture
def tuned(fresh, monkeypatch, tmp_path):
    """tuned(*points): a user's table of these is the one that STROBE_TUNING names."""

    def set_up(*points: dict, **changes) -> None:
        path = tmp_path / "mine.json"
        path.write_text(table(*points, **changes))
        monkeypatch.setenv("STROBE_TUNING", str(path))

    return set_up


# ---- candidates


@pytest.mark.parametrize("dims", [*itertools.product(PADDED, PADDED)], ids=str)
def test_candidates_fit_and_are_few(dims):
    found = candidates(*dims)
    assert 1 <= len(found) <= 10 and len(set(found)) == len(found)
    assert all(fits(config) and (config.head_dim, config.head_dim_v) == dims for config in found)


def test_no_candidate_is_another_with_less_of_something():
    for config, other in itertools.permutations(candidates(128, 128), 2):
        if (config.groups, config.tile_kv) == (other.groups, other.tile_kv):
            amounts = [(c.num_stages, c.q_stages, c.o_buffers) for c in (config, other)]
            assert any(a > b for a, b in zip(*amounts, strict=True)), (config, other)


# ---- the shipped table


def test_every_kept_config_fits():
    shipped_entries = read(shipped("sm90"), "sm90")
    assert {(64, 64), (96, 96), (128, 128), (256, 256)} <= set(shipped_entries)
    for dims, entry in shipped_entries.items():
        assert {point.shape.mask for point in entry.points} == {"full", "causal", "window"}
        for kept in entry.kept:
            assert fits(sm90._parsed(*dims, kept))
            assert name(sm90._parsed(*dims, kept)) == kept


def test_the_shipped_table_says_how_it_was_made():
    for made in json.loads(shipped("sm90").read_text())["head_dims"]:
        assert "H200" in made["device"]["name"] and made["device"]["commit"] and made["device"]["packages"]["triton"]
        assert made["command"].startswith("strobe tune") and made["telemetry"]["sm_clock_mhz"] > 0


def test_measured_points_get_their_fastest_kept_config(fresh):
    for dims, entry in read(shipped("sm90"), "sm90").items():
        for at in entry.points:
            shape = at.shape
            mask = {"full": strobe.Full(), "causal": strobe.Causal()}.get(shape.mask) or strobe.Window(shape.keys - 1, 0)
            asked = problem(*dims, Dense(shape.sequences, shape.length, shape.length), shape.heads, mask)
            config = choose(asked)
            best = max(at.tflops[kept] for kept in entry.kept)
            assert at.tflops[name(config)] == best or (shape.keys < 256 and (config.groups, config.tile_kv) == (2, 64))


MASKS = (
    strobe.Full(),
    strobe.Causal(),
    strobe.Window(0, 0),
    strobe.Window(1023, 0),
    strobe.Window(100, None),
    strobe.Window(None, 7),
    strobe.Prefix(5) & strobe.Window(left=3),
)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_shape_has_a_config(mask):
    lengths = [2**i for i in range(0, 21, 4)]
    shapes = [Dense(batch, n_q, n_kv) for batch in (1, 7) for n_q in lengths for n_kv in (1, n_q, 2**20)]
    shapes += [Dense(0, 5, 5), Dense(2, 0, 5), Dense(2, 5, 0), Varlen(3, 1000, 5000, 600, 4000), Varlen(0, 0, 0, 0, 0)]
    for dims, shape in itertools.product(((64, 64), (128, 128), (192, 128), (64, 256)), shapes):
        config = choose(problem(*dims, shape, 3, mask))
        assert fits(config) and (config.head_dim, config.head_dim_v) == dims


def test_every_head_dim_has_a_config():
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        config = choose(problem(head_dim, head_dim_v))
        assert config.head_dim >= head_dim and config.head_dim_v >= head_dim_v and fits(config)


# ---- the rule


@pytest.mark.parametrize("length, want", [(300, 2), (700, 2), (1400, 2), (1500, 3), (100_000, 3)])
def test_the_nearest_measured_length_by_ratio_decides(tuned, length, want):
    tuned(point("full", 1024, 500, 400), point("full", 2048, 500, 600))
    assert choose(problem(lengths=Dense(100, length, length))).groups == want


def test_masks_have_their_own_measurements(tuned):
    tuned(point("full", 4096, 1, 2), point("causal", 4096, 2, 1), point("window", 1024, 1, 2, length=16384))
    masks = {
        strobe.Full(): 3,
        strobe.Causal(): 2,
        strobe.Prefix(100): 2,
        strobe.Window(100, None): 2,
        strobe.Window(1023, 0): 3,
        strobe.Window(300, 300): 3,
        strobe.Window(5, 5): 2,  # few keys take two groups whatever the table says
        strobe.Window(4096, 0): 2,  # as wide as the sequence: causal
    }
    many = Dense(100, 4096, 4096)
    assert {mask: choose(problem(lengths=many, mask=mask)).groups for mask in masks} == masks


def test_a_window_is_as_long_as_it_is_wide(tuned):
    tuned(point("window", 128, 2, 1, length=16384), point("window", 4096, 1, 2, length=16384))
    wide, narrow = (problem(lengths=Dense(1, 65536, 65536), mask=strobe.Window(width - 1, 0)) for width in (4000, 100))
    assert (choose(wide).groups, choose(narrow).groups) == (3, 2)


def test_a_grid_that_leaves_the_gpu_idle_takes_smaller_tiles(tuned):
    tuned(point("full", 4096, 500, 600))
    many, few = Dense(4, 4096, 4096), Dense(1, 384, 4096)
    assert choose(problem(lengths=many)).groups == 3
    assert choose(problem(lengths=few)).groups == 2  # 96 tiles of 128 rows on 132 multiprocessors, or 64 of 192
    packed = Varlen(4, 4 * 384, 16384, 1024, 4096)  # 384 rows on average
    assert choose(problem(lengths=packed, heads=8)).groups == 2


def test_what_is_computed_pair_by_pair_takes_two_groups_and_small_blocks():
    documents = strobe.Document(torch.zeros(4, 4096, dtype=torch.int32))
    softcap = strobe.Score(softcap=20.0)
    for dims in itertools.product(PADDED, PADDED):
        for changes in ({"score": softcap}, {"score": softcap, "mask": documents}, {"mask": strobe.Visible(_same)}):
            asked = replace(problem(*dims), **changes)
            assert (choose(asked).groups, choose(asked).tile_kv) == (2, 64)
            assert origin(asked) == "two groups and blocks of up to 64 keys, for what is compared or computed pair by pair"
        compared = problem(*dims, mask=documents)
        most = max(config.tile_kv for config in candidates(*dims) if config.groups == 2) if dims[0] <= 128 else 64
        assert (choose(compared).groups, choose(compared).tile_kv) == (2, most)


def test_few_keys_take_two_groups_and_tiles_in_a_fixed_order():
    for head_dim, mask in itertools.product((64, 40), (strobe.Full(), strobe.Causal())):
        for n_kv in (1, 77, 128):
            config = choose(problem(head_dim, lengths=Dense(8, 4096, n_kv), heads=20, mask=mask))
            assert (config.groups, config.slots, config.static) == (2, 4, True) and fits(config)
    packed = Varlen(100, 7700, 7700, 77, 77)
    others = (
        problem(64, lengths=packed), problem(64, lengths=Dense(8, 4096, 129)), problem(128, lengths=Dense(8, 4096, 77)),
        problem(96, lengths=packed), problem(64, lengths=Dense(8, 4096, 256)),
    )  # fmt: skip
    for other in others:
        config = choose(other)
        assert (config.groups, config.tile_kv, config.slots, config.static) == (2, 64, 4, False) and fits(config)
    assert choose(problem(64, lengths=Dense(8, 4096, 257))).slots == 2


def test_few_tiles_of_few_blocks_have_small_ones():
    """Where a multiprocessor walks along few keys in all."""
    window, causal = strobe.Window(255, 0), strobe.Causal()
    for asked in (
        problem(64, lengths=Dense(1, 2048, 2048), heads=32, mask=causal),
        problem(96, lengths=Dense(1, 2048, 2048), heads=32, mask=causal),
        problem(64, lengths=Dense(2, 4096, 4096), heads=16, mask=window),
        problem(96, lengths=Dense(2, 4096, 4096), heads=16, mask=window),
        problem(128, lengths=Varlen(40, 20669, 20669, 2022, 2022), heads=16, mask=window),
        problem(128, lengths=Dense(1, 2048, 2048), heads=32, mask=strobe.Causal()),
        problem(128, lengths=Dense(1, 1024, 1024), heads=16),
        problem(160, lengths=Dense(16, 256, 256), heads=8),
    ):
        assert (choose(asked).groups, choose(asked).tile_kv) == (2, 64) and fits(choose(asked))
    for asked in (
        problem(128, lengths=Dense(4, 4096, 4096), heads=16, mask=strobe.Causal()),
        problem(160, lengths=Dense(4, 4096, 4096), heads=32, mask=strobe.Causal()),
        problem(64, lengths=Dense(1, 2048, 2048), heads=32),
        problem(64, lengths=Dense(16, 1024, 1024), heads=32, mask=causal),
    ):
        assert choose(asked).tile_kv == 128


def shared(lengths: Lengths, heads: tuple[int, int] = (32, 8), mask: strobe.Mask = FULL, head_dim: int = 128) -> int:
    """How many heads share a tile."""
    return choose(replace(problem(head_dim, lengths=lengths, mask=mask), heads_q=heads[0], heads_kv=heads[1])).tile_heads


def test_heads_that_share_keys_share_a_tile_that_rows_of_one_would_leave_empty():
    packed, cut, whole = Varlen(40, 8000, 8000, 500, 500), Dense(32, 300, 300), Dense(16, 512, 512)
    assert [shared(lengths) for lengths in (packed, cut, whole)] == [2, 2, 1]
    assert shared(cut, head_dim=256) == shared(packed, (64, 8)) == shared(packed, (16, 2), head_dim=64) == 2
    assert shared(packed, (32, 32)) == 1


def test_heads_that_do_not_fill_their_tiles_share_them_where_sequences_are_short():
    """Of four tiles for seven heads the last is half empty, as tiles of 128 rows are that hold a few dozen."""
    short, long = Varlen(40, 4000, 4000, 300, 300), Varlen(40, 40000, 40000, 3000, 3000)
    for heads in ((28, 4), (40, 8)):
        config = choose(replace(problem(128, lengths=short), heads_q=heads[0], heads_kv=heads[1]))
        assert (config.tile_heads, config.uneven_group) == (2, heads[0] // heads[1])
        assert shared(long, heads) == 1


def test_three_heads_fill_a_tile_of_three_groups():
    for dim, lengths in ((128, Varlen(40, 4000, 4000, 300, 300)), (64, Dense(64, 100, 100)), (96, Dense(64, 64, 64))):
        config = choose(replace(problem(dim, lengths=lengths), heads_q=24, heads_kv=8))
        assert (config.groups, config.tile_kv, config.tile_heads, config.uneven_group) == (3, 64, 3, 0) and fits(config)


def test_packed_sequences_of_one_length_are_as_dense_ones():
    """Of 100 rows each a tile of 128 is less empty than two of 64 with seven heads in four of them."""
    even, uneven = Varlen(64, 6400, 6400, 100, 100), Varlen(64, 6400, 6400, 400, 400)
    assert shared(even, (28, 4)) == shared(Dense(64, 100, 100), (28, 4)) == 1
    assert shared(uneven, (28, 4)) == 2


def test_heads_share_a_tile_of_which_a_mask_leaves_less():
    """Tiles of 64 rows have fewer keys beyond the diagonal than tiles of 128, in blocks of 64 keys."""
    whole = Dense(16, 512, 512)
    assert shared(whole, mask=strobe.Causal()) == shared(whole, mask=strobe.Window(127, 0)) == 2
    assert shared(Dense(2, 32768, 32768), mask=strobe.Causal(), head_dim=64) == 1


def test_what_is_computed_pair_by_pair_shares_tiles_too():
    asked = replace(problem(128, lengths=Dense(32, 300, 300)), heads_kv=8, score=strobe.Score(softcap=20.0))
    assert choose(asked).tile_heads == 2
    assert choose(replace(asked, heads_kv=32)).tile_heads == 1


def test_up_to_80_columns_are_not_padded_to_96():
    for head_dim, head_dim_v in ((80, 80), (72, 72), (72, 80)):
        config = choose(problem(head_dim, head_dim_v))
        assert (config.head_dim, config.head_dim_v, config.o_columns) == (80, 80, 16) and fits(config)
    alike = [choose(problem(head_dim)) for head_dim in (80, 96)]
    assert len({(config.groups, config.tile_kv, config.num_stages, config.q_stages) for config in alike}) == 1
    for asked in (problem(88), problem(80, 96), replace(problem(80), partial=True)):
        assert (choose(asked).head_dim, choose(asked).head_dim_v) == (96, 96)


def test_narrow_rows_take_three_groups_where_these_are_not_far_behind(tuned):
    tuned(point("full", 4096, 500, 430), point("causal", 4096, 500, 400))
    assert [choose(problem(head_dim, lengths=Dense(100, 4096, 4096))).groups for head_dim in (64, 40)] == [2, 3]
    assert choose(problem(40, lengths=Dense(100, 4096, 4096), mask=strobe.Causal())).groups == 2


def _same(batch, head, q_index, kv_index):
    return q_index == kv_index


def test_origin_names_the_table_and_the_point(tuned):
    tuned(point("full", 1000, 500, 400), point("full", 2000, 500, 600))
    assert origin(problem()) == "the fastest of 2 by A GPU, 2026-01-02, mine.json, at full, 2000 keys a row"
    assert origin(problem(64, 256)) == "no measurement for these head dims: the first of 1 candidates by arithmetic"


# ---- where tables come from


def test_the_users_table_wins_for_its_head_dims_alone(tuned):
    before = choose(problem(128))
    tuned(point("full", 4096, 1, 2))
    forget()
    assert choose(problem(64)).groups == 3
    assert choose(problem(128)) == before


def test_the_table_in_the_cache_folder_is_the_users(fresh):
    users("sm90").parent.mkdir(parents=True)
    users("sm90").write_text(table(point("full", 4096, 1, 2)))
    assert "A GPU" in origin(problem(64))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"schema": 99}, "it holds schema 99 of sm90"),
        ({"arch": "sm100"}, f"it holds schema {SCHEMA} of sm100"),
        ({"head_dims": None}, "it lacks 'head_dims'"),
        ({"head_dims": [{"kept": [], "points": []}]}, "it must have kept configs"),
        ({"head_dims": [entry(kept=["groups=2"])]}, "it must have kept configs"),
    ],
)
def test_a_table_that_is_none(tuned, changes, reason):
    tuned(point("full", 4096, 1, 2), **changes)
    with pytest.raises(ValueError, match=f"a tuning table must be .*mine.json: {reason}"):
        choose(problem())


def test_a_table_that_is_not_there(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("STROBE_TUNING", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"a tuning table must be .*none.json: .*No such file"):
        choose(problem())


@pytest.mark.parametrize(
    "config, reason",
    [
        ("groups=3,tile_kv=128,num_stages=8", "must name configs that fit"),
        ("groups=2,tiles=128", "must name configs of the Hopper forward.*unexpected keyword argument 'tiles'"),
        ("groups=two", "must name configs of the Hopper forward.*invalid literal"),
    ],
)
def test_a_table_with_a_config_that_cannot_run(tuned, config, reason):
    tuned(head_dims=[entry(point("full", 4096, 1, 2) | {"tflops": {config: 1}}, kept=[config])])
    with pytest.raises(ValueError, match=reason):
        choose(problem())


# ---- strobe tune


def test_tune_needs_a_hopper_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = strobe_command("tune", "--head-dims", "64")
    assert result.exit_code == 2 and "on a Hopper GPU (sm_90), got CPU" in result.output


def test_few_configs_are_kept():
    assert keep([{"a": 100, "b": 99.5}, {"a": 50, "b": 60}]) == ["b"]  # as good where a is the fastest
    assert keep([{"a": 100, "b": 90}, {"a": 50, "b": 60}, {"a": 99, "b": 98.5}]) == ["a", "b"]
    assert keep([{"a": 100, "b": 99.5}, {"a": 50, "b": 60}], tolerance=0.001) == ["b", "a"]


def test_other_head_dims_stay_in_a_table():
    old, other, new = entry(head_dim=64), entry(head_dim=128), entry(head_dim=64, kept=["new"])
    assert merged([old, other], [new])["head_dims"] == [new, other]


def test_flaws():
    clean = Audit("kernel", 168, 200_000, 0, {"HGMMA": 8})
    assert flaw(clean) is None
    assert flaw(Audit("kernel", 168, 200_000, 20, {"LDL": 3, "STL": 2})) == "spills 20 bytes"
    assert flaw(Audit("kernel", 168, 200_000, 16, {"LDL": 3, "STL": 1})) is None
    assert flaw(Audit("kernel", 168, 200_000, 0, {"LDL": 1})) == "uses local memory"
    assert flaw(Audit("kernel", 168, 200_000, 0, {}, warnings=("C7510: serialized",))) == "ptxas: C7510: serialized"
    assert flaw(Audit("kernel", 168, 200_000, 0, {}, wrong_code=("wrong code: ...",))) == "wrong code: ..."
    assert flaw(Audit("kernel", 168, 240_000, 0, {})) == "takes 240000 bytes of shared memory"


@pytest.mark.gpu
def test_tune_writes_a_table_that_choose_reads(fresh, monkeypatch, tmp_path):
    path = tmp_path / "mine.json"
    result = strobe_command("tune", "--quick", "--head-dims", "64", "--json", str(path))
    assert result.exit_code == 0, result.output
    monkeypatch.setenv("STROBE_TUNING", str(path))
    assert "mine.json" in origin(problem(64))


# ---- what the compiler makes of the kept configs, on the oldest and on the installed Triton

COMPILE = """
import dataclasses, json, triton
from strobe.kernels.sm90.config import _parsed
from strobe.lab.bench.tune import compile_all, flaw
from strobe.tuning.table import read, shipped
table = read(shipped("sm90"), "sm90")
configs = [_parsed(*dims, kept) for dims, entry in table.items() for kept in entry.kept]
audits = compile_all([(config, masked) for config in configs for masked in (False, True)])
found = [
    {"name": audit.name, "groups": config.groups, "masked": masked, "flaw": flaw(audit), "registers": audit.registers,
     "excess": audit.smem_bytes - config.smem_bytes()}
    for (config, masked), audit in audits.items()
]
print(json.dumps({"triton": triton.__version__, "found": found}))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("triton", TRITONS)
def test_the_compiler_agrees_with_every_kept_config(triton):
    found = answer_by(triton, COMPILE)["found"]
    flaws = {(audit["groups"], audit["masked"]): audit["flaw"] for audit in found if audit["flaw"]}
    assert not flaws, flaws
    for audit in found:
        assert 0 <= audit["excess"] <= 512, audit["name"]
