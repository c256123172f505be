"""What all tests share: Triton's interpreter where there is no GPU, campaigns of which a sample runs, deadlines of programs."""

import fcntl
import os
import subprocess
import tempfile
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zlib import crc32

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # has no effect once Triton is imported
if not HAS_GPU or "PYTEST_XDIST_WORKER" in os.environ:  # every core has a process already
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # for the programs that tests start

SAMPLED = {
    "kernels/test_sm80.py::test_nothing_ordinary_is_redone": 3,
    "kernels/test_optimistic.py::test_the_kernel_equals_the_safe_one": 2,
    "call/test_properties.py::test_hopper_against_the_reference": 2,
    "kernels/test_blocks.py::test_on_a_gpu": 8,
    "kernels/test_blocks.py::test_against_reference": 8,
    "call/test_api.py::test_gradients_of_biases_broadcast": 4,
    "call/test_fp8.py::test_on_a_gpu": 3,
    "call/test_fp8.py::test_values_that_are_all_the_same_on_a_gpu": 9,
    "call/test_fp8.py::test_later_keys_may_outgrow_the_first_block_on_a_gpu": 3,
    "call/test_unaligned.py::test_upstream_gradients_on_a_gpu": 2,
    "call/test_unaligned.py::test_inputs_on_a_gpu": 9,
    "sim/test_backward.py::test_in_every_order": 9,
    "sim/test_broken_ampere.py::test_it_is_found": 8,
    "sim/test_broken_ampere.py::test_no_false_alarm": 5,
    "sim/test_broken_decode.py::test_it_is_found": 3,
    "sim/test_ordered_backward.py::test_it_is_found": 2,
    "sim/test_broken_decode.py::test_it_is_found_with_wgmma": 3,
    "sim/test_broken_decode.py::test_it_is_found_with_two_groups": 4,
    "sim/test_broken_prefill.py::test_it_is_found": 6,
    "sim/test_broken_prefill.py::test_no_false_alarm": 4,
    "sim/test_prefill_kernel.py::test_against_the_specification": 4,
    "sim/test_prefill_kernel.py::test_what_the_optimism_gets_wrong_is_computed_again": 4,
    "sim/test_decode_kernel.py::test_against_the_specification": 2,
    "sim/test_decode_kernel.py::test_wgmma": 2,
    "sim/test_broken_backward.py::test_it_is_found": 12,
    "sim/test_broken_backward.py::test_no_false_alarm": 14,
    "sim/test_broken_blackwell.py::test_it_is_found": 8,
    "sim/test_broken_hopper.py::test_it_is_found": 8,
    "sim/test_broken_hopper.py::test_no_false_alarm": 8,
    "sim/test_kernels.py::test_blackwell": 8,
    "sim/test_kernels.py::test_blackwell_in_pairs": 12,
    "sim/test_kernels.py::test_blackwell_splits_keys": 5,
    "sim/test_conformance.py::test_on_a_gpu": 3,
    "sim/test_kernels.py::test_hopper": 8,
    "sim/test_ampere.py::test_backward": 12,
    "sim/test_ampere.py::test_backward_of_every_problem": 12,
    "sim/test_ampere.py::test_every_problem": 8,
    "sim/test_ampere.py::test_forward": 8,
    "sim/test_split_backward.py::test_in_every_order": 8,
    "sim/test_stored_backward.py::test_in_every_order": 4,
    "sim/test_stored_backward.py::test_it_is_found": 4,
    "sim/test_split_backward.py::test_no_false_alarm": 6,
    "lab/test_bench.py::test_the_order_is_balanced_whoever_drops_out": 4,
    "lab/test_bench.py::test_points_come_again_until_their_verdict_is_known": 3,
    "kernels/test_hopper_gradients.py::test_a_bias_may_be_repeated": 10,
    "kernels/test_hopper_gradients.py::test_a_graph_beside_other_tensors": 6,
    "kernels/test_hopper_gradients.py::test_a_plan_and_the_operator_give_the_same_beside_other_tensors": 20,
    "kernels/test_hopper_gradients.py::test_a_plan_and_the_operator_learn_the_same": 10,
    "kernels/test_hopper_gradients.py::test_against_reference": 90,
    "kernels/test_hopper_gradients.py::test_deterministic": 3,
    "kernels/test_hopper_gradients.py::test_deterministic_on_a_busy_gpu": 2,
    "kernels/test_hopper_gradients.py::test_deterministic_against_reference": 160,
    "kernels/test_lying_lengths.py::test_on_a_gpu": 8,
    "kernels/test_lying_lengths.py::test_fp8_on_a_gpu": 6,
    "kernels/test_optimistic.py::test_documents_equal_those_of_the_safe_one": 4,
    "kernels/test_optimistic.py::test_nothing_ordinary_is_redone": 4,
    "kernels/test_portable.py::test_against_reference": 14,
    "kernels/test_portable.py::test_compiles": 12,
    "kernels/test_portable.py::test_documents_and_tiles": 34,
    "kernels/test_portable.py::test_large_against_reference": 20,
    "kernels/test_portable_plan.py::test_against_reference": 14,
    "call/test_fp8.py::test_the_kernel_compiles_without_spills_in_its_loops_or_serialised_products": 9,
    "kernels/test_sm80.py::test_against_reference": 90,
    "kernels/test_sm80.py::test_every_candidate": 60,
    "kernels/test_sm80.py::test_every_candidate_of_the_backward": 8,
    "kernels/test_sm80.py::test_gradients_against_reference": 200,
    "kernels/test_sm90.py::test_against_reference": 60,
    "kernels/test_sm90.py::test_the_safe_softmax": 5,
    "kernels/test_hopper_gradients.py::test_a_plan_and_the_operator_drop_the_same": 3,
    "kernels/test_hopper_gradients.py::test_other_tensors_that_hooks_bring": 2,
    "call/test_properties.py::test_every_backend_against_the_reference": 10,
    "call/test_dropout.py::test_every_backend_drops_what_the_mask_says": 6,
    "serving/test_decode.py::test_on_a_gpu": 8,
    "serving/test_prefill.py::test_on_a_gpu": 8,
    "serving/test_prefill.py::test_head_dims_on_a_gpu": 3,
    "kernels/test_short.py::test_right_numbers": 6,
    "ladder/test_rungs.py::test_on_a_gpu": 4,
    "benchmarks/test_compare_versions.py::test_each_version_runs_its_own_code": 5,
    "integrations/test_examples.py::test_as_a_script": 3,
    "call/test_operators.py::test_opcheck": 4,
    "call/test_operators.py::test_cuda_graph": 3,
    "integrations/test_jagged.py::test_attention_is_that_of_the_sequences": 2,
    "integrations/test_transformers_families.py::test_decoder_on_a_gpu": 2,
    "call/test_launcher.py::test_a_launch_waits_for_those_ahead": 2,
    "kernels/test_hopper_gradients.py::test_poison_reaches_only_what_sees_it": 2,
    "call/test_operators.py::test_compile_without_graph_breaks": 12,
}
"""Test -> one of how many of its cases always runs, chosen by a hash of their names, and of few cases one; the others are
`exhaustive`."""

ONE_TRITON = {
    "call/test_fp8.py::test_the_kernel_compiles_without_spills_in_its_loops_or_serialised_products",
    "call/test_functions.py::test_gluon_compiles_the_same_source",
    "integrations/test_examples.py::test_what_the_compiler_makes_of_them",
    "kernels/test_blocks.py::test_compiles",
    "kernels/test_combine.py::test_compiles_for_gpus_that_are_not_there",
    "kernels/test_decode_compiles.py::test_append_compiles",
    "kernels/test_portable.py::test_compiles",
    "kernels/test_portable_plan.py::test_launches_need_no_triton",
    "kernels/test_sm80.py::test_what_runs_before_and_after_the_backward_compiles",
    "kernels/test_sm90_backward.py::test_lengths_batch_and_heads_compile_nothing",
    "sim/test_conformance.py::test_the_compiler_takes_them",
}
"""Tests that ask the same of two Tritons: what they ask of the oldest one is `exhaustive`."""

try:
    OLDEST_IS_INSTALLED = version("triton").startswith("3.6")
except PackageNotFoundError:
    OLDEST_IS_INSTALLED = False

LONG = {
    "call/test_launcher.py::test_attention_by_plans_is_the_operators",
    "call/test_properties.py::test_every_backend_against_the_reference",
    "kernels/test_hopper_gradients.py::test_streams_at_once_beside_other_tensors",
    "kernels/test_lying_lengths.py::test_on_a_gpu",
    "kernels/test_tuning.py::test_tune_writes_a_table_that_choose_reads",
    "lab/test_bench.py::test_run_on_a_gpu",
    "lab/test_bench.py::test_single_calls_on_a_gpu",
    "lab/test_fuzz.py::test_a_campaign_on_a_gpu_finds_nothing",
    "parallel/test_simulated.py::test_on_a_gpu",
}
"""Tests that take half a minute on a GPU and more: they begin first, so that no process is left with one at the end."""

DEADLINE = 240.0
"""Seconds until a program that a test has started is killed, if the test does not say when."""


def pytest_ignore_collect(collection_path, config):
    """`-m gpu` does not import files without such tests, in each of many processes."""
    if config.option.markexpr == "gpu" and collection_path.name.startswith("test_"):
        return "gpu" not in collection_path.read_text().lower() or None
    return None


def _test_and_case(item) -> tuple[str, str]:
    name, _, case = item.nodeid.removeprefix("tests/").partition("[")
    return name, case


def _always(items) -> set[str]:
    """The ids of the cases that SAMPLED does not leave to the campaigns."""
    cases: dict[str, dict[int, str]] = {}
    for item in items:
        if "exhaustive" not in item.keywords:
            cases.setdefault(_test_and_case(item)[0], {})[crc32(item.nodeid.encode())] = item.nodeid
    found: set[str] = set()
    for name, by_hash in cases.items():
        found.update({id_ for number, id_ in by_hash.items() if number % SAMPLED.get(name, 1) == 0} or {by_hash[min(by_hash)]})
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    always = _always(items)
    for item in items:
        name, case = _test_and_case(item)
        if item.nodeid not in always or (name in ONE_TRITON and ("oldest" in case or "3.6" in case)):
            item.add_marker(pytest.mark.exhaustive)
        if OLDEST_IS_INSTALLED and "installed Triton" in case:
            item.add_marker(pytest.mark.skip(reason="the installed Triton is the oldest one"))
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if HAS_GPU:
        items.sort(key=lambda item: _test_and_case(item)[0] not in LONG)
        items.sort(key=lambda item: "alone" in item.fixturenames)
    if "exhaustive" not in config.option.markexpr:
        left_out = [item for item in items if "exhaustive" in item.keywords]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if "exhaustive" not in item.keywords]


class Room:
    """Where tests of several processes use one GPU: many at once, or one that is alone. Who waits at the door for the room to
    be empty lets nobody else in."""

    def __init__(self, name: str):
        folder = Path(tempfile.gettempdir())
        self._door, self._room = ((folder / f"strobe-{name}-{what}").open("w") for what in ("door", "room"))

    @contextmanager
    def shared(self):
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_SH)
        fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    @contextmanager
    def alone(self):
        """For who shares it."""
        fcntl.flock(self._room, fcntl.LOCK_UN)
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_SH)
            fcntl.flock(self._door, fcntl.LOCK_UN)


@pytest.fixture(autouse=True)
def room():
    """The room of the GPU, which the test shares; None where there is one process."""
    if not HAS_GPU or "PYTEST_XDIST_WORKER" not in os.environ:
        yield None
        return
    room = Room(os.environ["PYTEST_XDIST_TESTRUNUID"])
    with room.shared():
        yield room


@pytest.fixture
def alone(room):
    """Makes a context in which no other test uses the GPU. Such tests come last."""
    return nullcontext if room is None else room.alone


@pytest.fixture(autouse=True, scope="session")
def deadlines():
    """Kills programs that do not come to their end, and shows what they printed."""
    run = subprocess.run

    def run_until(command, *args, timeout=None, **keywords):
        try:
            return run(command, *args, timeout=timeout or DEADLINE, **keywords)
        except subprocess.TimeoutExpired as late:
            if timeout:
                raise
            printed = "\n".join(x if isinstance(x, str) else x.decode() for x in (late.stdout, late.stderr) if x)
            pytest.fail(f"a program did not end within {DEADLINE:g} s; it printed:\n{printed}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", run_until)
        yield


@pytest.fixture
def much_memory():
    """Lets one test at a time have tens of gigabytes of a GPU that several processes share."""
    with (Path(tempfile.gettempdir()) / "strobe-tests-much-memory").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def small_product(monkeypatch):
    """The matrix product that a benchmark times beside its points takes longer than all else of a small one."""
    from strobe.lab.bench import bench

    monkeypatch.setitem(bench.PRODUCT, "cpu", (64, "fp32"))


class NamesFailures:
    """Prints the name of a test when it fails, not at the end of the run alone."""

    def __init__(self, reporter):
        self._reporter = reporter

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"{report.when} failed: {report.nodeid}", red=True)


@pytest.hookimpl(trylast=True)  # after pytest's own reporter is there
def pytest_configure(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not hasattr(config, "workerinput"):  # not in the workers of xdist
        config.pluginmanager.register(NamesFailures(reporter))
