"""Measurements in pieces: what is kept is never made again, and nothing is kept half."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from benchmarks.resumable import Cache, Piece, deadline_in, plan, work


def quiet(_):
    return None


@pytest.fixture
def made():
    return []


@pytest.fixture
def piece(made):
    def run():
        made.append("run")
        return {"figure": 1.5}

    return Piece("kind", "a piece", {"seed": 0, "size": 3}, 10.0, run)


def test_a_piece_that_is_kept_is_not_made_again(piece, made, tmp_path):
    assert work([piece], Cache(tmp_path), math.inf, quiet) == []
    assert work([piece], Cache(tmp_path), math.inf, quiet) == []
    assert made == ["run"]
    assert Cache(tmp_path).row(piece) == {"figure": 1.5}


def test_another_configuration_is_made_and_the_order_of_its_parts_does_not_matter(piece, made, tmp_path):
    turned = dataclasses.replace(piece, label="another label", key={"size": 3, "seed": 0})
    other = dataclasses.replace(piece, key={"seed": 0, "size": 4})
    work([piece, turned, other], Cache(tmp_path), math.inf, quiet)
    assert made == ["run", "run"]


def test_what_another_process_made_meanwhile_is_not_made_again(piece, made, tmp_path):
    cache, later = Cache(tmp_path), dataclasses.replace(piece, key={"later": True})

    def both():
        cache.make(later)
        return {}

    assert work([dataclasses.replace(piece, run=both), later], cache, math.inf, quiet) == []
    assert made == ["run"]


def test_a_run_that_is_killed_leaves_nothing(piece, tmp_path):
    def killed():
        raise KeyboardInterrupt

    cache = Cache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        work([dataclasses.replace(piece, run=killed)], cache, math.inf, quiet)
    assert cache.row(piece) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert work([piece], cache, math.inf, quiet) == []
    assert cache.row(piece) == {"figure": 1.5}


def test_what_does_not_fit_is_left_for_another_time(piece, made, tmp_path):
    short = dataclasses.replace(piece, key={"short": True}, seconds=1.0)
    left = work([piece, short], Cache(tmp_path), deadline_in(0.1), quiet)
    assert left == [piece]
    assert made == ["run"]


def test_the_time_of_a_kind_is_learned_from_those_that_were_made(piece, tmp_path):
    cache = Cache(tmp_path)
    assert cache.expected(piece) == 10.0
    cache.make(piece)
    path = cache.path(piece)
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": 100.0}))
    assert cache.expected(piece) == pytest.approx(110.0)


def test_what_no_configuration_has_any_more_is_removed_and_other_seeds_stay(piece, tmp_path):
    cache = Cache(tmp_path)
    other_seed = dataclasses.replace(piece, key={**piece.key, "seed": 7, "options": {"seed": 7}})
    mine = dataclasses.replace(piece, key={**piece.key, "options": {"seed": 0}})
    stale = dataclasses.replace(piece, key={**piece.key, "size": 4})
    work([mine, other_seed, stale], cache, math.inf, quiet)
    cache.keep_only([mine])
    assert [cache.has(one) for one in (mine, other_seed, stale)] == [True, True, False]


def test_a_plan_makes_nothing(piece, made, tmp_path):
    other = dataclasses.replace(piece, key={"seed": 1}, seconds=120.0)
    last = dataclasses.replace(piece, kind="kind of its own", seconds=60.0)
    cache = Cache(tmp_path)
    assert plan([piece, other, other, last], cache) == (
        "kind: 0 of 2 are there, 65 s each\n"
        "kind of its own: 0 of 1 are there, 60 s each\n"
        f"in all about 3 minutes are left; finished ones: {tmp_path}"
    )
    assert made == []


def test_origins_name_every_revision_once(piece, tmp_path):
    cache = Cache(tmp_path)
    others = [dataclasses.replace(piece, key={"seed": seed}) for seed in (1, 2)]
    for one in (piece, *others):
        cache.make(one)
    path = cache.path(others[1])
    path.write_text(json.dumps({**json.loads(path.read_text()), "revision": "zzz"}))
    assert cache.origins([piece, *others])["revisions"][1:] == ["zzz"]
