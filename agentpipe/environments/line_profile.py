"""The line profile: what channels read when healthy and how each physical fault mode moves them (S5, S6).

Everything is in healthy standard deviations of a channel: a shift of 2 on vibration means "two healthy SD above
normal". A profile is the project's own (``data/line_profile.json``) or fitted from a machine-history table.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.environments.csvio import read_input
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import CHANNELS, PHYSICAL_MODES
from agentpipe.errors import InputError
from agentpipe.storage import canonical_json, digest_bytes, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PROFILE_FORMAT = 1
STRUCTURAL_MODES = ("sensor_failure", "plc_overload", "false_alarm")
DEFAULT_STRUCTURAL = {"sensor_failure": 0.12, "plc_overload": 0.10, "false_alarm": 0.15}
_REMEDY = "correct the file, or restore it from the project"


@dataclass(frozen=True)
class Channel:
    """One sensor channel of every machine: healthy mean ``nominal`` and standard deviation ``sd``, in ``unit``."""

    name: str
    unit: str
    nominal: float
    sd: float


@dataclass(frozen=True, eq=False)
class Mode:
    """One physical fault mode.

    ``shift`` f64[channels] and ``covariance`` f64[channels, channels] are in healthy standard deviations;
    ``prevalence`` is its share of all faults and alarms; ``rows`` is the number of rows it was fitted from (0: not
    fitted).
    """

    name: str
    shift: npt.NDArray[np.float64]
    covariance: npt.NDArray[np.float64]
    prevalence: float
    rows: int = 0


@dataclass(frozen=True, eq=False)
class LineProfile:
    """Channels, fault signatures and prevalences of a line; immutable.

    Prevalences of ``modes`` and ``structural_prevalence`` together sum to 1. ``report`` says where it all comes from
    and is not part of the digest.
    """

    name: str
    channels: tuple[Channel, ...]
    healthy_covariance: npt.NDArray[np.float64]
    modes: tuple[Mode, ...]
    structural_prevalence: Mapping[str, float]
    report: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for array in (self.healthy_covariance, *(a for mode in self.modes for a in (mode.shift, mode.covariance))):
            array.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LineProfile) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of everything but the name and the report."""
        return digest_bytes(canonical_json({**self.to_json(), "name": None, "report": None}))

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form; :meth:`from_json` reads it back to the same digest."""
        modes = [
            {
                "name": mode.name,
                "shift": mode.shift.tolist(),
                "covariance": mode.covariance.tolist(),
                "prevalence": mode.prevalence,
                "rows": mode.rows,
            }
            for mode in self.modes
        ]
        return {
            "format": PROFILE_FORMAT,
            "name": self.name,
            "channels": [vars(channel) for channel in self.channels],
            "healthy_covariance": self.healthy_covariance.tolist(),
            "modes": modes,
            "structural_prevalence": dict(self.structural_prevalence),
            "report": dict(self.report),
        }

    @classmethod
    def from_json(cls, content: object, source: object = None) -> LineProfile:
        """Reads and checks a profile.

        Raises:
            InputError: unknown or missing fields, wrong sizes, not finite, covariances that are not symmetric and
            positive
                semi-definite, prevalences that do not sum to 1.
        """
        reader = _Reader(source)
        top = reader.fields(content, "profile", vars(cls)["__dataclass_fields__"].keys() | {"format"})
        if top["format"] != PROFILE_FORMAT:
            raise reader.fail(f"format {top['format']!r}, this program reads {PROFILE_FORMAT}", "format")
        channels = tuple(reader.channel(item, i) for i, item in enumerate(reader.items(top["channels"], "channels")))
        if len(channels) != CHANNELS or len({channel.name for channel in channels}) != CHANNELS:
            raise reader.fail(f"{len(channels)} channels, {CHANNELS} different ones wanted", "channels")
        modes = tuple(reader.mode(item, i) for i, item in enumerate(reader.items(top["modes"], "modes")))
        if not 1 <= len(modes) <= PHYSICAL_MODES or len({mode.name for mode in modes}) != len(modes):
            raise reader.fail(f"{len(modes)} modes, 1 … {PHYSICAL_MODES} different ones wanted", "modes")
        structural = reader.fields(top["structural_prevalence"], "structural_prevalence", set(STRUCTURAL_MODES))
        shares = {name: reader.share(structural[name], f"structural_prevalence.{name}") for name in STRUCTURAL_MODES}
        total = sum(shares.values()) + sum(mode.prevalence for mode in modes)
        if abs(total - 1.0) > 1e-6:
            raise reader.fail(f"the prevalences sum to {total:.6g}, not 1", "prevalence")
        healthy = reader.covariance(top["healthy_covariance"], "healthy_covariance")
        report = top["report"] if isinstance(top["report"], dict) else {}
        return cls(str(top["name"]), channels, healthy, modes, shares, report)


def load_profile(path: Path) -> LineProfile:
    """Reads a profile from a JSON file; raises ``InputError`` naming file and field."""
    data = read_input(path, InputError)
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"not valid JSON: {error}", file=path, remedy=_REMEDY) from error
    return LineProfile.from_json(content, path)


def save_profile(profile: LineProfile, path: Path) -> None:
    """Writes a profile as JSON, durably and atomically."""
    write_json(path, profile.to_json())


def default_profile(folder: Path | None = None) -> LineProfile:
    """The project's own profile, ``line_profile.json`` in ``folder`` (``None``: the project's data files)."""
    return load_profile((data_dir() if folder is None else folder) / "line_profile.json")


class _Reader:
    """Checks the parts of a profile; every complaint names file and field."""

    def __init__(self, source: object) -> None:
        self.source = source

    def fail(self, message: str, name: str) -> InputError:
        return InputError(message, file=self.source, field=name, remedy=_REMEDY)

    def fields(self, content: object, name: str, wanted: set[str]) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise self.fail(f"{name} is not an object", name)
        wrong = sorted(wanted ^ set(content))
        if wrong:
            raise self.fail(f"{'unknown' if wrong[0] in content else 'missing'} field {wrong[0]!r} in {name}", wrong[0])
        return content

    def items(self, content: object, name: str) -> list[Any]:
        if not isinstance(content, list):
            raise self.fail(f"{name} is not a list", name)
        return content

    def array(self, content: object, name: str, shape: Sequence[int]) -> npt.NDArray[np.float64]:
        try:
            array = np.array(content, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise self.fail(f"{name} is not a block of numbers", name) from error
        if array.shape != tuple(shape) or not np.isfinite(array).all():
            size = " × ".join(str(n) for n in shape) or "one"
            raise self.fail(f"{name} is not {size} finite number{'s' if shape else ''}", name)
        return array

    def number(self, content: object, name: str) -> float:
        if isinstance(content, bool) or not isinstance(content, int | float):
            raise self.fail(f"{name} is not a number", name)
        return float(self.array(content, name, ()))

    def share(self, content: object, name: str) -> float:
        value = self.number(content, name)
        if not 0.0 <= value <= 1.0:
            raise self.fail(f"{name} {value:g} is not a share in 0 … 1", name)
        return value

    def covariance(self, content: object, name: str) -> npt.NDArray[np.float64]:
        array = self.array(content, name, (CHANNELS, CHANNELS))
        if not np.allclose(array, array.T, atol=1e-9) or np.linalg.eigvalsh(array)[0] < -1e-9:
            raise self.fail(f"{name} is not symmetric and positive semi-definite", name)
        return array

    def channel(self, content: object, index: int) -> Channel:
        name = f"channels[{index}]"
        fields = self.fields(content, name, {"name", "unit", "nominal", "sd"})
        sd = self.number(fields["sd"], f"{name}.sd")
        if sd <= 0:
            raise self.fail(f"{name}.sd is not positive", f"{name}.sd")
        return Channel(str(fields["name"]), str(fields["unit"]), self.number(fields["nominal"], f"{name}.nominal"), sd)

    def mode(self, content: object, index: int) -> Mode:
        name = f"modes[{index}]"
        fields = self.fields(content, name, {"name", "shift", "covariance", "prevalence", "rows"})
        return Mode(
            str(fields["name"]),
            self.array(fields["shift"], f"{name}.shift", (CHANNELS,)),
            self.covariance(fields["covariance"], f"{name}.covariance"),
            self.share(fields["prevalence"], f"{name}.prevalence"),
            int(self.number(fields["rows"], f"{name}.rows")),
        )
