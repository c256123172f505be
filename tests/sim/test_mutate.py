"""`strobe mutate`: which mistakes are made, and what becomes of each."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strobe.lab.simulated import mutate
from strobe.lab.simulated.mutants import mutants_of, sample
from strobe.lab.simulated.simulate import module_of
from strobe_cli.app import app

RING = """
import torch
from strobe.kernels.gluon import gl, gluon, mbarrier
from strobe.sim import Launch

ROWS = gl.constexpr(32)
LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def producer(x, buffer, full, empty, blocks):
    for i in range(blocks):
        mbarrier.wait(empty, (i & 1) ^ 1)
        buffer.store(gl.load(x + i * ROWS + gl.arange(0, ROWS, LAYOUT)))
        mbarrier.arrive(full, count=1)


@gluon.jit
def consumer(y, buffer, full, empty, blocks):
    i = 0
    while i < blocks:
        mbarrier.wait(full, i & 1)
        mbarrier.wait(full, i & 1)
        block = buffer.load(LAYOUT)
        mbarrier.arrive(empty, count=1)
        gl.store(y + i * ROWS + gl.arange(0, ROWS, LAYOUT), block)
        i += 1


@gluon.jit
def copy(x, y, blocks):
    buffer = gl.allocate_shared_memory(x.dtype.element_ty, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(barriers.index(i), count=1)
    total = 0
    while total < blocks:
        total += 1
    gl.warp_specialize([
        (consumer, (y, buffer, barriers.index(0), barriers.index(1), total)),
        (producer, (x, buffer, barriers.index(0), barriers.index(1), total)),
    ], [4], [40])


def on_the_host(a):
    return a + 1


def simulation():
    x, y = torch.arange(96.0), torch.empty(96)
    return Launch(copy, (1,), (x, y, 3), {"num_warps": 4}, check=lambda: torch.testing.assert_close(y, x))
"""


@pytest.fixture
def ring(tmp_path) -> Path:
    path = tmp_path / "ring.py"
    path.write_text(RING)
    return path


def by_key(path: Path) -> dict:
    """Of a file's functions, without its name."""
    return {mutant.key.removeprefix("ring."): mutant for mutant in mutants_of([module_of(path)])}


def test_what_is_changed(ring):
    keys = by_key(ring)
    of_producer = [key.partition(": ")[2] for key in keys if key.startswith("producer: ")]
    wait, store = "mbarrier.wait(empty, i & 1 ^ 1)", "buffer.store(gl.load(x + i * ROWS + gl.arange(0, ROWS, LAYOUT)))"
    arrive = "mbarrier.arrive(full, count=1)"
    assert sorted(of_producer) == sorted([
        "for i in range(blocks): [range(blocks) -> range(blocks - 1)]",
        "for i in range(blocks): [range(blocks) -> range(blocks + 1)]",
        f"{wait} [deleted]",
        f"{wait} [i & 1 ^ 1 -> i & 1]",
        f"{wait}; {store} [swapped]",
        f"{store} [x + i * ROWS + gl.arange(0, ROWS, LAYOUT) -> x + i * ROWS - gl.arange(0, ROWS, LAYOUT)]",
        f"{store} [x + i * ROWS -> x - i * ROWS]",
        f"{store}; {arrive} [swapped]",
        f"{arrive} [deleted]",
        f"{arrive} [{arrive} -> mbarrier.arrive(full, count=1 + 1)]",
    ])  # fmt: skip
    assert keys[f"producer: {wait} [deleted]"].name == "ring.py:13 delete"
    assert "consumer: mbarrier.wait(full, i & 1) [deleted] (2)" in keys  # it is there twice
    assert not [key for key in keys if key.startswith("on_the_host")]


def test_keys_survive_a_move_of_lines(ring, tmp_path):
    before = by_key(ring)
    ring.write_text("# A line more.\n" + RING)
    after = by_key(ring)
    assert list(before) == list(after)
    assert {mutant.line + 1 for mutant in before.values()} == {mutant.line for mutant in after.values()}


def test_samples_are_fixed_and_of_all_kinds(ring):
    mutants = list(by_key(ring).values())
    chosen = sample(mutants, 12, seed=1)
    assert chosen == sample(mutants[::-1], 12, seed=1) != sample(mutants, 12, seed=2)
    assert {mutant.operator for mutant in chosen} == {mutant.operator for mutant in mutants}


@pytest.mark.parametrize("key, result, says", [
    ("consumer: mbarrier.wait(full, i & 1); block = buffer.load(LAYOUT) [swapped]", mutate.SURVIVED, ""),
    ("producer: mbarrier.wait(empty, i & 1 ^ 1) [deleted]", mutate.CHECK, "Race: "),
    ("producer: mbarrier.arrive(full, count=1) [deleted]", mutate.DEADLOCK, "parity 0 of barriers[0] at ring.py:22"),
    ("producer: for i in range(blocks): [range(blocks) -> range(blocks - 1)]", mutate.DEADLOCK, "ring.py:22 in consumer"),
    ("consumer: while i < blocks: [i < blocks -> i <= blocks]", mutate.DEADLOCK, ""),
    ("consumer: i += 1 [other sign]", mutate.CHECK, "OutOfBounds: "),
    ("copy: while total < blocks: [total < blocks -> total <= blocks]", mutate.CHECK, "OutOfBounds: "),
    ("consumer: mbarrier.wait(full, i & 1) [deleted] (2)", mutate.SURVIVED, ""),
])  # fmt: skip
def test_what_becomes_of_it(key, result, says, ring):
    """In this process: the file's module is the test's own."""
    outcome = mutate.attempt(str(ring), by_key(ring)[key])
    assert (outcome.result, says in outcome.says) == (result, True), outcome


def test_each_in_a_process_that_may_not_end(ring, tmp_path, monkeypatch):
    """The command: a table, the JSON, and a status that says whether anything is missed."""
    monkeypatch.setattr(mutate, "LEAST_LIMIT", 2.0)
    file = tmp_path / "mutants.json"
    for only, result, status in [
        ("ring.py:38 sign", mutate.NO_END, 0),  # total -= 1
        ("ring.py:23 delete", mutate.SURVIVED, 1),
    ]:
        ran = CliRunner().invoke(app, ["mutate", str(ring), "--only", only, "--json", str(file)])
        assert ran.exit_code == status, ran.output
        (kernel,) = json.loads(file.read_text())["subjects"]
        assert [(mutant["name"], mutant["result"]) for mutant in kernel["found"]] == [(only, result)]
        assert sum(kernel["counts"].values()) == kernel["tried"] == 1


@pytest.mark.parametrize("arguments, says", [
    (["nothing.py"], "one of sm90-forward, sm90-backward"),
    (["gemm-sm80", "--only", "sm80.py:1 delete"], "gemm-sm80 has no mutant 'sm80.py:1 delete'"),
    (["gemm-sm80", "--only", "x", "--sample", "3"], "only must be given without sample"),
])  # fmt: skip
def test_what_it_refuses(arguments, says):
    ran = CliRunner().invoke(app, ["mutate", *arguments])
    assert ran.exit_code == 2 and says in " ".join(ran.output.replace("│", "").split())


def test_a_kernel_that_fails_itself(ring):
    ring.write_text(RING.replace("assert_close(y, x)", "assert_close(y, x + 1)"))
    with pytest.raises(ValueError, match="itself fails"):
        mutate.campaign(str(ring), 1, 0, 1)


@pytest.mark.exhaustive
def test_what_is_called_equivalent_is_a_mutant():
    """Whoever changes a kernel takes back what was said of the statement."""
    for kernel, make in mutate.subjects().items():
        subject = make()
        keys = {mutant.key for mutant in mutants_of(subject.modules, subject.helpers)}
        assert not set(subject.equivalent) - keys, kernel


UNSEEN = {"sm100.matmul_kernel: fence_async_shared() [deleted]"}
"""What the simulator does not see: the fence after barriers are initialised."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", mutate.subjects())
def test_a_sample_of_each_kernel(kernel):
    facts = mutate.campaign(kernel, 12, seed=0, workers=2)
    assert not {mutant["key"] for mutant in mutate.missed(facts)} - UNSEEN
