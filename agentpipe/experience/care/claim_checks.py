"""Whether whoever refers to something finds it: materialisations, checkpoints, policy packages."""

from __future__ import annotations

import datetime as dt
import shlex
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import CorruptError
from agentpipe.experience.care.claims import pointed_at, relative
from agentpipe.experience.care.holdings import HIDDEN, OPEN, RETRAINING, nothing_counts, partition_of, trainings
from agentpipe.experience.care.report import Problem
from agentpipe.experience.store.remedies import buffer_command, run_command
from agentpipe.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from agentpipe.experience.care.claims import Claims
    from agentpipe.experience.care.holdings import Holding

_CELLS: Final = "references/trajectories"
_CANDIDATES: Final = "references/policy_checkpoint"


def claim_problems(home: Path, shards: Sequence[Holding], claims: Claims) -> Iterator[Problem]:
    """Every claim of ``home`` that is not met, with the line that meets it again where there is one.

    Args:
        home: The home.
        shards: All of its shards.
        claims: All of its claims.
    """
    checks = _ClaimChecks(home, shards, claims)
    for error in claims.unreadable:
        yield Problem("-", str(error.where.get("file", home)), None, None, error.message, error.remedy)
    yield from checks.materialisations()
    yield from checks.cells()
    yield from checks.checkpoints()
    yield from checks.packages()
    yield from checks.trainings()
    yield from checks.candidates()


class _ClaimChecks:
    def __init__(self, home: Path, shards: Sequence[Holding], claims: Claims) -> None:
        self.home, self.shards, self.claims = home, shards, claims
        self.found = {holding.path.resolve(): holding for holding in shards if not nothing_counts(holding.path)}
        self.digests = {holding.digest for holding in self.found.values()}
        self.without: set[str] = set()
        """cells that a run would record again"""
        self.gone: set[Path] = set()
        """folders of shards that are reported already"""

    def _problem(self, place: Path, file: str, field: str | None, message: str, remedy: str) -> Problem:
        return Problem(relative(place, self.home), file, None, field, message, remedy)

    def materialisations(self) -> Iterator[Problem]:
        """The references to the current trajectories."""
        for folder, name in self.claims.current.items():
            cell, holding = name[13:-1], self.found.get(folder)
            file, wanted = f"{_CELLS}/{cell}.json", self.claims.expected[folder]
            if holding is None:
                self.without.add(cell)
                yield self._problem(folder, file, "path", f"{name} is gone", run_command(self.home))
            elif holding.digest is not None and holding.digest != wanted:
                text = f"{name} refers to {wanted[:16]}, the shard is {holding.digest[:16]}"
                remedy = buffer_command("check --fix", home=self.home)
                yield self._problem(folder, file, "data_version", text, remedy)

    def cells(self) -> Iterator[Problem]:
        """Cells that were recorded once and have no current trajectories."""
        recorded = {holding.path.parent.name for holding in self.shards if holding.state == "open"}
        for folder in sorted((self.home / "trajectories").glob("*")):
            cell, file = folder.name, f"{_CELLS}/{folder.name}.json"
            if (
                folder.is_dir()
                and not cell.startswith(".")
                and cell not in recorded
                and not (self.home / file).exists()
            ):
                self.without.add(cell)
                text = f"the cell {cell} has no current trajectories"
                yield self._problem(folder, file, None, text, run_command(self.home))

    def checkpoints(self) -> Iterator[Problem]:
        """The shards that checkpoints name."""
        for entry in self.claims.named:
            places = (entry.folder, entry.folder.with_name(f"{OPEN}{entry.folder.name}"))
            if any(place in self.found for place in places) or entry.digest in self.digests:
                continue
            self.gone.add(entry.folder)
            text = f"{entry.by} names it, and it is gone"
            remedy = self._train_again(entry.folder.parents[1])
            yield self._problem(entry.folder, entry.file, "trajectory_index", text, remedy)

    def packages(self) -> Iterator[Problem]:
        """The recorded trajectories that packages were trained on."""
        missing: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for entry in self.claims.learned:
            if entry.digest not in self.digests:
                missing.setdefault((entry.cell, entry.digest), []).append((entry.by, entry.file))
        for (cell, digest), who in missing.items():
            names = ", ".join(dict.fromkeys(by for by, _ in who))
            text = f"{names} names trajectories of {cell} with the digest {digest[:16]}, and they are gone"
            remedy = "put the shard back from a copy; the policy is whole without it"
            if cell in self.without:
                remedy = run_command(self.home)
            place = self.home / "trajectories" / cell
            yield self._problem(place, who[0][1], "provenance", text, remedy)

    def trainings(self) -> Iterator[Problem]:
        """What lies beside each other in the folder of a training."""
        for training in trainings(self.home):
            folder, pointer = training / "checkpoints", relative(training / "checkpoints/checkpoints.json", self.home)
            if folder.exists() and not folder.is_dir():
                continue  # said already: it is unreadable
            for name in pointed_at(training) or []:
                if not (folder / name).is_dir():
                    text = f"the checkpoint {name} is gone"
                    yield self._problem(training, pointer, "checkpoints", text, self._train_again(training))
            rollouts = any(path.parent == training.resolve() / "experience" for path in self.found)
            if (training / "package").is_dir() and rollouts and not _checkpoints(training):
                package = relative(training / "package/package.json", self.home)
                text = f"package of {partition_of(training)} and live rollouts are there, the checkpoints are gone"
                yield self._problem(training, package, "checkpoints", text, self._train_again(training))

    def candidates(self) -> Iterator[Problem]:
        """What the references to the candidate policies say of their trainings."""
        for path in sorted((self.home / _CANDIDATES).glob("*.json")):
            file = relative(path, self.home)
            try:
                content = read_json(path)
                figures, place = content["figures"], self.home / str(content["path"])
            except (CorruptError, KeyError, TypeError) as error:
                text = error.message if isinstance(error, CorruptError) else "not a reference"
                remedy = f"remove it, then make this candidate again: {run_command(self.home)}"
                yield Problem("-", file, None, None, text, remedy)
                continue
            if not isinstance(figures, dict):
                continue
            training, checkpoint = place.parent, figures.get("checkpoint")
            if not training.is_dir():
                remedy = f"{self._train_again(training)}; where it was removed on purpose, remove {file} too"
                yield self._problem(training, file, "path", f"policy_checkpoint[{path.stem}] is gone", remedy)
                continue
            if isinstance(checkpoint, str):
                training = (self.home / checkpoint).parents[1]
                if not _checkpoints(training) and not self._told(training):
                    text = f"the checkpoints of policy_checkpoint[{path.stem}] are gone"
                    yield self._problem(training, file, "checkpoint", text, self._train_again(training))
            yield from self._counted(path, training, figures)

    def _told(self, training: Path) -> bool:
        """True where :meth:`trainings` says already that its checkpoints are gone."""
        rollouts = any(path.parent == training.resolve() / "experience" for path in self.found)
        return bool(pointed_at(training)) or ((training / "package").is_dir() and rollouts)

    def _counted(self, path: Path, training: Path, figures: dict[str, Any]) -> Iterator[Problem]:
        """Live rollouts that a finished training counted and that no checkpoint names: the last ones."""
        counted = figures.get("live_shards")
        if not isinstance(counted, int):
            return
        folder = training.resolve() / "experience"
        known = {place for place in (*self.found, *self.gone) if place.parent == folder}
        missing = counted - len(known)
        if missing <= 0:
            return
        last = folder / f"running-{self.claims.updates.get(training.resolve(), 0):06d}"
        named = missing == 1 and last not in known and training.resolve() in self.claims.updates
        text = f"package of {partition_of(training)} counts {counted} shards of live rollouts, {len(known)} are there"
        remedy = self._train_again(training)
        yield self._problem(last if named else folder, relative(path, self.home), "live_shards", text, remedy)

    def _train_again(self, training: Path) -> str:
        """A training gives the same bytes again; only a manual one has a line to type."""
        day, _, trigger = partition_of(training).partition("_")
        copy = "put it back from a copy"
        try:
            dt.date.fromisoformat(day)
        except ValueError:
            return copy
        if trigger != "manual":
            where = shlex.join(["agentpipe", "ui", "--home", str(self.home.resolve())])
            return f"{copy}, or materialise policy_checkpoint[{day}|{trigger}] again: {where}"
        key = training.parent if training.name == RETRAINING else training
        return f"{copy}, or move {relative(key, self.home)} away and train again: {run_command(self.home, day)}"


def _checkpoints(training: Path) -> list[Path]:
    folder = training / "checkpoints"
    return [path for path in folder.glob("*") if path.is_dir() and not path.name.startswith(HIDDEN)]
