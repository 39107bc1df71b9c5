"""``python -m launcher.cli``: the `xserve` command where the script is not on PATH."""

from launcher.cli.main import run

run()
