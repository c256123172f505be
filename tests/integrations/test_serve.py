"""The example that serves requests: each has the tokens that it has alone, and gives its pages back."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serve

TINY = replace(serve.SMALL, requests=5, prompt=20, tokens=5, slots=3, pages=10, page=4, chunk=16)
CPU = torch.device("cpu")


@pytest.mark.parametrize("changes", [{}, {"page": 1, "pages": 40}, {"slots": 1}, {"chunk": 5, "heads_kv": 4, "wait": 0.01}])
def test_requests_have_the_tokens_that_they_have_alone(changes):
    s = replace(TINY, **changes)
    found, requests, model = serve.serve(s, CPU)
    assert found["tokens"] == sum(request.wants for request in requests) and len(found["first_token"]) == s.requests
    assert max(step["requests"] for step in found["steps"]) <= s.slots
    assert max(step["pages"] for step in found["steps"]) <= s.pages and found["steps"][-1]["pages"] == 0
    for request in requests:
        assert request.made == serve.alone(s, model, request, CPU)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "serve.json"
    options = [f"--{name}={getattr(TINY, name)}" for name in ("requests", "prompt", "tokens", "pages", "page")]
    assert serve.main([*options, "--device=cpu", "--check", f"--json={path}"]) == 0
    said = capsys.readouterr().out
    assert "first token, ms" in said and "5 of 5 requests have the tokens" in said
    assert json.loads(path.read_text())["settings"]["requests"] == 5
    with pytest.raises(SystemExit):
        serve.main(["--pages=2", "--device=cpu"])
