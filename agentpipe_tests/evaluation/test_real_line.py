"""The evaluation on the built-in line: small, but nothing is faked."""

import numpy as np
import pytest

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import ACTION_COUNT, Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.players import OraclePlayer, RandomPlayer
from agentpipe.environments.rules import RulesPlayer
from agentpipe.environments.table import load_table
from agentpipe.evaluation.attribution import attribute_failures
from agentpipe.evaluation.columns import column
from agentpipe.evaluation.holdout import evaluate
from agentpipe.evaluation.reference import collect_reference


@pytest.fixture(scope="module")
def world():
    catalog = load_catalog()
    table, profile = load_table(data_dir() / "disturbances.csv"), default_profile()
    return catalog.environments("holdout")[:60], catalog.environments("train"), table, profile


def judge(world, threads=1, environments=None, players=None):
    holdout, train, table, profile = world
    return evaluate(
        players or [RandomPlayer(), RulesPlayer(profile), OraclePlayer()],
        environments or holdout,
        table,
        profile,
        seed=11,
        purpose=Purpose.REPORT,
        episodes_per_env=3,
        trained_on=train,
        threads=threads,
    )


@pytest.fixture(scope="module")
def report(world):
    return judge(world)


def test_players_rank_as_they_must(report):
    random, rules, oracle = (report.player(name)["success"] for name in ("random", "rules", "oracle"))
    assert random < rules < oracle
    assert report.summary["paired"]["rules-oracle"]["ci95"][1] < 0
    assert report.summary["disjoint"] == {
        "training_environments": 7000,
        "environment_overlap": 0,
        "template_overlap": 0,
    }


def test_threads_do_not_change_a_figure(report, world):
    assert judge(world, threads=2).digest == report.digest


def test_an_environment_alone_has_the_same_episodes_as_among_others(report, world):
    alone = judge(world, environments=world[0][17:18], players=[RulesPlayer(world[3])]).table.to_pylist()
    name = world[0][17].environment_id
    among = [row for row in report.table.to_pylist() if row["environment_id"] == name and row["player"] == "rules"]
    assert alone == among


def test_every_failure_is_replayed_exactly(report, world):
    holdout, _, table, profile = world
    result = attribute_failures(
        report, RulesPlayer(profile), holdout, table, profile, seed=11, purpose=Purpose.REPORT, control_cap=20
    )
    assert result.summary["replayed"] == result.summary["sampled"] == result.summary["failures"] > 20
    assert column(result.table, "crc32")[0] == table.fingerprint(column(result.table, "environment_id")[0]).crc32


def test_the_reference_holds_legal_situations_of_all_segments(world):
    holdout, _, table, profile = world
    reference = collect_reference(holdout, table, profile, RulesPlayer(profile), seed=0, rows=500)
    assert reference.rows == 500
    assert set(reference.segment.tolist()) == {0, 1, 2, 3}
    assert (reference.last_action <= ACTION_COUNT).all()
    assert len(np.unique(reference.environment)) > 30
