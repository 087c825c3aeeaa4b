"""The arguments and options that commands share, and how the shell completes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from typer.core import TyperGroup

from geneva.cli.database import connect_to_look
from geneva.cli.terminal import EXIT_CODES
from geneva.errors import UserInputError
from geneva.options import OptionInfo, option_infos
from geneva.render.plain import plain

if TYPE_CHECKING:
    from geneva.connection import Connection


def _without_type(option: Any) -> Any:
    """An option; of a flag help says no type, which nobody writes."""
    if getattr(option, "is_flag", False) and option.metavar is None:
        option.metavar = ""
    return option


class Group(TyperGroup):
    """A group of commands. Its help has panels; that of a command is plain, see `group`."""

    def __init__(self, **given: Any) -> None:
        """Make it of what typer hands it."""
        super().__init__(**{**given, "rich_markup_mode": "rich"})

    def get_params(self, ctx: Any) -> Any:
        """Its options, with those for completion and for help, which typer adds later."""
        return [_without_type(option) for option in super().get_params(ctx)]


def group(text: str, kind: type[Group] = Group, **settings: Any) -> typer.Typer:
    """A group of commands with this help.

    Panels cut the names of long options short where a terminal is narrow: commands have none.
    """
    return typer.Typer(cls=kind, help=text, no_args_is_help=True, rich_markup_mode=None, **settings)


def epilog(*examples: str) -> str:
    """The end of a command's help: examples, and what its exit codes mean."""
    return "\n\n".join([*(f"Example:  {example}" for example in examples), EXIT_CODES])


# ------------------------------------------------------------------------ completion, arguments


def complete_table(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of tables, for the shell; in trouble none, and no message."""
    return _complete(lambda db: db.all_table_names(), ctx, incomplete)


def complete_view(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of views, for the shell."""
    return _complete(lambda db: db.list_materialized_views(), ctx, incomplete)


def complete_column(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the table's computed columns, for the shell."""
    table = str(ctx.params.get("table"))
    return _complete(lambda db: list(db.open_table(table).computed_columns()), ctx, incomplete)


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of jobs, newest first, for the shell."""
    return _complete(lambda db: [job.job_id for job in db.list_jobs()], ctx, incomplete)


def _complete(
    names: Callable[[Connection], Iterable[str]], ctx: typer.Context, incomplete: str
) -> list[str]:
    try:
        db = connect_to_look(str(ctx.params["db"]), ctx.params.get("storage_option"))
        found = (name for name in names(db) if name.startswith(incomplete))
        # A shell would print what acts on its terminal.
        return [name for name in found if plain(name) == name]
    except Exception:  # noqa: BLE001  a prompt is no place for an error
        return []


Database = Annotated[
    str,
    typer.Argument(
        metavar="DB",
        help="The database: a folder, or a URI such as s3://bucket/path.",
        show_default=False,
    ),
]
TableName = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="The table's name, or a view's; TABLE@BRANCH for a branch, NAMESPACE$TABLE in a "
        "namespace.",
        autocompletion=complete_table,
        show_default=False,
    ),
]
ColumnName = Annotated[
    str,
    typer.Argument(
        metavar="COLUMN",
        help="The computed column.",
        autocompletion=complete_column,
        show_default=False,
    ),
]
ViewName = Annotated[
    str,
    typer.Argument(
        metavar="VIEW", help="The view's name.", autocompletion=complete_view, show_default=False
    ),
]
JobId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The job's id, or its first characters.",
        autocompletion=complete_job,
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, for programs.", metavar="")
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="A key or setting of the object store; can be given several times, and is never "
        "shown. In the variable they are separated by spaces. What the store's own variables say "
        "(AWS_ACCESS_KEY_ID, ...) counts too.",
        envvar="GENEVA_STORAGE_OPTIONS",
        show_default=False,
    ),
]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="SQL", help="Only rows that satisfy this condition."),
]


# ---------------------------------------------------------------- options of backfills, refreshes

_Command = TypeVar("_Command", bound=Callable[..., Any])


def takes_options(arguments: type[Any]) -> Callable[[_Command], _Command]:
    """Give a command the options of `arguments`, in place of its `**options`.

    The command is handed those that are not at their defaults.
    """
    known = option_infos(arguments)
    for name, (info, default) in list(known.items()):
        if info.other_word:
            said = f"Another word for --{name.replace('_', '-')}."
            known[info.other_word] = (replace(info, help=said), default)

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            return command(**{k: v for k, v in given.items() if k not in known or v != known[k][1]})

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [_parameter(name, *found) for name, found in known.items()]
        # --json and --storage-option stay last.
        parameters = [*own[:-2], *added, *own[-2:]]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return cast("_Command", run)

    return decorate


def _parameter(name: str, info: OptionInfo, default: Any) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}", help=info.help, metavar=info.metavar, min=info.minimum
    )
    kind: Any = info.kind if default is not None else info.kind | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=info.kind(default) if default is not None else None,
        annotation=Annotated[kind, option],
    )


# ------------------------------------------------------------------------- lists in an argument


def names(text: str | None) -> list[str] | None:
    """The names in `a,b,c`; None when nothing was given."""
    if text is None:
        return None
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise UserInputError(f"{text!r} names no column. Write them as a,b,c.")
    return found


def pairs(given: Iterable[str] | None, option: str) -> dict[str, str]:
    """Pairs of NAME=WHAT, in order."""
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, what = text.partition("=")
        if not equals or not name.strip() or not what.strip():
            raise UserInputError(f"{option} {text!r} is not of the form NAME=WHAT.")
        found[name.strip()] = what.strip()
    return found
