"""``agentpipe bundle``: looking after Triton bundles, and what production serves of them."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import print_json, reporting, say
from agentpipe.cli.progress import showing

if TYPE_CHECKING:
    from agentpipe.serving.production import Production
    from agentpipe.serving.repository import Published
    from agentpipe.serving.server import TritonServer
    from agentpipe.serving.server_check import ServerCheck
    from agentpipe.settings import Settings

app = typer.Typer(name="bundle", help="Triton bundles, and what production serves of them.", no_args_is_help=True)

Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The bundle: a Triton model repository.")]
Who = Annotated[str, typer.Option("--who", help="Who publishes.")]
Why = Annotated[str, typer.Option("--why", help="Why.")]


@app.callback()
def group() -> None:
    """Triton bundles, and what production serves of them."""


@app.command()
def verify(path: Bundle, home: Home = None, as_json: Json = False) -> None:
    """Checks a bundle again: every file's SHA-256, configuration against graph, decisions against the graph."""
    with reporting(as_json):
        from agentpipe.serving.verify import verify_bundle

        del home  # a bundle stands on its own
        report = verify_bundle(path)
        if as_json:
            print_json(report.to_json())
            return
        typer.echo(f"{path}: whole and consistent")
        for name, value in report.to_json().items():
            typer.echo(f"  {name}: {value}")


@app.command()
def check(path: Bundle, home: Home = None, as_json: Json = False) -> None:
    """Puts a bundle into a real Triton and looks at it from all sides: the one at AGENTPIPE_TRITON_URL, or one started.

    What passed before is looked at again. Nothing is published.
    """
    with reporting(as_json):
        from agentpipe.errors import NoServerError
        from agentpipe.serving.places import INSTALL, find_place
        from agentpipe.serving.server_check import PASSED, check_in_server

        place = find_place(_settings(home))
        if place is None:
            raise NoServerError("no Triton is installed here", remedy=INSTALL)
        with showing("server check") as progress:
            found = check_in_server(path, place, progress=progress)
        if as_json:
            print_json({"ok": found.status == PASSED, "check": found.to_json()})
        else:
            _print_check(found)
    if found.status != PASSED:
        raise typer.Exit(1)


@app.command()
def publish(
    path: Annotated[
        Path | None, typer.Argument(metavar="BUNDLE", help="The bundle.", show_default="the champion's")
    ] = None,
    who: Who = "",
    why: Why = "",
    force: Annotated[
        bool, typer.Option("--force", help="Also one that is not promotable, or whose server check was skipped.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace a model of another signature, without its earlier versions."),
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Makes production serve a bundle: as a new version folder that appears by one rename.

    A bundle that is named is put into a real server first, and needs --who and --why. Without one the champion's is
    served, which a promotion does by itself; after one that was interrupted, this does the rest.
    """
    with reporting(as_json):
        from agentpipe.serving.deployment import publish_bundle, serve_champion

        settings = _settings(home)
        if path is None:
            _report(serve_champion(settings, replace=replace), settings, as_json)
            return
        with showing("server check") as progress:
            entry, _ = publish_bundle(
                settings, path, who=who, reason=why, force=force, replace=replace, progress=progress
            )
        _report(entry, settings, as_json)


@app.command(name="list")
def list_versions(home: Home = None, as_json: Json = False) -> None:
    """Lists every version that was published: which bundle, by whom and why, and whether it is served, or damaged."""
    with reporting(as_json):
        from agentpipe.serving.deployment import list_published

        found = list_published(_settings(home))
        if as_json:
            print_json({"ok": True, **found})
            return
        typer.echo(f"For a Triton in poll mode over {found['repository']}:")
        if not found["versions"]:
            typer.echo("Nothing was published yet: a promotion does it, or agentpipe bundle publish BUNDLE.")
        for entry in found["versions"]:
            _print_version(entry)
        if any(entry["damage"] for entry in found["versions"]):
            typer.echo("What is damaged is not what was published: agentpipe bundle publish publishes it again.")
        if found["champion_served"] is False:
            typer.echo("The champion's bundle is not the one that is served: agentpipe bundle publish serves it.")


@app.command()
def rollback(
    version: Annotated[
        int | None, typer.Argument(help="The version to serve again.", show_default="the one before")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Serves an earlier version again, or one that was withdrawn. The champion stays: see champion rollback."""
    with reporting(as_json):
        from agentpipe.serving.deployment import roll_back_served

        settings = _settings(home)
        _report(roll_back_served(settings, version), settings, as_json)


@app.command()
def serve(
    http_port: Annotated[
        int, typer.Option("--http-port", min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")
    ] = 8000,
    grpc_port: Annotated[
        int, typer.Option("--grpc-port", min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")
    ] = 8001,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Starts the installed Triton over what production serves, on 127.0.0.1, until Ctrl-C.

    It follows the repository: another version that is published or brought back is served within seconds.
    """
    with reporting(as_json):
        from agentpipe.serving.production import find_production

        found = find_production(_settings(home))
        # A background job of a shell has SIGINT ignored, and what it starts inherits that: undone before it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
                say("Starting Triton …")
                with found.start(http_port=http_port, grpc_port=grpc_port) as server:
                    _tell_serving(server, found, as_json)
                    server.wait()
        finally:
            signal.signal(signal.SIGTERM, previous)
        say("Triton has ended.")


@app.command(name="install-triton")
def install_triton(as_json: Json = False) -> None:
    """Installs a Triton for server checks (about 330 MB from the package registry), unless it is there."""
    with reporting(as_json):
        from agentpipe.serving.triton_install import install_triton as install

        with showing("install triton") as progress:
            found = install(progress=progress)
        if as_json:
            print_json({"ok": True, "server": str(found.binary)})
            return
        typer.echo(f"Triton: {found.binary}")


# --------------------------------------------------------------------------------------------------- inside


def _settings(home: Path | None) -> Settings:
    from agentpipe.settings import load_settings

    return load_settings(home=home)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tell_serving(server: TritonServer, found: Production, as_json: bool) -> None:
    """Says where a server answers, with what, and a line to try."""
    from agentpipe.serving.production import POLL_SECONDS, line_to_try

    entry, models, line = found.entry, found.models, line_to_try(server.grpc)
    if as_json:
        served = {"model": entry.model, "version": entry.version, "repository": str(models)}
        print_json({"ok": True, "http": f"http://{server.http}", "grpc": server.grpc, **served, "try": line})
        sys.stdout.flush()
        return
    typer.echo(f"http://{server.http}  and over gRPC  {server.grpc}  (Ctrl-C ends it)")
    typer.echo(f"{entry.model}/{entry.version} of {models}, looked at every {POLL_SECONDS} s; log: {server.log_path}")
    typer.echo(f"To try it:\n{line}")
    sys.stdout.flush()


def _report(entry: Published | None, settings: Settings, as_json: bool) -> None:
    from agentpipe.serving.deployment import list_published

    if entry is None:
        from agentpipe.errors import InputError

        raise InputError("there is no champion yet", remedy="name a bundle")
    found = list_published(settings)
    [now] = [each for each in found["versions"] if (each["model"], each["version"]) == (entry.model, entry.version)]
    if as_json:
        print_json({"ok": True, "repository": found["repository"], "published": now})
        return
    _print_version(now)


def _print_version(entry: dict[str, Any]) -> None:
    damage = f" ({entry['damage']})" if entry["damage"] else ""
    mark = ", the champion's" if entry["champion"] else ""
    typer.echo(
        f"{entry['model']}/{entry['version']:<4} {entry['state']:<9} bundle {entry['bundle'][:12]}  {entry['at']}  "
        f"{entry['who']}: {entry['reason']}{mark}{damage}"
    )


def _print_check(found: ServerCheck) -> None:
    server = found.server
    typer.echo(f"{found.status} in {server.get('name', 'a server')} {server.get('version', '')} ({server['place']})")
    for finding in found.findings:
        figures = ", ".join(f"{name} {value}" for name, value in finding.figures.items())
        typer.echo(f"  {'ok  ' if finding.passed else 'FAIL'} {finding.name}: {finding.reason or figures or 'yes'}")
    for name, value in found.latency.items():
        typer.echo(f"  {name}: {value}")
