"""Lower layers are slowed down while training is unstable, and come back step by step."""

import pytest

from agentpipe.learning.aids.base import Knobs
from agentpipe.learning.aids.layer_rates import LayerRates
from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.options import GateOptions
from agentpipe_tests.learning.aids.told import CALM, copied, warning

OPTIONS = AidOptions(bottom_rate=1 / 32, patience=2, calm=2, longest=6)


def aid_of(options=OPTIONS):
    return LayerRates(options, GateOptions(gradient_norm_warn=5.0))


def told(aid, updates=1, **changes):
    values = []
    for _ in range(updates):
        aid.updated({**CALM, **{f"losses/{name}": value for name, value in changes.items()}}, ())
        knobs = Knobs(1.0, 0.0, 0.5)
        aid.before(knobs, None)
        values.append(knobs.bottom_rate)
    return values


def test_calm_training_is_left_alone():
    aid = aid_of()
    assert told(aid, updates=30) == [1.0] * 30
    assert aid.take_notes() == []


def test_starts_at_once_in_full_and_comes_back_in_five_equal_ratios():
    """2^-5 after two updates of large gradients; two calm ones end it, and each further one doubles the rate."""
    aid = aid_of()
    assert told(aid, 3, gradient_norm=7.0) == [1.0, 1 / 32, 1 / 32]
    assert told(aid, 7) == pytest.approx([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.0])
    notes = aid.take_notes()
    assert notes[0] == ("start", "gradient norm 7 above 5, for 2 updates", 1.0)
    assert [action for action, _, _ in notes] == ["start", "lowest rate", "end", *["lowest rate"] * 5]
    assert notes[-1][2] == 1.0


def test_a_sign_on_the_way_puts_it_down_again():
    aid = aid_of()
    told(aid, 2, gradient_norm=7.0)
    told(aid, 3)
    assert told(aid, gradient_norm=7.0) == [1 / 32]


def test_one_that_does_not_help_gives_up():
    aid = aid_of()
    values = told(aid, 12, gradient_norm=7.0)
    assert values[7] == pytest.approx(1 / 16)
    assert values[-1] == 1.0
    assert "did not help in 6 updates: gradient norm 7 above 5" in [reason for _, reason, _ in aid.take_notes()]


@pytest.mark.parametrize(("name", "usual", "spike"), [("value_loss", 2.0, 6.5), ("approx_kl", 0.004, 0.0125)])
def test_a_spike_is_a_sign(name, usual, spike):
    aid = aid_of()
    told(aid, 10, **{name: usual})
    assert told(aid, 2, **{name: spike}) == [1.0, 1 / 32]
    label = {"value_loss": "value loss", "approx_kl": "KL"}[name]
    reason = f"{label} {spike:.3g}, its median over 10 updates being {usual:.3g}, for 2 updates"
    assert aid.take_notes()[0] == ("start", reason, 1.0)


@pytest.mark.parametrize(("name", "usual", "spike"), [("value_loss", 2.0, 5.9), ("approx_kl", 0.0001, 0.009)])
def test_less_is_none(name, usual, spike):
    aid = aid_of()
    told(aid, 10, **{name: usual})
    assert told(aid, 2, **{name: spike}) == [1.0, 1.0]


def test_gate_2_starts_it_before_the_first_update():
    aid = aid_of()
    aid.warmed_up([warning("actor loss"), warning("gradient norm median", 9.0, 5.0, gate="2")])
    knobs = Knobs(1.0, 0.0, 0.5)
    aid.before(knobs, None)
    assert knobs.bottom_rate == 1 / 32


def test_always_is_always():
    aid = aid_of(AidOptions(layer_rates="always"))
    assert set(told(aid, 20)) == {1e-5 / 3e-4}
    assert set(told(aid, 5, gradient_norm=99.0)) == {1e-5 / 3e-4}
    assert aid.take_notes() == []


def test_state_goes_on_where_it_was():
    for cut in range(1, 12):
        aid = aid_of()
        told(aid, min(cut, 4), gradient_norm=7.0)
        told(aid, max(0, cut - 4))
        again = copied(aid, aid_of())
        assert told(again, 9) == told(aid, 9)
