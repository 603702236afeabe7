"""`oncely completion`: the script with which a shell completes commands and options."""

import click
from click.shell_completion import get_completion_class

from oncely.cli import options

COMPLETE_VARIABLE = "_ONCELY_COMPLETE"
"""Set by the script when it asks for completions."""


@options.command("completion", "oncely completion bash > ~/.oncely-completion")
@click.argument(
    "shell", type=click.Choice(("bash", "zsh", "fish")), metavar="SHELL", help="bash, zsh, fish"
)
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script with which a shell completes commands and options."""
    found = get_completion_class(shell)
    assert found is not None  # noqa: S101 - click has all that are offered.
    print(found(ctx.find_root().command, {}, "oncely", COMPLETE_VARIABLE).source())
