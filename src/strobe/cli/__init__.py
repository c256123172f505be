"""The `strobe` command."""
