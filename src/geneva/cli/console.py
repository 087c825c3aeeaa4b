"""`geneva console`: the web page of a database."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from geneva.cli.arguments import AsJson, Database, StorageOption
from geneva.cli.database import connect, read_storage_options
from geneva.cli.terminal import emit
from geneva.errors import MissingDependencyError
from geneva.render.text import how_to_install


def console(
    db: Database,
    *,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0: any free one.", min=0, max=65_535)] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            help="Ask for this token (16 characters or more) on every page; who has it may also "
            "cancel jobs. Without one the pages are read-only, and on this machine only.",
            envvar="GENEVA_CONSOLE_TOKEN",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Show the database in a browser: tables, views, jobs as they run, errors. Ctrl-C ends it.

    With --json the document says where, and comes when the console can be asked.
    """
    serve = _serve()
    uri = str(connect(db, storage_option).uri)  # what is wrong with it is said here
    given = read_storage_options(storage_option)
    options = {"announce": partial(_answer, uri)} if as_json else {}
    serve(uri, host=host, port=port, token=token, storage_options=given, **options)


def _answer(uri: str, address: str) -> None:
    emit({"database": uri, "console": address})


def _serve() -> Any:
    for needed in ("starlette", "uvicorn"):
        if find_spec(needed) is None:
            raise MissingDependencyError(
                f"The console needs {needed}, which is not installed: {how_to_install('console')}."
            )
    from geneva.console import serve

    return serve
