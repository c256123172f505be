"""A page in a headless browser, measured by a script in it; where no browser is installed such tests are skipped."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: one of {', '.join(NAMES)}")

_SCRIPT = "<script>addEventListener('load', () => {{ document.documentElement.dataset.found = JSON.stringify({}) }})</script>"
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom", "--virtual-time-budget=5000")


def measured(page: Path, width: int, expression: str):
    """The value of a JavaScript expression in a page that is so wide."""
    changed = page.with_name(f"measured-{page.name}")
    changed.write_text(page.read_text().replace("</body>", f"{_SCRIPT.format(expression)}</body>"))
    command = [BROWSER, *_OPTIONS, f"--window-size={width},900", changed.resolve().as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r'data-found="([^"]*)"', shown.stdout)
    assert found, shown.stderr
    return json.loads(unescape(found[1]))
