"""`python -m edgespec`: the command line where the `edgespec` script is not on the path."""

from __future__ import annotations

from edgespec.cli import main

main(prog_name="edgespec")
