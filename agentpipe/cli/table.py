"""``agentpipe table``: show, diff, set, rollback and history of the disturbance table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import print_json, reporting, say
from agentpipe.errors import AgentpipeError, TableError

if TYPE_CHECKING:
    from agentpipe.environments.table import DisturbanceTable, TableDiff
    from agentpipe.environments.table_store import Change, TableStore

app = typer.Typer(name="table", help="The disturbance table: its rows, versions and changes.", no_args_is_help=True)

Who = Annotated[str, typer.Option("--who", help="Who changes it.")]
Why = Annotated[str, typer.Option("--why", help="Why it is changed.")]
Version = Annotated[str, typer.Argument(help="A version: its name, six or more of its first characters, or 'current'.")]


@app.command()
def show(
    home: Home = None,
    version: Annotated[str, typer.Option("--version", help="A kept version instead of the current one.")] = "current",
    cell: Annotated[str | None, typer.Option("--cell", help="Only this cell, such as sensor-3.")] = None,
    as_json: Json = False,
) -> None:
    """Shows the rows of a version; on an empty home the project's table is taken in first."""
    with reporting(as_json):
        store = _store(home)
        table, warning = _open(store, version)
        rows = table.cell_rows(cell) if cell is not None else tuple(range(len(table)))
        if as_json:
            print_json(_table_json(store, table, rows, warning))
            return
        typer.echo(f"version {table.version}")
        typer.echo(f"source  {store.source_path}")
        for index in rows:
            typer.echo(_row_text(table, index))
        if warning:
            typer.echo(warning, err=True)


@app.command()
def diff(
    a: Version,
    b: Version,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Shows what turns version A into version B."""
    with reporting(as_json):
        store = _store(home)
        names = {"before": store.resolve(a), "after": store.resolve(b)}
        difference = store.diff(a, b)
        if as_json:
            print_json({**names, **difference.to_json()})
            return
        _print_diff(difference)


@app.command("set")
def set_(
    assignments: Annotated[list[str], typer.Argument(metavar="COLUMN=VALUE...", help="What the rows get.")],
    where: Annotated[str, typer.Option("--where", help="Which rows: kind = sensor and intensity >= 3")],
    who: Who = "",
    why: Why = "",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Changes rows, as a new version with its author and reason."""
    with reporting(as_json):
        store = _store(home)
        change = store.set(where, _parse_assignments(assignments), who, why)
        _print_change(change, _distribute(store), as_json)


@app.command()
def rollback(
    version: Version,
    who: Who = "",
    why: Why = "",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Makes a kept version current again; also the way out of a source file that is not valid."""
    with reporting(as_json):
        store = _store(home)
        change = store.rollback(version, who, why)
        _print_change(change, _distribute(store), as_json)


@app.command()
def history(
    home: Home = None,
    env: Annotated[str | None, typer.Option("--env", help="Only changes of this environment's disturbance.")] = None,
    as_json: Json = False,
) -> None:
    """Lists every change: who, why, when (UTC) and what; for one environment with its fingerprints."""
    with reporting(as_json):
        store = _store(home)
        if env is None:
            lines = [entry.to_json() for entry in store.history()]
        else:
            _known_environment(env)
            lines = [
                {**entry.to_json(), "variant": row.variant, "fingerprint": print_._asdict()}
                for entry, row, print_ in store.environment_history(env)
            ]
        if as_json:
            print_json({"environment": env, "changes": lines})
            return
        for line in lines:
            typer.echo(_entry_text(line))


# --------------------------------------------------------------------------------------------------- inside


def _store(home: Path | None) -> TableStore:
    from agentpipe.environments.table_store import TableStore
    from agentpipe.settings import load_settings

    settings = load_settings(home=home)
    return TableStore(settings.home, source=settings.table_source)


def _distribute(store: TableStore) -> dict[str, Any] | None:
    """Publishes where a Redis is set. Where that fails, the change stands, and the next run publishes it."""
    from agentpipe.environments.table_redis_home import publish_current
    from agentpipe.settings import load_settings

    redis_url = load_settings().redis_url
    if redis_url is None:
        return None
    try:
        publish_current(store, redis_url)
    except AgentpipeError as error:
        return {"published": False, "error": error.as_dict()}
    return {"published": True}


def _open(store: TableStore, version: str) -> tuple[DisturbanceTable, str]:
    """The table, and a warning when the source holds something else than the current version."""
    if not store.started():
        return store.refresh(), ""
    table = store.load(version)
    try:
        pending = store.unpublished()
    except TableError as error:
        return table, f"the source is not valid and is not used: {error}"
    if pending is None:
        return table, ""
    return (
        table,
        f"the source was edited: cells {', '.join(pending.cells)} change when disturbance_table is materialised",
    )


def _known_environment(environment_id: str) -> None:
    from agentpipe.environments.catalog import load_catalog

    load_catalog().environment(environment_id)


def _parse_assignments(assignments: list[str]) -> dict[str, float]:
    from agentpipe.environments.csvio import parse_number

    values: dict[str, float] = {}
    for text in assignments:
        column, equals, value = (part.strip() for part in text.partition("="))
        number = parse_number(value)
        if not equals or number is None:
            remedy = "write COLUMN=VALUE, such as sensor_sigma=0.4"
            raise TableError(f"not an assignment of a number: {text!r}", field=column or None, remedy=remedy)
        if column in values:
            raise TableError(f"{column} is set twice", field=column, remedy="give each column once")
        values[column] = number
    return values


def _table_json(store: TableStore, table: DisturbanceTable, rows: tuple[int, ...], warning: str) -> dict[str, Any]:
    from agentpipe.environments.parameters import PARAMETER_NAMES

    listed = [
        {
            "kind": table.rows[i].kind,
            "intensity": table.rows[i].intensity,
            "variant": table.rows[i].variant,
            "fingerprint": table.row_fingerprint(i)._asdict(),
            **dict(zip(PARAMETER_NAMES, table.rows[i].values, strict=True)),
        }
        for i in rows
    ]
    return {
        "version": table.version,
        "source": str(store.source_path),
        "warning": warning or None,
        "cell_digests": dict(table.cell_digests),
        "rows": listed,
    }


def _row_text(table: DisturbanceTable, index: int) -> str:
    from agentpipe.environments.parameters import PARAMETER_NAMES

    row = table.rows[index]
    values = " ".join(f"{name}={value:g}" for name, value in zip(PARAMETER_NAMES, row.values, strict=True) if value)
    return f"{row.cell:<10} variant {row.variant}  {table.row_fingerprint(index).crc32}  {values}"


def _print_diff(difference: TableDiff) -> None:
    for change in difference.changed:
        place = f"{change.kind}-{change.intensity} variant {change.variant}"
        typer.echo(f"{place}: {change.column} {change.before:g} → {change.after:g}")
    for sign, keys in (("added", difference.added), ("removed", difference.removed)):
        for kind, intensity, variant in keys:
            typer.echo(f"{kind}-{intensity} variant {variant}: {sign}")
    typer.echo(f"cells that differ: {', '.join(difference.cells) or 'none'}")


def _print_change(change: Change, redis: dict[str, Any] | None, as_json: bool) -> None:
    if as_json:
        entry = change.entry.to_json() if change.entry else None
        print_json({"version": change.version, "entry": entry, "redis": redis, **change.diff.to_json()})
        return
    _print_diff(change.diff)
    typer.echo(f"version {change.version}" + ("" if change.entry else " (nothing changed)"))
    if redis is not None and redis["published"]:
        typer.echo("published in Redis")
    elif redis is not None:
        error = redis["error"]
        say(
            f"The change is made, but not published in Redis: {error['message']} - {error['remedy']}. Once that is "
            "mended, materialising disturbance_table publishes it."
        )


def _entry_text(line: dict[str, Any]) -> str:
    cells = "all cells" if len(line["cells"]) == 15 else ", ".join(line["cells"])
    text = f"{line['number']:>4}  {line['at']}  {line['action']:<8}  {line['after'][:12]}  {line['who']}: {line['why']}"
    seen = f"  fingerprint {line['fingerprint']['crc32']}" if "fingerprint" in line else ""
    return f"{text}  [{cells}]{seen}"
