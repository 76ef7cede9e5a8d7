"""Where recorded episodes came from, and the pool that plays them again.

An episode of the built-in simulator follows from seed, purpose, environment, episode number, table version, line
profile and its actions. A shard's manifest keeps all but the actions, so that these alone bring the rest back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import AgentpipeError, InputError, VersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.pool import LinePool

    PoolFor = Callable[[Mapping[str, Any], Mapping[int, str]], LinePool]
    """makes the pool of a shard from its manifest and its names (catalogue index → environment id)"""

ORIGIN: Final = "origin"
_REMEDY: Final = "keep its full records; what was recorded without an origin cannot be played again"


def origin(seed: int, purpose: str, profile_digest: str) -> dict[str, Any]:
    """What the header of a shard says under ``origin``, besides simulator and table version at its top level.

    Args:
        seed: root seed of the pool.
        purpose: name of its :class:`~agentpipe.environments.layout.Purpose`.
        profile_digest: of the line profile.
    """
    return {"seed": seed, "purpose": purpose, "line_profile": profile_digest}


def is_built_in(manifest: Mapping[str, Any]) -> bool:
    """True where the simulator of this program can play the shard's episodes again."""
    from agentpipe.environments.layout import SIMULATOR_VERSION

    return isinstance(manifest.get(ORIGIN), dict) and manifest.get("simulator_version") == SIMULATOR_VERSION


def require_built_in(manifest: Mapping[str, Any], file: Path) -> None:
    """Refuses what cannot be played again.

    Raises:
        InputError: episodes of another environment than the built-in line.
        VersionError: recorded by another version of the simulator; names both.
    """
    from agentpipe.environments.layout import SIMULATOR_VERSION

    if not isinstance(manifest.get(ORIGIN), dict):
        raise InputError("these are not episodes of the built-in line", file=file, field=ORIGIN, remedy=_REMEDY)
    found = manifest.get("simulator_version")
    if found != SIMULATOR_VERSION:
        message = f"recorded by simulator {found}, this program has {SIMULATOR_VERSION}"
        remedy = f"use the agentpipe with simulator {found}"
        raise VersionError(message, file=file, field="simulator_version", remedy=remedy)


def home_pools(home: Path, *, threads: int = 1) -> PoolFor:
    """How the pools of shards recorded in ``home`` are made: its table versions, its line profiles, the catalogue.

    The function returned raises:
        InputError: episodes without an origin, or a line profile that is gone.
        VersionError: another version of the simulator.
        TableError, CatalogError: the table version or an environment is gone.
    """

    def pool_for(manifest: Mapping[str, Any], names: Mapping[int, str]) -> LinePool:
        from agentpipe.environments.catalog import load_catalog
        from agentpipe.environments.layout import Purpose
        from agentpipe.environments.pool import build_pool
        from agentpipe.environments.table_store import TableStore

        require_built_in(manifest, home)
        catalog, known = load_catalog(), manifest[ORIGIN]
        specifications = [catalog.environment(names[index]) for index in sorted(names)]
        for index, specification in zip(sorted(names), specifications, strict=True):
            if specification.index != index:
                message = (
                    f"{specification.environment_id} has index {specification.index} in the catalogue, not {index}"
                )
                raise InputError(message, field="environment", remedy="use the catalogue that it was recorded with")
        return build_pool(
            specifications,
            TableStore(home).load(str(manifest["table_version"])),
            _profile(home, str(known["line_profile"])),
            seed=int(known["seed"]),
            purpose=Purpose[str(known["purpose"])],
            threads=threads,
        )

    return pool_for


def _profile(home: Path, digest: str) -> LineProfile:
    """The line profile with this digest: one of the home's, or the project's own."""
    for profile in _profiles(home):
        if profile.digest == digest:
            return profile
    remedy = "put the profile's JSON file into the home's folder line_profile"
    raise InputError(f"no line profile {digest[:16]} here", file=home / "line_profile", remedy=remedy)


def _profiles(home: Path) -> Iterator[LineProfile]:
    from agentpipe.environments.line_profile import default_profile, load_profile

    for path in sorted((home / "line_profile").glob("**/*.json")):
        try:
            yield load_profile(path)
        except AgentpipeError:  # not a profile, or one of another format: not the one that is looked for
            continue
    yield default_profile()
