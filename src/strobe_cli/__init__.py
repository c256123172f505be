"""The `strobe` command. It stands beside the package `strobe`, whose import takes a second, so that `strobe --help` answers at
once; what a command needs is imported when it runs."""
