"""The demo, end to end on the CPU, and that it fails where Strobe is wrong."""

import re
import subprocess
import sys

import pytest
import torch
from tritons import compiling

pytest.importorskip("transformers")

import strobe
from strobe.integrations import transformers as integration
from strobe_cli import demo


@pytest.fixture
def quick(monkeypatch):
    """One batch of few texts, on the CPU backends (other tests run kernels in Triton's interpreter)."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(demo, "TEXTS", demo.TEXTS[:6])
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "EXAMPLES", (5,))


SHORT = "from strobe_cli import demo; demo.TEXTS, demo.EXAMPLES, demo.ROUNDS = demo.TEXTS[:20], (14,), 1; demo.main()"


@pytest.mark.parametrize(
    "program, count",
    [
        pytest.param(["-c", SHORT], "20", id="short"),
        pytest.param(["-m", "strobe_cli.demo"], "60", id="whole", marks=pytest.mark.exhaustive),
    ],
)
def test_demo_end_to_end(program, count):
    done = subprocess.run([sys.executable, *program], capture_output=True, text=True, env=compiling(COLUMNS="160"))
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(\w+) +│ +(\w+) +│ +(\S+) +│ +(\S+) +│ +(\d+) of (\d+) +│ +(\S+) ", done.stdout)
    assert {attention for _, attention, *_ in rows} == {"eager", "sdpa", "strobe"}
    for dtype, attention, difference, cosine, same, texts, milliseconds in rows:
        assert float(milliseconds) > 0 and texts == count
        if attention == "strobe":
            assert same == count and float(cosine) > 0.999
            assert dtype != "float32" or float(difference) < 1e-5
    assert re.search(r"chosen +\w+", done.stdout) and "mask documents" in done.stdout
    assert "A telescope gathers light" in done.stdout
    assert re.search(r"sm90 forward.* 0 bytes spilled", done.stdout)
    for name in ("HGMMA", "UTMALDG", "MUFU.EX2"):
        assert int(re.search(rf"(\d+) {re.escape(name)}", done.stdout)[1]) > 0


def test_wrong_attention_fails(quick, monkeypatch):
    monkeypatch.setattr(integration, "attention", lambda *a, **k: strobe.attention(*a, **k) * 1.001)
    with pytest.raises(SystemExit, match=r"embeddings in torch.float32 differ by \S+, more than"):
        demo.main()


def test_another_nearest_text_fails():
    exact = torch.eye(4)[[0, 0, 1, 1]]
    other = torch.eye(4)[[0, 1, 0, 1]]
    runs = [demo.Run(torch.float32, "eager", exact, 1.0), demo.Run(torch.float16, "eager", other, 1.0)]
    with pytest.raises(SystemExit, match=r"in torch.float16 some texts have another nearest text"):
        demo.check([*runs, demo.Run(torch.float16, "strobe", other, 1.0)])


def test_the_model_may_be_elsewhere(quick, monkeypatch, tmp_path):
    monkeypatch.setenv("STROBE_DEMO_MODEL", str(tmp_path))
    with pytest.raises(SystemExit, match=r"STROBE_DEMO_MODEL must name a folder"):
        demo.main()
    monkeypatch.delenv("STROBE_DEMO_MODEL")
    (tmp_path / "model").symlink_to(demo.model_folder())
    monkeypatch.setenv("STROBE_DEMO_MODEL", str(tmp_path / "model"))
    assert demo.model_folder() == tmp_path / "model"


def test_importing_the_demo_does_not_import_sentence_transformers():
    heavy = "{'sentence_transformers', 'transformers'}"
    code = f"import sys, strobe_cli.demo as demo; demo.model_folder(); assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
