"""The fuzzer: what it finds today (nothing), and that it finds what is broken on purpose, and survives it."""

import os
import time
from dataclasses import replace
from random import SystemRandom
from unittest import mock

import pytest
import torch
from commands import run as command

from strobe import masks
from strobe.call import launches
from strobe.cpu import cached, tiled
from strobe.kernels.portable import forward as _  # noqa: F401  kernels take their copy of `masks` before it is broken
from strobe.lab.fuzz import fuzz
from strobe.lab.fuzz.cases import FAMILY, Case, drawn
from strobe.lab.fuzz.compiled import compiled
from strobe.lab.fuzz.run import Outcome, outcome
from strobe.scores import Score

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="runs the portable kernels in Triton's interpreter")
CASES = 60
"""Of a campaign that `make test` runs."""


def told(found: fuzz.Found) -> str:
    return "\n".join(f"{one.outcome}\n{one.command()}" for one in found.failures)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", [0, None], ids=["the same cases", "new cases"])
def test_a_campaign_finds_nothing(first):
    start = SystemRandom().randrange(10**9) if first is None else first
    found = fuzz.campaign("cpu", 900.0, first=start, most=CASES)
    assert not found.failures, told(found)
    assert found.cases == CASES and found.refusals.total() < CASES / 2


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_campaign_on_a_gpu_finds_nothing():
    found = fuzz.campaign("cuda", 30.0, workers=2, first=SystemRandom().randrange(10**9))
    assert not found.failures, told(found)
    assert found.cases  # few where all cores compile for other tests


def test_a_number_is_a_case_and_a_case_is_its_words():
    for number in range(300):
        for device in ("cpu", "cuda"):
            case = drawn(number, device)
            assert drawn(number, device) == case == Case.told(str(case))
            assert all(one != case for one in case.simpler())
    assert len({drawn(number, "cuda").head_dim for number in range(FAMILY)}) == 1  # one family compiles one kernel
    with pytest.raises(ValueError, match="must be an integer or facts such as n_q=5, got 'n_q'"):
        Case.told("n_q")


FOUND = (
    "door='qkvpacked',dtype='bf16',n_q=16,n_kv=16,head_dim=128,head_dim_v=128,right=0,scale=-0.3",
    "dtype='fp64',n_q=40,n_kv=50,dropout=0.1,gradients='both'",
    "n_kv=8,group=2,head_dim=40,head_dim_v=40,values='inf',way='autocast',seed=273",
    "n_q=5,n_kv=7,packed=True,k_layout='same for all',values='huge',seed=585",
    "backend='portable',n_kv=2,documents='mixed',softcap=1.0,poison='nan',gradients='out',seed=133",
    "backend='portable',dtype='bf16',n_q=30,n_kv=15,head_dim=128,head_dim_v=128,right=0,bias='b1qk',function=2,dropout=0.5,"
    "gradients='out',seed=44",
    "dtype='fp64',n_q=2,n_kv=2,group=2,head_dim=96,head_dim_v=96,documents='sorted',alibi='batch',values='inf',seed=934",
)
"""What campaigns found, made smaller."""

FOUND_ON_A_GPU = (
    "device='cuda',door='fp8',n_kv=2,head_dim=192,head_dim_v=192,values='growing',seed=114",
    "device='cuda',n_kv=32,head_dim_v=96,values='huge',seed=45",
    "device='cuda',backend='portable',n_q=70,n_kv=300,values='huge',seed=45",
    "device='cuda',backend='portable',dtype='fp32',n_q=70,n_kv=70,right=0,values='huge',seed=45",
    "device='cuda',backend='sm90',dtype='fp16',n_q=257,n_kv=511,heads_kv=3,group=2,head_dim=40,left=1000,prefix=127,"
    "logits=5.0,gradients='out',way='others first',seed=672",
    "device='cuda',backend='portable',dtype='fp16',n_q=100,n_kv=200,head_dim=40,seed=672",
    "device='cuda',door='flash',n_q=127,n_kv=3,heads_kv=3,group=2,head_dim=80,head_dim_v=80,alibi='batch',sinks='fp32',"
    "logits=300.0,seed=985",
    "device='cuda',backend='sm90',dtype='bf16',n_q=300,n_kv=31,heads_kv=2,head_dim=80,head_dim_v=80,visible=2,seed=122",
    "device='cuda',backend='sm90',dtype='bf16',batch=2,n_kv=2000,left=37,packed=True,gradients='lse',deterministic=True,seed=850",
)


@INTERPRETED
@pytest.mark.parametrize("case", FOUND)
def test_what_was_found_is_right(case):
    assert outcome(Case.told(case)) == Outcome("right")


@pytest.mark.gpu
@pytest.mark.parametrize("case", FOUND_ON_A_GPU)
def test_what_was_found_on_a_gpu_is_right(case):
    assert outcome(Case.told(case)) == Outcome("right")


# ---- caches


def test_a_campaign_of_caches_finds_nothing():
    found = fuzz.campaign("cpu", 900.0, first=fuzz.CACHES + SystemRandom().randrange(10**8), most=24)
    assert not found.failures, told(found)
    assert found.cases == 24 and found.refusals.total() < 12


def test_a_case_of_a_cache_is_told_by_its_facts():
    for number in range(fuzz.CACHES, fuzz.CACHES + 40):
        case = fuzz.case_of(number, "cuda")
        assert fuzz.told(str(case)) == case and all(one != case for one in case.simpler())
    with pytest.raises(ValueError, match="a case must be an integer or facts such as door='cache',n_q=5, got"):
        fuzz.told("door='cache',pages=3")


def one_key_too_many(p, j, n_kv, left, right, prefix):
    return ORIGINAL_VISIBLE(p, j, n_kv, None if left is None else left + 1, right, prefix)


def without(name: str, **changes):
    """A function of `cached` that is told of other operands."""
    original = getattr(cached, name)
    return lambda problem, operands, *more: original(problem, operands._replace(**changes), *more)


BREAKS_OF_CACHES = {
    "a window that is off by one": ("visible", one_key_too_many),
    "scales that are ignored": ("_keys", without("_keys", k_scale=None, v_scale=None)),
    "a row whose sink is forgotten": ("_by_flash", without("_by_flash", sinks=None)),
    "the same by hand": ("_by_hand", without("_by_hand", sinks=None)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", BREAKS_OF_CACHES)
def test_a_broken_cache_is_found(what):
    name, broken = BREAKS_OF_CACHES[what]
    cases = [fuzz.case_of(number, "cpu") for number in range(fuzz.CACHES, fuzz.CACHES + 200)]
    with mock.patch.object(cached, name, broken):
        found = next(case for case in cases if fuzz.outcome_of(case).bad)
    assert not fuzz.outcome_of(found).bad


# ---- compiled, not run


@pytest.mark.parametrize("case", ["bad=5", "door='fp8'", "n_q=3,backend='tiled'"])
def test_nothing_is_compiled_of_what_is_refused(case):
    assert compiled(Case.told(case), "A100").kind == "refused"


def test_a_failure_says_what_it_was_compiled_for():
    found = fuzz.Found("A100")
    found.add(5, drawn(5, "cuda"), Outcome("error", "words"))
    assert found.failures[0].command() == "strobe fuzz --arch A100 --case 5"
    smaller = replace(found.failures[0], smallest=Case.told("n_q=3"))
    assert smaller.command() == 'strobe fuzz --arch A100 --case "n_q=3"'


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["A100", "H200"])
@pytest.mark.parametrize("first", [302723920, fuzz.CACHES], ids=["attention", "caches"])
def test_a_campaign_compiles(arch, first):
    found = fuzz.campaign(arch, 900.0, first=first, most=3)
    assert found.cases == 3 and not found.failures and not found.refusals, found


# ---- broken on purpose


def bottom_right_off_by_one(p, j, n_kv, left, right, prefix):
    return ORIGINAL_VISIBLE(p, j, n_kv, left, None if right is None else right + 1, prefix)


def heads_in_another_order(x, group):
    heads = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32).unflatten(2, (group, -1)).transpose(2, 3)
    return heads.permute(0, 2, 3, 1, 4)


def lse_in_powers_of_two(problem, operands):
    out, lse = ORIGINAL_TILED(problem, operands)
    return out, lse * 1.4427


def without_used_lengths(backend, problem, operands):
    return ORIGINAL_LAUNCHED(backend, replace(problem, seqused=False), operands._replace(seqused_q=None, seqused_kv=None))


def v_with_the_strides_of_k(backend, problem, operands):
    k, v = operands.k, operands.v
    if k.shape == v.shape and v.untyped_storage().nbytes() >= k.untyped_storage().nbytes():
        operands = operands._replace(v=v.as_strided(v.shape, k.stride(), 0))
    return ORIGINAL_LAUNCHED(backend, problem, operands)


def without_softcaps_derivative(score, ds, *arguments):
    return ORIGINAL_GRADIENT(replace(score, softcap=0.0), ds, *arguments)


ORIGINAL_VISIBLE, ORIGINAL_GRADIENT = masks.visible, Score.gradient
ORIGINAL_TILED, ORIGINAL_LAUNCHED = tiled.forward, launches.forward

BREAKS = {
    "a mask that is off by one": (masks, "visible", bottom_right_off_by_one),
    "query heads in another order": (tiled, "_heads", heads_in_another_order),
    "an LSE in powers of two": (tiled, "forward", lse_in_powers_of_two),
    "used lengths that are ignored": (launches, "forward", without_used_lengths),
    "v with the strides of k": (launches, "forward", v_with_the_strides_of_k),
    "no derivative of softcap": (Score, "gradient", without_softcaps_derivative),
    "weights that dropout does not divide": (tiled, "_dropout", lambda *tile: ORIGINAL_DROPOUT(*tile) != 0.0),
    "a score's tensors that are not checked": (Score, "check", lambda *arguments: None),
}
ORIGINAL_DROPOUT = tiled._dropout


@INTERPRETED
@pytest.mark.exhaustive
@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_place_is_found(what):
    place, name, broken = BREAKS[what]
    with mock.patch.object(place, name, broken):
        found = next(number for number in range(400) if outcome(drawn(number)).bad)
    assert not outcome(drawn(found)).bad


# ---- workers


def worker_that_dies(case: Case) -> Outcome:
    """Kills its process at one case, sleeps at another, and fails where there are many rows."""
    if case.seed == 2:
        os.abort()
    if case.seed == 4:
        time.sleep(100)
    return Outcome("wrong", f"{case.n_q} rows") if case.n_q > 20 and case.head_dim % 8 == 0 else Outcome("right")


def test_a_campaign_survives_its_workers():
    """And says which case each died of, and the smallest case of those that failed alike."""
    with mock.patch.object(fuzz, "DEADLINE", 9.0), mock.patch.object(fuzz, "SMALLER_SECONDS", 4.0):
        found = fuzz.campaign("cpu", 600.0, workers=2, first=0, most=12, run=worker_that_dies)
    kinds = {failure.number: failure.outcome for failure in found.failures}
    assert kinds[2] == Outcome("died", "SIGABRT") and kinds[4].kind == "hung"
    wrong = [failure for failure in found.failures if failure.outcome.kind == "wrong"]
    assert found.cases == 12 and 20 < wrong[0].smallest.n_q < 25  # by then, on a busy machine
    assert f"n_q={wrong[0].smallest.n_q}" in wrong[0].command()


def worker_that_is_slow(case: Case) -> Outcome:
    time.sleep(60)
    return Outcome("right")


def test_a_campaign_ends_on_time():
    start = time.monotonic()
    with mock.patch.object(fuzz, "GRACE", 1.0):
        found = fuzz.campaign("cpu", 2.0, workers=2, run=worker_that_is_slow)
    assert time.monotonic() - start < 50 and found.cut_off == 2 and not found.cases


# ---- the command


def test_a_failure_is_told_when_it_comes(monkeypatch, capsys):
    def campaign(device, seconds, workers, first, on_step):
        found = fuzz.Found()
        for number in (3, 7):
            found.add(number, drawn(number, device), Outcome("wrong", "out is far away"))
            on_step(found)
            told = capsys.readouterr().err
            assert told.count("--case") == 1 and f"--case {number}" in told and "out is far away" in told
        return found

    monkeypatch.setattr(fuzz, "campaign", campaign)
    assert len(fuzz.fuzz("cpu", 1.0, 1, 0)["failures"]) == 2
    assert capsys.readouterr().out.count("--case") == 2


def test_one_case_is_run_by_its_number_or_its_facts():
    result = command("fuzz", "--device", "cpu", "--case", "n_q=3,n_kv=5,right=0,gradients='both'")
    assert result.exit_code == 0 and "outcome   right" in result.output
    assert "case      n_q=3,n_kv=5,right=0,gradients='both'" in result.output
    with mock.patch.object(tiled, "forward", lse_in_powers_of_two):
        result = command("fuzz", "--device", "cpu", "--case", "backend='tiled',n_q=3,n_kv=5")
    assert result.exit_code == 1 and "outcome   wrong: lse" in result.output


def test_a_case_that_is_none_is_refused():
    result = command("fuzz", "--case", "rows=3")
    assert result.exit_code == 2 and "a case must be an integer or facts such as" in result.output
