"""`vitkit cache`: show or clear the cache."""

import click

from vitkit.cli.console import print_json, print_result, print_sections
from vitkit.core.formatting import format_bytes


@click.group("cache", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Show the location and size of the cache of compiled kernels and image features.

    VITKIT_CACHE moves the cache. VITKIT_CACHE_LIMIT changes its size limit, for example to 20GB; the least recently
    used entries are removed first.

    \b
    vitkit cache
    vitkit cache clear
    """
    if context.invoked_subcommand is not None:
        return
    import vitkit

    info = vitkit.cache_info()
    if as_json:
        print_json(info.to_dict())
        return
    sizes = [(name, format_bytes(size)) for name, size in info.sizes.items()]
    total = f"{format_bytes(info.size_bytes)} of at most {format_bytes(info.limit_bytes)}"
    print_sections({"Cache": [("path", str(info.path)), ("size", total), *sizes]})


@command.command("clear")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def clear(as_json: bool) -> None:
    """Remove everything from the cache. Kernels and features are computed again when needed."""
    import vitkit

    removed = vitkit.clear_cache()
    text = f"removed {format_bytes(removed.size_bytes)} from {removed.path}"
    print_result(removed, lambda _: click.echo(text), as_json=as_json)
