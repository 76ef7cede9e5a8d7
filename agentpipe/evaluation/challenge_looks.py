"""How often the hold-out has been looked at to decide a promotion, and which episodes each look plays.

A candidate chosen because it did well on some episodes did well on them partly by luck, so no comparison plays the
episodes of an earlier one: each *look* takes the next free episode numbers of every environment, and they are taken
durably before the first is played. Looks thereby stay independent given the environments, each with its own error rate
alpha; over n looks at candidates that all are too much worse, n alpha of them are promoted on average. The number of
looks is therefore counted and shown.

The same question (candidate, champion, environments, table, line, seed, number of episodes) is the same look, however
often it is asked: whoever compares again gets the same episodes and the same answer, and no second chance.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agentpipe.environments.layout import SIMULATOR_VERSION
from agentpipe.errors import CorruptError, EvaluationError, VersionError
from agentpipe.learning.succession.champion import exclusive
from agentpipe.storage import canonical_json, digest_bytes, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.table import DisturbanceTable

_FORMAT = 1
_REMEDY = "restore looks.json from a backup; without it episodes would be played a second time"


@dataclass(frozen=True)
class Look:
    """One look at the hold-out."""

    number: int
    """1 for the first of all"""
    of_champion: int
    """1 for the first against this champion"""
    candidate: str
    """digest"""
    champion: str
    """digest"""
    question: str
    """digest of what both are asked, see :func:`question`"""
    first_episode: int
    """number of the first episode of every environment that it plays"""
    episodes: int
    """how many it plays of every environment"""
    at: str
    """UTC, ISO 8601"""


def question(
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    profile: LineProfile,
    *,
    seed: int,
    episodes: int,
) -> str:
    """Digest of everything but the two policies that decides what a comparison plays."""
    content = {
        "environments": [spec.environment_id for spec in environments],
        "table": table.version,
        "line": profile.digest,
        "simulator": SIMULATOR_VERSION,
        "seed": seed,
        "episodes": episodes,
    }
    return digest_bytes(canonical_json(content))


class LookStore:
    """The looks of a home, in one file below ``root`` that is replaced by rename under a lock.

    Args:
        root: directory; made at the first look.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._path = root / "looks.json"

    def all(self) -> tuple[Look, ...]:
        """Every look, the first one first.

        Raises:
            CorruptError, VersionError: the file is damaged, or of another version.
        """
        if not self._path.exists():
            return ()
        content = read_json(self._path)
        if not isinstance(content, dict) or not isinstance(content.get("looks"), list):
            raise CorruptError("not a list of looks", file=self._path, remedy=_REMEDY)
        if content.get("format") != _FORMAT:
            text = f"format {content.get('format')!r} of looks, this program reads {_FORMAT}"
            raise VersionError(text, file=self._path, remedy="use the agentpipe that wrote it")
        try:
            looks = tuple(Look(**look) for look in content["looks"])
        except TypeError as error:
            raise CorruptError(f"not a look: {error}", file=self._path, remedy=_REMEDY) from error
        for number, look in enumerate(looks, 1):
            numbers = (look.number, look.of_champion, look.first_episode, look.episodes)
            if not all(type(value) is int for value in numbers) or look.number != number or look.episodes < 1:
                raise CorruptError("looks are missing or damaged", file=self._path, remedy=_REMEDY)
            if look.first_episode != _next_free(looks[: number - 1]):
                raise CorruptError("looks share episodes", file=self._path, remedy=_REMEDY)
        return looks

    def take(self, candidate: str, champion: str, question: str, episodes: int) -> Look:
        """The look for this question: the one it had before, or the next, with episodes that none has played.

        Args:
            candidate: digest.
            champion: digest.
            question: see :func:`question`.
            episodes: of every environment, >= 1.

        Raises:
            EvaluationError: fewer than one episode.
            CorruptError, VersionError: the file is damaged, or of another version.
            DiskFullError, HomeError: it cannot be written; nothing is taken.
        """
        if episodes < 1:
            raise EvaluationError(f"a look at {episodes} episodes", field="episodes", remedy="one or more")
        with exclusive(self.root / "looks.lock"):
            looks = self.all()
            for look in looks:
                if (look.candidate, look.champion, look.question, look.episodes) == (
                    candidate,
                    champion,
                    question,
                    episodes,
                ):
                    return look
            before = sum(look.champion == champion for look in looks)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            number, first = len(looks) + 1, _next_free(looks)
            new = Look(number, before + 1, candidate, champion, question, first, episodes, now)
            listed = [dataclasses.asdict(look) for look in (*looks, new)]
            write_json(self._path, {"format": _FORMAT, "looks": listed})
            return new


def _next_free(looks: tuple[Look, ...]) -> int:
    return looks[-1].first_episode + looks[-1].episodes if looks else 0
