"""`strobe simulate`: our kernels and a user's file, right and wrong."""

from pathlib import Path

import pytest
from tritons import needs_tcgen05
from typer.testing import CliRunner

from strobe_cli.app import app

GEMM = Path(__file__).parents[2] / "examples" / "gemm"


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, ["simulate", *arguments])


def test_our_kernel_in_every_order():
    result = run("--seqlen-q", "70", "--seqlen-kv", "130", "--causal", "--heads", "2", "--heads-kv", "1", "--seeds", "2")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()[1:]]
    assert [row[:2] for row in rows] == [[*pair] for pair in (
        ("in_order", "0"), ("random", "0"), ("random", "1"), ("late", "0"), ("late", "1"), ("early", "0"),
        ("uneven", "0"), ("uneven", "1"),
    )]  # fmt: skip
    assert all(row[-1] == "right" for row in rows)


def test_a_file_and_its_timeline(tmp_path):
    picture = tmp_path / "gemm.png"
    result = run(str(GEMM / "sm80.py"), "--orders", "in_order", "--timeline", str(picture))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[1].split()[-1] == "right"
    assert picture.read_bytes().startswith(b"\x89PNG")


def broken(tmp_path: Path, before: str, after: str) -> str:
    """The Hopper GEMM with one change."""
    text = (GEMM / "sm90.py").read_text()
    assert text.count(before) == 1
    (tmp_path / "check.py").write_text((GEMM / "check.py").read_text())
    path = tmp_path / "changed_gemm.py"
    path.write_text(text.replace(before, after))
    return str(path)


def test_a_mistake_is_told_with_its_line(tmp_path):
    path = broken(tmp_path, "        fence_async_shared()\n        partition_barrier()", "        partition_barrier()")
    result = run(path, "--orders", "early")
    assert result.exit_code == 1
    assert "MissingFence" in result.output.splitlines()[1]
    assert "changed_gemm.py:" in result.output and "no fence_async_shared" in result.output


def test_wrong_numbers_are_told(tmp_path):
    result = run(broken(tmp_path, "acc.to(c_desc.dtype)", "(acc * 2.0).to(c_desc.dtype)"), "--orders", "early")
    assert result.exit_code == 1
    assert "wrong numbers" in result.output.splitlines()[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.py"], "FILE must be a Python file, got nowhere.py"),
        (["--backend", "sm70"], "backend must be one of sm80, sm90, sm90 short, sm100, got 'sm70'"),
        (["--orders", "timed"], "orders must be one of in_order, random, late, early, uneven, got 'timed'"),
        (["--seeds", "0"], "seeds must be 1 or more, got 0"),
        pytest.param(["--backend", "sm100", "--config", "q_stages=3"], "q_stages must be 1 or 2, got 3", marks=needs_tcgen05),
        (["--heads", "3", "--heads-kv", "2"], "heads must be a multiple of heads-kv, got 3 and 2"),
        (["--head-dim", "100"], "head-dim must be a multiple of 8 from 8 to 256, got 100"),
        pytest.param(["--backend", "sm100", "--head-dim", "256"], "sm100 takes head dims 64, 96 and 128", marks=needs_tcgen05),
        (["--dtype", "fp32"], "sm90 takes float16 and bfloat16, not float32"),
    ],
)
def test_wrong_options(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_file_without_a_launch(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("")
    result = run(str(path))
    assert result.exit_code == 2
    assert "must define simulation()" in result.output


@pytest.mark.parametrize(
    "text, words",
    [
        ("x =", "FILE must be Python that can be imported, got file.py: SyntaxError: invalid syntax (file.py, line 1)"),
        ("import nowhere_at_all", "got file.py: ModuleNotFoundError: No module named 'nowhere_at_all' (file.py, line 1)"),
        ("def simulation():\n    return 3", "simulation() of file.py must return a strobe.sim.Launch, got int"),
        ("def simulation():\n    return 1 // 0", "simulation() of file.py failed: ZeroDivisionError: "),
    ],
)
def test_a_file_that_fails_is_one_sentence_with_its_place(text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.py").write_text(text)
    result = run("file.py")
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output, result.output
