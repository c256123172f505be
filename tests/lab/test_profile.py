"""Profiles: Nsight Compute's CSV as tables, and ncu itself where it is, played by a script here.

The files in `profiles/` are made for these tests, of numbers that were published; nothing in them was measured here.
"""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import run

from strobe.device import KNOWN
from strobe.lab.bench.plan import Point
from strobe.lab.counters import counters, ncu, profile, profiled
from strobe.lab.ladder import profiled as ladder_profiled
from strobe.lab.ladder.measure import Problem
from strobe.lab.model.roofline import Ceilings
from strobe.lab.pages import html
from strobe.ladder import RUNGS

PROFILES = Path(__file__).parent / "profiles"
DETAILS = PROFILES / "l4-details.csv"


def written(tmp_path, *options: str) -> dict:
    """What the command writes as JSON; each table as a dict of its rows by their labels."""
    path = tmp_path / "profile.json"
    result = run("profile", *options, "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    for table in report["tables"]:
        for row in table["rows"]:
            assert all(cell in result.output for cell in row), "the terminal shows what the JSON holds"
    return report | {"by title": {table["title"]: {row[0]: row[1:] for row in table["rows"]} for table in report["tables"]}}


# ---- the published tables


def test_the_tables_of_two_kernels_beside_each_other(tmp_path):
    report = written(tmp_path, "--csv", str(DETAILS))
    shown = report["by title"]
    assert [subject["name"] for subject in report["subjects"]] == ["fa", "fa_tc_v1"]
    assert shown["Throughput"] == {
        "DRAM Frequency": ["Ghz", "6.24", "6.24"],
        "SM Frequency": ["Mhz", "794.99", "794.98"],
        "Elapsed Cycles": ["cycle", "6623369", "4585386"],
        "Memory Throughput": ["%", "67.83", "46.05"],
        "DRAM Throughput": ["%", "0.15", "0.21"],
        "Duration": ["ms", "8.33", "5.77"],
        "L1/TEX Cache Throughput": ["%", "91.24", "67.52"],
        "L2 Cache Throughput": ["%", "2.55", "3.59"],
        "SM Active Cycles": ["cycle", "4917215.60", "3123328.93"],
        "Compute (SM) Throughput": ["%", "67.83", "46.05"],
    }
    launch = shown["Launch"]
    assert launch["Block Size"] == ["", "512", "128"] and launch["Threads"] == ["thread", "65536", "16384"]
    assert launch["Function Cache Configuration"] == ["", "CachePreferNone", "CachePreferNone"]
    assert launch["Registers Per Thread"] == ["register/thread", "54", "80"]
    assert launch["Dynamic Shared Memory Per Block"] == ["Kbyte/block", "29.82", "0"], "one unit, though the file has two"
    assert launch["Static Shared Memory Per Block"] == ["Kbyte/block", "0", "43.78"] and len(launch) == 12
    assert shown["Occupancy"] == {
        "Block Limit SM": ["block", "24", "24"],
        "Block Limit Registers": ["block", "2", "6"],
        "Block Limit Shared Mem": ["block", "2", "2"],
        "Block Limit Warps": ["block", "3", "12"],
        "Theoretical Active Warps per SM": ["warp", "32", "8"],
        "Theoretical Occupancy": ["%", "66.67", "16.67"],
        "Achieved Occupancy": ["%", "54.13", "15.22"],
        "Achieved Active Warps Per SM": ["warp", "25.98", "7.31"],
    }
    workload = shown["Workload of each unit"]
    assert workload["Total Elapsed Cycles"] == ["cycle", "2779092468", "100%", "1923896232", "100%"]
    assert workload["Total SMSP Elapsed Cycles"] == ["cycle", "1534647928", "55.22%", "1062388064", "55.22%"]
    assert workload["Average L2 Active Cycles"] == ["cycle", "759107.04", "-", "903918.92", "-"] and len(workload) == 11


def test_extremes_and_mean_over_launches(tmp_path):
    shown = written(tmp_path, "--csv", str(PROFILES / "many-launches-raw.csv"))["by title"]
    assert shown["By nvprof's names"] == {
        "achieved_occupancy": ["0.497484", "0.497778", "0.497623"],
        "sm_efficiency": ["84.52%", "90.70%", "90.08%"],
        "shared_load_throughput": ["2517.7 GB/s", "2772.1 GB/s", "2699.5 GB/s"],
        "shared_store_throughput": ["178.56 GB/s", "222.94 GB/s", "196.92 GB/s"],
        "gld_throughput": ["22.859 GB/s", "27.174 GB/s", "23.84 GB/s"],
        "gst_throughput": ["3.5315 GB/s", "3.9333 GB/s", "3.8247 GB/s"],
    }


# ---- the raw page

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"


def raw(*launches: dict[str, str], units: dict[str, str]) -> str:
    """A raw page made for a test: launches as {column: text}, each with its kernel's name."""
    facts = ["ID", "Kernel Name", "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg", "CC"]
    names = [*facts, *units]
    lines = [names, ["", "", "", "", *units.values()]]
    lines += [
        [str(n), launch["kernel"], "", "9.0", *(launch.get(name, "n/a") for name in units)] for n, launch in enumerate(launches)
    ]
    return "some output\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines) + "\n==PROF== done\n"


TIME, READ, WRITE, CLOCK = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "sm__cycles_elapsed.avg.per_second",
)
UNITS = {TIME: "us", READ: "Mbyte", WRITE: "Kbyte", CLOCK: "Ghz"}
MAIN = {"kernel": "forward_kernel", TIME: "1,000", READ: "60", WRITE: "20,000", CLOCK: "1.22"}
SMALL = {"kernel": "void ns::redo_kernel<float, 128>(float *)", TIME: "2", READ: "0", WRITE: "0", CLOCK: "1.22"}


def profile_of(tmp_path, *launches, units=UNITS, options=()):
    path = tmp_path / "raw.csv"
    path.write_text(raw(*launches, units=units))
    return written(tmp_path, "--csv", str(path), *options)


def test_bank_conflicts_and_their_share(tmp_path):
    launch = {"kernel": "k", CONFLICTS: "250", WAVEFRONTS: "1,000"}
    shared = profile_of(tmp_path, launch, units={CONFLICTS: "", WAVEFRONTS: ""})["by title"]["Shared memory"]
    assert shared == {
        "Bank Conflicts, Loads": ["", "250"],
        "Wavefronts, Loads": ["", "1000"],
        "Conflicts of Wavefronts, Loads": ["%", "25"],
    }


def test_stall_reasons_are_sorted_and_have_shares(tmp_path):
    units = {STALL.format(reason): "inst" for reason in ("wait", "gmma", "barrier")}
    cycles = dict(zip(units, ("1.5", "6.0", "2.5"), strict=True))
    stalls = profile_of(tmp_path, {"kernel": "k"} | cycles, units=units)["by title"][
        "Stalls: cycles between two instructions of a warp"
    ]
    assert list(stalls.items()) == [
        ("gmma", ["cycle", "6", "60.0%"]),
        ("barrier", ["cycle", "2.50", "25.0%"]),
        ("wait", ["cycle", "1.50", "15.0%"]),
    ]


def test_the_roofline_point_is_flops_over_time_and_over_traffic(tmp_path):
    """Two launches of 1 ms and 80 MB each, 4e11 FLOPs a launch."""
    report = profile_of(tmp_path, MAIN, MAIN, options=("--flops", "4e11"))
    point = report["subjects"][0]["roofline"]
    assert point == pytest.approx({"seconds": 1e-3, "bytes": 8e7, "flops": 4e14, "intensity": 5000})
    assert report["by title"]["Roofline, of a call"]["Performance"] == ["TFLOP/s", "400"]
    assert profile_of(tmp_path, MAIN)["subjects"][0]["roofline"] is None, "nobody said how many FLOPs"


def test_the_roof_is_at_the_clock_that_was_measured():
    launches = ncu.read(raw(MAIN, units=UNITS))
    h200 = Ceilings.of(KNOWN["H200"], torch.bfloat16)
    point = counters.roofline(counters.Subject("sm90", launches, 1, 4e11, h200))
    assert point["roof"] == point["peak"] == pytest.approx(989.4e12 * 1.22 / 1.83) and point["bandwidth"] == 4.8e12
    slow = counters.roofline(counters.Subject("sm90", launches, 1, 8e8, h200))
    assert slow["intensity"] == 10 and slow["roof"] == pytest.approx(10 * 4.8e12), "memory binds"


@pytest.mark.parametrize(
    ("gpu", "dtype", "tflops"),
    [
        *(("H200", "bf16", 989.4), ("H200", "fp16", 989.4), ("H200", "fp8", 1978.8), ("H200", "fp32", 989.4 / 6)),
        *(("A100", "fp32", 52), ("RTX 4090", "fp32", 82.6), ("T4", "fp16", 65), ("T4", "bf16", None), ("A100", "fp8", None)),
    ],
)
def test_the_roof_is_that_of_the_dtype(gpu, dtype, tflops):
    """The data sheets' dense rates; float32 by multiply-adds, or in three products of TF32 where that is faster."""
    found = profile._ceilings(replace(POINT, dtype=dtype), KNOWN[gpu])
    assert (found and found.matmul) == (tflops and pytest.approx(tflops * 1e12))


def test_the_details_page_gives_traffic_too():
    text = DETAILS.read_text().splitlines()
    place = '"0","1","p","h","fa","1","7","(1, 1, 1)","(1, 1, 1)","0","8.9"'
    rate = f'{place},"Memory Workload Analysis","Memory Throughput","Gbyte/second","2","","","","",""'
    launches = [launch for launch in ncu.read("\n".join([*text, rate])) if launch.kernel == "fa"]
    point = counters.roofline(counters.Subject("fa", launches, 1, 8.33e9))
    assert point == pytest.approx({"seconds": 8.33e-3, "bytes": 2e9 * 8.33e-3, "flops": 1e12, "intensity": 500})


def test_names_and_units():
    assert ncu.short("void ns::redo_kernel<float, 128>(float *)") == "redo_kernel" and ncu.short("fa(float *)") == "fa"
    units = {
        "ms": 1e-3,
        "usecond": 1e-6,
        "Ghz": 1e9,
        "Kbyte/block": 1e3,
        "cycle/nsecond": 1e9,
        "1/ns": 1e9,
        "%": 1,
        "": 1,
        "Tbyte/s": 1e12,
    }
    assert {unit: pytest.approx(ncu.factor(unit)) for unit in units} == units
    assert ncu.Value(1500, "us").to("ms") == 1.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "must be a readable CSV file, got"),
        ("==ERROR== nothing\n", "without a line that names its columns"),
        ('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n', "must hold a launch, got"),
    ],
)
def test_what_is_no_profile_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "a.csv"
    if text is not None:
        path.write_text(text)
    result = run("profile", "--csv", str(path))
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


MEASURED = Path(__file__).parents[2] / "docs/lab/profile-h200.json"


def shown(text: str) -> list[str]:
    """The words in an SVG: Matplotlib's notes above the outlines."""
    return re.findall("<!-- (.*) -->", text)


def test_the_picture_of_a_result_shows_throughputs_stalls_and_the_roof(tmp_path):
    """Of the profile in the documentation, of two kernels, and of its first alone."""
    report = json.loads(MEASURED.read_text())
    (tmp_path / "one.json").write_text(json.dumps(report | {"subjects": report["subjects"][:1]}))
    words = []
    for path in (tmp_path / "one.json", MEASURED):
        result = run("profile", "--report", str(path), "--out", str(tmp_path / "p.svg"))
        assert result.exit_code == 0 and "Share of the Roof" in result.output, result.output
        words.append(shown((tmp_path / "p.svg").read_text()))
    one, two = words
    ours = {"Compute (SM) Throughput", "Achieved Occupancy", "barrier", "639 TFLOP/s, 91% of the roof", "sm90"}
    theirs = {"297 TFLOP/s, 40% of the roof", "portable"}
    assert ours <= set(one) and not theirs & set(one) and ours | theirs <= set(two)
    assert "sleeping" not in one, "next to nothing"
    assert one.count("91.2") == two.count("91.2") == 1 and two.count("40.5") == 1 and "40.5" not in one


def test_the_picture_of_a_csv_has_what_was_measured(tmp_path):
    """No stalls and no traffic in it: throughputs alone."""
    result = run("profile", "--csv", str(DETAILS), "--out", str(tmp_path / "p.svg"))
    assert result.exit_code == 0, result.output
    words = shown((tmp_path / "p.svg").read_text())
    assert {"fa", "fa_tc_v1", "91.2", "67.5", "54.1", "15.2"} <= set(words) and "FLOPs a byte of DRAM" not in words
    assert run("profile", "--csv", str(DETAILS), "--out", str(tmp_path / "p.png")).exit_code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_without_anything_to_draw_says_so(tmp_path):
    (tmp_path / "raw.csv").write_text(raw({"kernel": "k", CONFLICTS: "250"}, units={CONFLICTS: ""}))
    result = run("profile", "--csv", str(tmp_path / "raw.csv"), "--out", str(tmp_path / "p.png"))
    assert result.exit_code == 2 and "a picture needs throughputs, stalls or a point on the roofline" in result.output
    report = profile_of(tmp_path, {"kernel": "k", CONFLICTS: "250"}, units={CONFLICTS: ""})
    shown = html.of_profile(report)
    assert "picture" not in {piece.kind for piece in shown} and "Bank Conflicts, Loads" in str(shown)
    assert "picture" in {piece.kind for piece in html.of_profile(json.loads(MEASURED.read_text()))}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--flops 1e9", "flops goes with csv, got 1e+09 without one"),
        (f"--csv {DETAILS} --head-dim 64 --backends sm90", "csv must be given without head-dim, backends, which"),
        (f"--report {MEASURED} --csv {DETAILS}", "report must be given without csv, which would change nothing"),
        (f"--csv {DETAILS} --flops 1e9", "flops needs a profile with durations and DRAM traffic"),
        (f"--report {DETAILS}", "a result of strobe profile must be a JSON file, got"),
        (f"--csv {DETAILS} --out nowhere/p.png", "a file to write must be in a folder that is there and takes it"),
        ("--dtype int8", "dtype must be one of bf16, fp16, fp32, fp8, got 'int8'"),
    ],
)
def test_options_that_would_change_nothing_are_refused(options, words):
    result = run("profile", *options.split())
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


def test_files_of_the_same_kernel_are_told_apart(tmp_path):
    for name in ("before", "after"):
        (tmp_path / f"{name}.csv").write_text(raw(MAIN, units=UNITS))
    report = written(tmp_path, "--csv", str(tmp_path / "before.csv"), "--csv", str(tmp_path / "after.csv"))
    assert report["tables"][0]["head"] == ["metric", "unit", "before: forward_kernel", "after: forward_kernel"]


# ---- ncu itself


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Installs a script as ncu, and returns what it was called with; the machine has an H200 as far as `profile` knows."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()

    def install(says: str = "", page: str = "", status: int = 0):
        (tmp_path / "says").write_text(says)
        (tmp_path / "page").write_text(page)
        script = folder / "ncu"
        script.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$*" >> {calls}\n'
            f'case "$*" in *"--page raw"*) cat {tmp_path}/page;; *"--page details"*) cat {DETAILS} | head -3;;'
            f" *) cat {tmp_path}/says; exit {status};; esac\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    monkeypatch.setattr(profile, "arch_of", lambda device: KNOWN["H200"])
    install.calls = lambda: calls.read_text().splitlines()
    return install


POINT = Point(4, 4096, 16, 16, 128, 128, "bf16", "full", False)


def test_each_backend_is_profiled_in_a_process_of_its_own(fake_ncu):
    fake_ncu(page=raw(MAIN, SMALL, MAIN, SMALL, units=UNITS))
    subjects = profile.profile_backends(POINT, ("sm90", "portable"), "kernel$", 2)
    assert [subject.name for subject in subjects] == ["sm90", "portable"]
    first, details, page, *others = fake_ncu.calls()
    assert len(others) == 3 and "--profile-from-start off" in first and "--kernel-name regex:kernel$" in first
    assert (
        f"{sys.executable} -m strobe.lab.counters.profiled" in first and '"backend": "sm90"' in first and '"calls": 2' in first
    )
    assert "--import" in details and "--csv --page details" in details and "--csv --page raw" in page
    assert subjects[0].kernels.keys() == {"forward_kernel", "redo_kernel"}
    point = counters.roofline(subjects[0])
    flops = 4 * 4 * 16 * 4096 * 4096 * 128
    assert point["seconds"] == pytest.approx(1002e-6) and point["flops"] == pytest.approx(flops / 1002e-6)
    tables = {table.title: table for table in counters.tables(subjects)}
    assert tables["Kernels of a call; the tables below are of the first"].rows[0] == [
        "forward_kernel",
        "sm90",
        "1",
        "1000",
        "99.8%",
    ]
    assert tables["Throughput"].rows[-1] == ["Duration", "us", "1000", "1000"]


@pytest.mark.parametrize(
    ("says", "status", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access", 1, "ERR_NVGPUCTRPERM"),
        ("==WARNING== No kernels were profiled.", 0, "kernel must be a part of a kernel's name"),
        ("==PROF== Connected\n==ERROR== The application failed (1).\nmore", 9, "status 9: ==ERROR== The application"),
    ],
)
def test_what_ncu_cannot_do_is_one_sentence(fake_ncu, says, status, words):
    fake_ncu(says, status=status)
    with pytest.raises(ValueError, match=words):
        profile.profile_backends(POINT, (None,), "nothing", 1)


def test_a_backend_that_refuses_is_not_profiled(fake_ncu):
    fake_ncu()
    for changes, backend, reason in (
        ({}, "torch_cpu", "torch_cpu: runs on a CPU only"),
        ({"dtype": "fp8"}, "portable", "portable: takes float16, bfloat16 and float32, not float8"),
        ({"dtype": "fp8", "backward": True}, None, "sm90_fp8: has no backward"),
        ({"dtype": "fp8", "head_dim": 72}, "sm90_fp8", "sm90_fp8: takes head dims up to 256 in multiples of 16"),
    ):
        with pytest.raises(ValueError, match=rf"needs a kernel that runs .* got none on H200.*: {reason}"):
            profile.profile_backends(replace(POINT, **changes), (backend,), None, 1)


def test_the_kernel_of_fp8_is_profiled(fake_ncu):
    fake_ncu(page=raw(MAIN, units=UNITS))
    (subject,) = profile.profile_backends(replace(POINT, dtype="fp8"), (None,), None, 1)
    assert subject.name == "sm90_fp8" and '"dtype": "fp8"' in fake_ncu.calls()[0]
    assert counters.roofline(subject)["peak"] == pytest.approx(2 * 989.4e12 * 1.22 / 1.83)


def test_without_ncu_there_is_one_sentence(monkeypatch):
    monkeypatch.setenv("PATH", "")
    result = run("profile")
    assert result.exit_code == 2 and "needs Nsight Compute, got no ncu on the PATH" in result.output


def test_only_the_calls_after_the_warm_up_are_profiled(monkeypatch):
    seen = []
    monkeypatch.setattr(profiled, "bind", lambda peer, point, inputs: lambda: seen.append(peer.name))
    monkeypatch.setattr(profiled.Inputs, "random", lambda *_: None)
    generator = torch.Generator()
    monkeypatch.setattr(torch, "Generator", lambda device: generator)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: seen.append(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    profiled.main({"point": vars(POINT), "backend": "sm90", "calls": 2})
    assert seen == ["strobe sm90"] * 3 + ["wait", "start"] + ["strobe sm90"] * 2 + ["wait", "stop"]


def test_rungs_that_are_not_done_in_time_are_named(fake_ncu, monkeypatch, tmp_path):
    fake_ncu(page=raw(MAIN, units=UNITS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ladder_profiled, "arch_of", lambda device: KNOWN["H200"])
    script = Path(shutil.which("ncu"))
    late_one = f'case "$*" in *\'"rung": 7\'*) sleep 100 & echo $! > {tmp_path}/watched; wait;; esac'
    script.write_text(script.read_text().replace("#!/bin/sh", f"#!/bin/sh\n{late_one}"))
    subjects, late = ladder_profiled.profile_rungs(Problem(16, 1024, 128, "bf16"), RUNGS[6:9], 1, 3.0)
    assert [subject.name for subject in subjects] == [f"{n} {RUNGS[n].title}" for n in (6, 8)] and late == [RUNGS[7]]
    state = Path("/proc", (tmp_path / "watched").read_text().strip(), "stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "what ncu watches is still there"


def test_every_number_is_shown_whole_however_many_kernels_there_are(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    [one, _] = profile.of_files([DETAILS])
    many = [replace(one, name=f"{n} what changes in registers") for n in range(8)]
    profile.show(profile.report_of(many, "strobe profile", {"name": "H100"}))
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert shown.count("6623369") == len(many), "each has its elapsed cycles"
