"""Options that every command for a live server takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvdefrag.operate.server import Server

_SERVER = "Server"

Url = Annotated[
    str,
    typer.Option(help="Address of the server, such as http://localhost:30000.",
                 rich_help_panel=_SERVER),
]  # fmt: skip
OptionalUrl = Annotated[
    str | None,
    typer.Option(help="Address of a running server, such as http://localhost:30000.",
                 rich_help_panel=_SERVER),
]  # fmt: skip
ApiKey = Annotated[
    str | None,
    typer.Option(help="The server's --api-key.", envvar="SGLANG_API_KEY", rich_help_panel=_SERVER),
]
AdminKey = Annotated[
    str | None,
    typer.Option(help="The server's --admin-api-key.", envvar="SGLANG_ADMIN_API_KEY",
                 rich_help_panel=_SERVER),
]  # fmt: skip


def connect(url: str, api_key: str | None, admin_key: str | None) -> Server:
    """Return the server that the options name."""
    from kvdefrag.operate.server import Server

    return Server(url, api_key=api_key, admin_key=admin_key)
