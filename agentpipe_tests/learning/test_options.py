"""Options of the library say what they may hold; whatever else is given is refused, with the field's name."""

import math
from dataclasses import fields
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.errors import SettingsError
from agentpipe.learning import options as every
from agentpipe.learning.aids.options import AidOptions, DemonstrationOptions, OrchestratorOptions

RECORDS = [
    every.NetworkOptions,
    every.PpoOptions,
    every.WarmUpOptions,
    every.GateOptions,
    every.ReplayOptions,
    every.StreamOptions,
    every.TrainingOptions,
    every.FineTuningOptions,
    AidOptions,
    DemonstrationOptions,
    OrchestratorOptions,
]
NUMBERS = [
    (record, field.name)
    for record in RECORDS
    for field in fields(record)
    if get_type_hints(record)[field.name] in (int, float, int | None, float | None)
]


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (every.NetworkOptions, {"hidden": ()}),
        (every.NetworkOptions, {"hidden": (64, 0)}),
        (every.NetworkOptions, {"encoder": "transformer"}),
        (every.NetworkOptions, {"action_embedding": 0}),
        (every.NetworkOptions, {"memory": -1}),
        (every.NetworkOptions, {"hidden": (10**9, 10**9)}),
        (every.NetworkOptions, {"hidden": (8,) * 17}),
        (every.NetworkOptions, {"time_frequencies": 65}),
        (every.NetworkOptions, {"perception": 10**30}),
        (every.PpoOptions, {"rollout_steps": 10**18}),
        (every.TrainingOptions, {"threads": 257}),
        (every.TrainingOptions, {"threads": 10**30}),
        (every.PpoOptions, {"max_gradient_norm": -1.0}),
        (every.PpoOptions, {"schedule": "sometimes"}),
        (every.PpoOptions, {"normalise": "never"}),
        (every.PpoOptions, {"credit": "all"}),
        (every.PpoOptions, {"clip": (0.2, 0.2, 0.2)}),
        (every.PpoOptions, {"clip": (0.2, 0.2, 0.2, 0.0)}),
        (every.PpoOptions, {"minibatch": 0}),
        (every.PpoOptions, {"minibatch": 8.5}),
        (every.PpoOptions, {"discount": 1.01}),
        (every.ReplayOptions, {"sampler": "newest"}),
        (every.ReplayOptions, {"share": 1.0}),
        (every.StreamOptions, {"durability": "hope"}),
        (every.TrainingOptions, {"threads": 0}),
        (every.TrainingOptions, {"seed": -1}),
        (every.TrainingOptions, {"keep_checkpoints": -1}),
        (every.TrainingOptions, {"warm_up": 3}),
        (AidOptions, {"lambda_limits": (0.97, 0.92)}),
        (AidOptions, {"stall_updates": 1}),
        (AidOptions, {"curiosity": "sometimes"}),
        (DemonstrationOptions, {"held_out": 1.0}),
        (DemonstrationOptions, {"successes_only": "no"}),
        (OrchestratorOptions, {"certainty": 0.5}),
    ],
)
def test_an_option_that_means_nothing_is_refused(record, changes):
    with pytest.raises(SettingsError) as caught:
        record(**changes)
    assert caught.value.where == {"field": next(iter(changes))}
    assert caught.value.remedy


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", True])
@pytest.mark.parametrize(("record", "name"), NUMBERS)
def test_no_number_holds_what_is_none(record, name, value):
    with pytest.raises(SettingsError, match=name):
        record(**{name: value})


@given(st.sampled_from(RECORDS), st.data())
def test_every_default_fits_and_another_number_fits_or_is_refused_by_name(record, data):
    """Every default fits its own annotation, and one whole number more or less fits or is refused, nothing else."""
    made = record()
    name = data.draw(st.sampled_from([field.name for field in fields(record)]))
    value = getattr(made, name)
    assert record(**{name: value}) == made
    if type(value) is int:
        try:
            changed = record(**{name: value + data.draw(st.integers(-(2**40), 2**20))})
        except SettingsError as error:
            assert error.where == {"field": name}  # noqa: PT017 - either outcome is right
        else:
            assert getattr(changed, name) >= 0


def test_a_network_goes_through_json_and_back():
    options = every.NetworkOptions(hidden=(8, 4), memory=3)
    assert every.network_options(every.as_json(options)) == options
    for wrong in ({"hidden": [8]} | {"depth": 3}, {"hidden": 8}, {"hidden": ["8"]}, {}):
        with pytest.raises(SettingsError):
            every.network_options(wrong)
