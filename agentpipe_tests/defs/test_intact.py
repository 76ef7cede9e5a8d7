"""Nobody becomes champion whose package or bundle is not what it was: by promotion, by approval, by rollback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.definitions import defs
from agentpipe.defs.graph import SHAPES
from agentpipe.defs.references import Reference
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving import promotion
from agentpipe.defs.serving.assets import publish
from agentpipe.learning.succession.promotion import champion_stores
from agentpipe.serving import layout
from agentpipe.storage import write_bytes
from agentpipe_tests.bundles import save_bundle, save_package
from agentpipe_tests.defs.homes import QUIET
from agentpipe_tests.defs.test_publish import Compared

KEY = "2026-11-03|nightly"
NAMES = ("first", "now", "new", "other")


@dataclass(frozen=True)
class Home:
    """Two champions, one after the other, and a candidate that waits; all with packages and bundles."""

    workspace: Workspace
    packages: dict[str, str]
    bundles: dict[str, str]

    @property
    def root(self) -> Path:
        return self.workspace.root

    def figures(self, name: str) -> dict[str, str]:
        return {"bundle": f"bundles/{name}", "bundle_digest": self.bundles[name]}

    def lead(self, *names: str) -> None:
        """Makes them champion in turn."""
        champions, previous = champion_stores(self.root)[0], None
        for name in names:
            package, figures = f"packages/{name}", self.figures(name)
            champions.promote(self.packages[name], package, expected=previous, reason="better", figures=figures)
            previous = self.packages[name]

    def leave(self, asset: str, version: str, path: str, **figures: object) -> None:
        """A reference of the candidate's partition."""
        consumed, configuration = self.workspace.consumed(asset, KEY), self.workspace.configuration(asset)
        code = SHAPES[asset].code_version
        self.workspace.references.save(
            Reference(asset, KEY, version, path, consumed, configuration, code, 0.0, figures)
        )

    def publish(self, parent: str, drift: str = "OK") -> str:
        """Publishes the candidate; the type of the error, if any."""
        self.leave("policy_checkpoint", self.packages["new"], "packages/new", gates=[], parent=parent)
        self.leave("holdout_evaluation", "e", "e", gates=[], success=0.9)
        self.leave("policy_drift", "k", "k", champion=parent, status=drift)
        figures = {"promotable": True, "reasons": [], "gates": [], "package_bytes": 7}
        self.leave("triton_bundle", self.bundles["new"], "bundles/new", **figures)
        self.leave("bundle_server_check", "c", "c", status="PASSED", reason="", gates=[])
        with dg.DagsterInstance.ephemeral() as instance:
            result = dg.materialize(
                [publish],
                instance=instance,
                partition_key=KEY,
                resources={"workspace": self.workspace},
                run_config=QUIET,
                raise_on_error=False,
            )
        return failure(result)

    def hold(self) -> None:
        champion_stores(self.root)[1].hold(
            self.packages["new"],
            package="packages/new",
            bundle="bundles/new",
            compared_with=self.packages["now"],
            reasons=["drift is REVIEW"],
            figures={"bundle_digest": self.bundles["new"]},
        )

    def command(self, *arguments: str) -> str:
        """Calls ``agentpipe champion``; the type of the error, if any."""
        signed = ("--who", "ann", "--why", "a test", "--home", str(self.root), "--json")
        result = CliRunner().invoke(app, ["champion", *arguments, *signed])
        document = json.loads(result.stdout)
        assert (result.exit_code == 0) == document["ok"]
        return "" if document["ok"] else str(document["error"]["type"])


def failure(result: dg.ExecuteInProcessResult) -> str:
    """The type of the error that a run failed with; empty where it did not."""
    failed = [event.step_failure_data.error for event in result.all_events if event.is_step_failure]
    causes = [error.cause.cls_name or "" if error.cause else error.cls_name or "" for error in failed if error]
    return causes[0] if causes else ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], dict[str, str]]:
    """Packages and bundles of all names, and their digests."""
    folder = tmp_path_factory.mktemp("saved") / "home"
    packages = {name: save_package(folder / "packages" / name, seed) for seed, name in enumerate(NAMES)}
    bundles = {name: save_bundle(folder / "bundles" / name, seed) for seed, name in enumerate(NAMES)}
    return folder, packages, bundles


@pytest.fixture
def home(saved: tuple[Path, dict[str, str], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    folder, packages, bundles = saved
    shutil.copytree(folder, tmp_path / "home")
    monkeypatch.setenv("AGENTPIPE_HOME", str(tmp_path / "home"))
    return Home(Workspace(home=str(tmp_path / "home"), profile="standard"), packages, bundles)


# ------------------------------------------------------------------------------- the ways to move the champion

Way = Callable[[Home, Callable[[], None]], str]


def first(home: Home, damage: Callable[[], None]) -> str:
    damage()
    return home.publish("none")


def later(home: Home, damage: Callable[[], None]) -> str:
    home.lead("first", "now")
    damage()
    return home.publish(home.packages["now"])


def held(home: Home, damage: Callable[[], None]) -> str:
    home.lead("first", "now")
    damage()
    return home.publish(home.packages["now"], drift="REVIEW")


def approved(home: Home, damage: Callable[[], None]) -> str:
    home.lead("first", "now")
    home.hold()
    damage()
    return home.command("approve", home.packages["new"])


def approved_in_the_ui(home: Home, damage: Callable[[], None]) -> str:
    home.lead("first", "now")
    home.hold()
    damage()
    config = {"candidate": home.packages["new"], "decision": "APPROVE", "who": "ann", "why": "a test"}
    with dg.DagsterInstance.ephemeral() as instance:
        run_config = {"ops": {"decide": {"config": config}}, **QUIET}
        job = defs.resolve_job_def("approval")
        return failure(job.execute_in_process(instance=instance, raise_on_error=False, run_config=run_config))


def rolled_back(home: Home, damage: Callable[[], None]) -> str:
    home.lead("new", "now")
    damage()
    return home.command("rollback")


WAYS = [first, later, held, approved, approved_in_the_ui, rolled_back]

# ------------------------------------------------------------------------------------ what can happen to files


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace(folder: Path, other: str) -> None:
    """Another one of the same kind, whole, in its place."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(other), folder)


def reseal(folder: Path) -> None:
    """Another provenance under right hashes."""
    (folder / layout.PROVENANCE).write_text((folder / layout.PROVENANCE).read_text().replace('"seed": 2', '"seed": 9'))
    write_bytes(folder / layout.SUMS, layout.sums_text(layout.hash_files(folder)))


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a byte of the weights": ("packages", lambda folder: flip(folder / "weights.safetensors")),
    "a byte of the statistics": ("packages", lambda folder: flip(folder / "statistics.safetensors")),
    "a byte of the manifest": ("packages", lambda folder: flip(folder / "package.json")),
    "no weights": ("packages", lambda folder: (folder / "weights.safetensors").unlink()),
    "no package": ("packages", shutil.rmtree),
    "another package": ("packages", lambda folder: replace(folder, "other")),
    "a byte of the graph": ("bundles", lambda folder: flip(folder / "policy" / "1" / "model.onnx")),
    "a byte of the sums": ("bundles", lambda folder: flip(folder / layout.SUMS)),
    "no configuration": ("bundles", lambda folder: (folder / "policy" / layout.CONFIG).unlink()),
    "a file more": ("bundles", lambda folder: write_bytes(folder / "policy" / "notes.txt", b"mine")),
    "no bundle": ("bundles", shutil.rmtree),
    "another bundle": ("bundles", lambda folder: replace(folder, "other")),
    "another provenance": ("bundles", reseal),
}


@pytest.fixture(autouse=True)
def _better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate is better: comparisons are another test's."""
    monkeypatch.setattr(promotion, "_compare", lambda *_: Compared("PROMOTE"))


def champion_file(home: Home) -> bytes:
    path = home.root / "champion" / "champion.json"
    return path.read_bytes() if path.exists() else b""


@pytest.mark.parametrize("way", WAYS)
def test_one_that_is_whole_becomes_champion_or_is_held(home: Home, way: Way) -> None:
    assert way(home, lambda: None) == ""
    champions, holds = champion_stores(home.root)
    current = champions.current()
    assert current is not None
    if way is held:
        assert (current.digest, len(holds.waiting())) == (home.packages["now"], 1)
    else:
        assert current.digest == home.packages["new"]


MAIN = ("a byte of the weights", "another package", "a byte of the graph", "no bundle", "another bundle")
CASES = [(way, damage) for way in WAYS for damage in (DAMAGES if way is rolled_back else MAIN)]


@pytest.mark.parametrize(("way", "damage"), CASES)
def test_one_that_is_damaged_is_a_typed_error_and_the_champion_stays(home: Home, way: Way, damage: str) -> None:
    kind, harm = DAMAGES[damage]
    before: list[bytes] = []

    def strike() -> None:
        before.append(champion_file(home))
        harm(home.root / kind / "new")

    assert way(home, strike) == {"packages": "CheckpointError", "bundles": "BundleError"}[kind]
    assert [champion_file(home)] == before
    waiting = champion_stores(home.root)[1].waiting()
    assert len(waiting) == (1 if way in (approved, approved_in_the_ui) else 0)


@pytest.mark.parametrize("damage", ["a byte of the weights", "another package", "another bundle"])
def test_one_that_is_damaged_while_it_is_compared_is_not_promoted(
    home: Home, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    kind, harm = DAMAGES[damage]

    def compare(*_: object) -> Compared:
        harm(home.root / kind / "new")
        return Compared("PROMOTE")

    monkeypatch.setattr(promotion, "_compare", compare)
    assert later(home, lambda: None) == {"packages": "CheckpointError", "bundles": "BundleError"}[kind]
    current = champion_stores(home.root)[0].current()
    assert current is not None
    assert current.digest == home.packages["now"]


@pytest.mark.parametrize("way", [approved, rolled_back])
def test_one_whose_bundle_nobody_recorded_does_not_become_champion(home: Home, way: Way) -> None:
    def forget() -> None:
        folder = home.root / "champion"
        for path in (folder / "champion.json", *folder.glob("held/*.json")):
            content = json.loads(path.read_text())
            for entry in content.get("history", [content]):
                del entry["figures"]["bundle_digest"]
            path.write_text(json.dumps(content))

    assert way(home, forget) == "BundleError"
    current = champion_stores(home.root)[0].current()
    assert current is not None
    assert current.digest == home.packages["now"]
