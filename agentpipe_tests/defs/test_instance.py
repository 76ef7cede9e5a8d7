"""What an error chain says of the home, whatever its shape."""

from __future__ import annotations

import sqlite3

import pytest

from agentpipe.defs.instance import causes, typed_storage_errors
from agentpipe.errors import DiskFullError, GateError, HomeError


def ring() -> tuple[Exception, Exception]:
    """Two errors, each raised while the other was handled, as re-raising in nested handlers leaves them."""
    first, second = GateError("first"), RuntimeError("second")
    first.__context__, second.__context__ = second, first
    return first, second


def test_a_chain_of_causes_is_walked_once_even_when_it_is_a_ring():
    first, second = ring()
    assert list(causes(first)) == [first, second]


def test_an_error_in_a_ring_reaches_its_caller_unchanged(tmp_path):
    first, _ = ring()
    with pytest.raises(GateError, match="first"), typed_storage_errors(tmp_path):
        raise first


@pytest.mark.parametrize(
    ("said", "typed"), [("database or disk is full", DiskFullError), ("database is locked", HomeError)]
)
def test_what_sqlite_says_becomes_a_typed_error(tmp_path, said, typed):
    error = RuntimeError("an event could not be stored")
    error.__context__ = sqlite3.OperationalError(said)
    with pytest.raises(typed), typed_storage_errors(tmp_path):
        raise error
