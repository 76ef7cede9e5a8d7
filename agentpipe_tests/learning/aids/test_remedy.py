"""A remedy starts when it is needed, ends when it is not, and gives up when it does not help."""

from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.aids.remedy import Remedy
from agentpipe_tests.learning.aids.told import copied

OPTIONS = AidOptions(patience=2, calm=3, longest=5)


class Plain(Remedy):
    name = "plain"


def played(aid, complaints):
    """Whether the aid was on after each update."""
    on = []
    for complaint in complaints:
        aid.judge("bad" if complaint == "!" else "")
        on.append("x" if aid.active else ".")
    return "".join(on)


def test_starts_after_patience_and_ends_after_calm():
    aid = Plain("remedy", OPTIONS)
    assert played(aid, "!.!!..!...!.") == "...xxxxxx..."
    assert [(action, value) for action, _, value in aid.take_notes()] == [("start", 1.0), ("end", 0.0)]


def test_one_that_does_not_help_gives_up_and_rests_as_long():
    aid = Plain("remedy", OPTIONS)
    assert played(aid, "!" * 16) == ".xxxxx......" + ".xxx"
    notes = aid.take_notes()
    assert notes[1] == ("end", "did not help in 5 updates: bad", 0.0)
    assert [action for action, _, _ in notes] == ["start", "end", "start"]


def test_what_falls_silent_in_time_is_not_given_up():
    """Five updates are over while nothing is complained of: it ends by calm, without a rest."""
    aid = Plain("remedy", OPTIONS)
    assert played(aid, "!!!!!...!!") == ".xxxxxx..x"
    assert aid.take_notes()[1] == ("end", "nothing to complain of for 3 updates", 0.0)


def test_always_is_always():
    aid = Plain("always", OPTIONS)
    assert aid.active
    assert played(aid, "!!!!......!!!!!!!!!!") == "x" * 20
    assert aid.take_notes() == []


def test_state_goes_on_where_it_was():
    complaints = "!!...!!!!!!!!.!!..!!!!"
    whole = Plain("remedy", OPTIONS)
    expected = played(whole, complaints)
    for cut in range(len(complaints)):
        first = Plain("remedy", OPTIONS)
        before = played(first, complaints[:cut])
        assert before + played(copied(first, Plain("remedy", OPTIONS)), complaints[cut:]) == expected
