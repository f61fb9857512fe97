"""`edgespec pull`: fetch a known pair and convert it. Options in, `pairs.pull` does the work, a line out."""

from __future__ import annotations

import click

from edgespec.cli.console import format_bytes, print_json, progress

__all__ = ["command"]


@click.command(name="pull")
@click.argument("name")
@click.option("--force", is_flag=True, help="Download and convert again, even if it is here.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout, no progress bar.")
def command(name: str, force: bool, as_json: bool) -> None:
    """Fetch NAME (see `edgespec list`, or the path of a manifest), convert it and the trained drafts that go with it.

    NAME:DRAFT makes a draft model of the manifest as well. What is in the cache is not downloaded again.
    EDGESPEC_OFFLINE=1 forbids downloads, EDGESPEC_HOME moves the cache.
    """
    from edgespec import pairs

    with progress(plain=as_json) as report:
        path = pairs.pull(name, progress=report, force=force)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if as_json:
        print_json({"name": name, "path": str(path), "bytes": size})
    else:
        click.echo(f"{name} is ready ({format_bytes(size)}): {path}")
