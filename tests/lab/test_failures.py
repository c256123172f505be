"""A failure in a report: one line, which tells what failed and nothing of its user's folders."""

import pytest

from strobe.lab.bench.failures import compact


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cannot open /home/me/lib/xqa.so: no such file\nand more", "cannot open xqa.so: no such file"),
        (
            "reads 4.8 TB/s of heads 64/8, see https://host/some/page",
            "reads 4.8 TB/s of heads 64/8, see https://host/some/page",
        ),
        ("\n  first words", "first words"),
    ],
)
def test_a_failure_is_a_line_without_folders(text, said):
    try:
        raise ValueError(text)
    except ValueError as error:
        assert compact(error).startswith(f"ValueError: {said} (test_failures.py:")
