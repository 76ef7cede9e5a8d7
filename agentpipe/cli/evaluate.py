"""``agentpipe evaluate``: a policy package on one split, without Dagster."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentpipe.cli.options import Home, Json, Seed, Threads
from agentpipe.cli.output import player_table, print_json, reporting
from agentpipe.cli.progress import showing
from agentpipe.errors import InputError

if TYPE_CHECKING:
    from agentpipe.progress import Progress
    from agentpipe.settings import Settings


class Split(str, Enum):  # noqa: UP042 - typer shows the values of a str Enum
    """Which environments."""

    validation = "validation"
    holdout = "holdout"


def evaluate(
    package: Annotated[Path, typer.Option("--package", help="A policy package: the path that `agentpipe run` prints.")],
    split: Annotated[Split, typer.Option("--split", help="Which environments are played.")] = Split.holdout,
    episodes_per_env: Annotated[
        int, typer.Option("--episodes-per-env", min=1, help="Episodes of each environment.")
    ] = 2,
    environments: Annotated[
        int | None,
        typer.Option("--environments", min=1, help="Only so many, evenly spread.", show_default="the whole split"),
    ] = None,
    seed: Seed = None,
    threads: Threads = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Plays a policy package beside random, rules and oracle; the same call gives the same figures.

    Table and line profile are those of the home (as materialised), or the project's own on an empty home.
    """
    from agentpipe.settings import load_settings

    with reporting(as_json):
        settings = load_settings(home=home, seed=seed, threads=threads)
        with showing("evaluate") as progress:
            content = _evaluate(package, split.value, episodes_per_env, environments, settings, progress)
        if as_json:
            print_json(content)
        else:
            player_table(content["players"], split.value)


def _evaluate(
    package: Path, split: str, episodes: int, environments: int | None, settings: Settings, progress: Progress
) -> dict[str, Any]:
    from agentpipe.environments.catalog import load_catalog
    from agentpipe.environments.players import OraclePlayer, RandomPlayer
    from agentpipe.environments.rules import RulesPlayer
    from agentpipe.evaluation.holdout import evaluate as play
    from agentpipe.evaluation.holdout import purpose_for_split
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.policy.player import PolicyPlayer

    if not package.is_dir():
        remedy = "give the path that `agentpipe run` prints as package"
        raise InputError("no policy package there", file=package, remedy=remedy)
    policy = PolicyPlayer(PolicyPackage.load(package))
    catalog = load_catalog()
    chosen = catalog.environments(split)
    if environments is not None:
        counts = {**catalog.counts(), split: environments}
        chosen = catalog.thin(counts["train"], counts["validation"], counts["holdout"]).environments(split)
    table, profile = _world(settings)
    report = play(
        [policy, RandomPlayer(), RulesPlayer(profile), OraclePlayer()],
        chosen,
        table,
        profile,
        seed=settings.seed,
        purpose=purpose_for_split(split),
        episodes_per_env=episodes,
        trained_on=catalog.environments("train"),
        threads=settings.threads,
        progress=progress,
    )
    return {"ok": True, "package": {"path": str(package), "digest": policy.package.digest}, **report.summary}


def _world(settings: Settings) -> tuple[Any, Any]:
    """Table and line profile of the home, or the project's own where the home has none."""
    from agentpipe.environments.datafiles import data_dir
    from agentpipe.environments.line_profile import default_profile, load_profile
    from agentpipe.environments.table import load_table
    from agentpipe.environments.table_store import TableStore
    from agentpipe.storage import read_json

    store = TableStore(settings.home, source=settings.table_source)
    table = store.current() if store.started() else load_table(data_dir() / "disturbances.csv")
    reference = settings.home / "references" / "line_profile" / "reference.json"
    if not reference.exists():
        return table, default_profile()
    return table, load_profile(settings.home / read_json(reference)["path"])
