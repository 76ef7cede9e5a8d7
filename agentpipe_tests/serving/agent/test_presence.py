"""Whether a line is there is said once for each change, from the start."""

from agentpipe.errors import LineError
from agentpipe.serving.agent.presence import Presence


def test_a_line_that_is_away_from_the_start_is_said_once_and_that_it_is_there():
    said = []
    presence = Presence(said.append)
    presence.seen(connected=False)
    assert not presence.lost(LineError("refused"))
    assert not presence.lost(LineError("refused"))
    presence.seen(connected=True)
    presence.seen(connected=True)
    assert presence.connected
    assert said == ["the line is away: refused", "the line is there"]


def test_a_line_that_is_lost_is_said_again_each_time():
    said = []
    presence = Presence(said.append)
    presence.seen(connected=True)
    assert presence.lost(LineError("the line is lost: reset"))
    presence.seen(connected=True)
    assert presence.lost(LineError("the line is lost"))
    assert not presence.connected
    assert said == ["the line is lost: reset", "the line is there", "the line is lost"]
