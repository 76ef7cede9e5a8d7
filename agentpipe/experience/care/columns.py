"""What an exported table says of itself: unit and meaning of every column, and what its numbers are called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from agentpipe.environments.layout import (
    ACCUMULATING,
    ACTION_COUNT,
    ACTION_NAMES,
    OBSERVATION_NAMES,
    OBSERVATION_SIZE,
    REASONS,
    SEGMENTS,
    TOKENS,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

COLUMNS: Final[Mapping[str, tuple[str, str]]] = {
    "environment": ("", "id of the environment, such as t0016.sensor-3"),
    "episode": ("", "number of the episode in its environment, from 0"),
    "step": ("", "number of the step in its episode, from 0"),
    "segment": ("", "phase of the decision; names: metadata `segments`"),
    "time": ("min", "simulated time since the alarm, before the step"),
    "action": ("", "what was done; names: metadata `actions`"),
    "last_action": ("", "action of the step before; at the first step the number of all actions"),
    "log_probability": ("", "natural logarithm of the probability with which the player took this action"),
    "value": ("scaled return", "the player's estimate of what would follow; 0 where it makes none"),
    "reward": ("", "reward of the step"),
    "fingerprint": ("", "CRC-32 of the disturbance parameters that the episode was played under"),
    "produced": ("bit set", "what the step made; bit i is entry i of metadata `tokens`"),
    "used": ("bit set", "what the step needed; bit i is entry i of metadata `tokens`"),
    "time_ns": ("ns", "when the step was taken, UTC"),
    "observation": ("", "what the player saw; names: metadata `features`"),
    "mask": ("", "which actions were allowed; names: metadata `actions`"),
    "policy": ("", "version of the player"),
    "terminated": ("", "the episode ended by itself at this step"),
    "truncated": ("", "the episode was cut off at this step: by its step limit or by the end of the recording"),
    "earned": ("", "the reward is not just the running cost of time"),
    "parents": ("", "earlier steps of the episode that made what this one used"),
    "dependents": ("", "steps that depend on this one, directly or not"),
    "influence": ("reward²", "dependents times the variance of their rewards"),
    "final_observation": ("", "at the last step of a truncated episode: what it would have gone on from; else null"),
    "success": ("", "of the episode: it succeeded"),
    "reason": ("", "of the episode: how it ended, -1 = the recording was cut; names: metadata `reasons`"),
    "cut": ("", "of the episode: the recording ended before it"),
    "compound": ("", "of the episode: the disturbance given to it for training, by kind; empty = that of its own row"),
}
"""name → unit and meaning"""


def described(name: str) -> dict[str, str]:
    """The metadata of one column: ``unit`` where it has one, ``meaning``."""
    unit, meaning = COLUMNS[name]
    return {**({"unit": unit} if unit else {}), "meaning": meaning}


def vocabularies(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What the numbers of a shard are called, as JSON lists: ``reasons``, and for the built-in line the rest."""
    reasons = manifest.get("reasons", REASONS)
    found = {"reasons": list(reasons)}
    if manifest.get("accumulating") == ACCUMULATING and manifest["action_count"] == ACTION_COUNT:
        found |= {"segments": list(SEGMENTS), "actions": list(ACTION_NAMES), "tokens": list(TOKENS)}
        if manifest["observation_size"] == OBSERVATION_SIZE:
            found["features"] = list(OBSERVATION_NAMES)
    return {name: json.dumps(names) for name, names in found.items()}
