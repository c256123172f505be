"""The `strobe` command, run within the test's process."""

from typer.testing import CliRunner

from strobe_cli.app import app


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, list(arguments))
