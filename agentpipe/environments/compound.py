"""Compound disturbances: another disturbance for an environment's next episodes, put together from rows of the table.

One byte a kind says whose parameters of that kind are used: 0 = those of the environment's own row; 1 to 5 = those of a
row of the kind's cell of that intensity; 6 = background, those of the first row of the next kind's mildest cell, where
the kind is as good as off. The upper five bits give the row's place in its cell. Three such bytes fit an episode's
entry, so that the episode can be played again; they are read with the table version that the episode was played under.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments import physics
from agentpipe.environments.fixed import switch_off
from agentpipe.environments.parameters import CELLS, INTENSITIES, KINDS, PARAMETER_INDEX, PARAMETER_NAMES, cell_name
from agentpipe.environments.table import Fingerprint
from agentpipe.errors import SimulationError
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.environments.state import Fixed
    from agentpipe.environments.table import DisturbanceTable

OWN: Final = 0
"""the environment's own row"""
BACKGROUND: Final = 6
"""the kind is as good as off"""
PLACES: Final = 32
"""rows of a cell that can be named: the first so many"""
LEVELS: Final = len(INTENSITIES) + 1
"""0 = background, then the intensities"""
NONE: Final[npt.NDArray[np.uint8]] = np.zeros(len(KINDS), np.uint8)
"""every kind from the environment's own row"""
_LEVEL_BITS: Final = 3
_LEVEL_MASK: Final = (1 << _LEVEL_BITS) - 1
_COLUMNS: Final = tuple(
    slice(places[0], places[-1] + 1)
    for places in ([i for i, name in enumerate(PARAMETER_NAMES) if name.startswith(f"{kind}_")] for kind in KINDS)
)
"""of each kind: its parameters, which stand side by side"""

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]


def compound_code(level: int, place: int = 0) -> int:
    """The byte of one kind.

    Args:
        level: 0 = background, 1 to 5 = an intensity.
        place: of the row in its cell, 0 to 31.

    Raises:
        SimulationError: out of range.
    """
    if not (0 <= level < LEVELS and 0 <= place < PLACES):
        remedy = f"levels are 0 to {LEVELS - 1}, places 0 to {PLACES - 1}"
        raise SimulationError(f"no level {level} at place {place}", field="compound", remedy=remedy)
    return (level | place << _LEVEL_BITS) if level else BACKGROUND


def describe_compound(codes: Sequence[int] | Bytes, table: DisturbanceTable | None = None) -> str:
    """Three bytes as text, such as ``sensor-3.2 network-off load-own``; empty where all are the environment's own.

    Args:
        codes: u8[3], in the order of the kinds.
        table: with it variants are named as the table has them, else by their places.
    """
    if not any(int(code) for code in codes):
        return ""
    parts = []
    for kind, code in zip(KINDS, (int(code) for code in codes), strict=True):
        level, place = code & _LEVEL_MASK, code >> _LEVEL_BITS
        if 0 < level < LEVELS:
            rows = () if table is None else table.cell_rows(cell_name(kind, level))
            known = table is not None and place < len(rows)
            parts.append(f"{kind}-{level}.{table.rows[rows[place]].variant if table and known else place}")
        else:
            parts.append(f"{kind}-{'own' if code == OWN else 'off' if code == BACKGROUND else code}")
    return " ".join(parts)


def levels_of(codes: Bytes) -> npt.NDArray[np.int8]:
    """i8[..., 3] of u8[..., 3]: the intensity of each kind, 0 = background, -1 = the environment's own row decides."""
    level = (codes & _LEVEL_MASK).astype(np.int8)
    return np.where(codes == OWN, np.int8(-1), np.where(codes == BACKGROUND, np.int8(0), level))


class Compounds:
    """What the compounds of one pool's environments are, under one version of the table.

    Args:
        table: the version that the pool has pinned.
        names: N, ids of the environments.
        fixed: of the environments.
        allowed: bool[N], environments that may be given a compound.
        off: kinds that are switched off in the pool, whatever the compound says.

    Attributes:
        sensor_type, protocol, topology, own_mode: i8[N], of the environments' templates.
        own_levels: i8[N, 3], the level of each kind in an environment's own row: that of the row of the kind with equal
            parameters, 0 = background, -1 = no row of the kind is like it.
        variants: i64[3, 5], rows of each cell that can be named, by kind and intensity.
    """

    def __init__(
        self,
        table: DisturbanceTable,
        names: Sequence[str],
        fixed: Fixed,
        *,
        allowed: npt.NDArray[np.bool_],
        off: frozenset[str] = frozenset(),
    ) -> None:
        self.table, self.names, self.allowed, self.off = table, tuple(names), allowed, off
        self.rows = table.rows_for(names)
        self.sensor_type, self.protocol = fixed.sensor_type, fixed.protocol
        self.topology, self.own_mode = fixed.topology, fixed.own_mode
        self.background = _backgrounds(table)
        self.own_levels = _levels_of_rows(table, self.background)[self.rows]
        self.variants = np.array(
            [[min(len(table.cell_rows(cell_name(kind, i))), PLACES) for i in INTENSITIES] for kind in KINDS], np.int64
        )
        self._sources = _sources(table, self.background)
        self._parts = [[_part(table, row, kind) for kind in range(len(KINDS))] for row in range(len(table))]

    def sources(self, environments: Rows, codes: Bytes) -> Rows:
        """i64[k, 3]: the table row that gives each kind's parameters.

        Args:
            environments: i64[k], rows of the pool.
            codes: u8[k, 3].

        Raises:
            SimulationError: a byte names no row of the table.
        """
        named = np.stack([self._sources[kind][codes[:, kind]] for kind in range(len(KINDS))], axis=1)
        if (named == _NOBODY).any():
            at = int((named == _NOBODY).any(axis=1).argmax())
            text = f"the table has no compound {describe_compound(codes[at])}"
            remedy = "use the version of the table that the compound was made for"
            raise SimulationError(text, environment=self.names[environments[at]], field="compound", remedy=remedy)
        return np.where(named == _OWN_ROW, self.rows[environments][:, None], named)

    def parameters(self, sources: Rows) -> npt.NDArray[np.float32]:
        """f32[k, P] of table rows i64[k, 3]; what is switched off in the pool stays so."""
        parameters = np.empty((len(sources), len(PARAMETER_NAMES)), np.float32)
        for kind, columns in enumerate(_COLUMNS):
            parameters[:, columns] = self.table.parameters[sources[:, kind], columns]
        switch_off(parameters, self.off)
        return parameters

    def capacity(self, environments: Rows, parameters: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
        """i8[k]: packets that fit one poll cycle under parameters f32[k, P]."""
        bandwidth, snr = (parameters[:, PARAMETER_INDEX[f"network_{name}"]] for name in ("bandwidth_khz", "snr_db"))
        return physics.packets_a_cycle(bandwidth, snr, self.protocol[environments])

    def crc32(self, sources: Rows) -> npt.NDArray[np.uint32]:
        """u32[k]: the fingerprints of table rows i64[k, 3] as people read them."""
        distinct, inverse = np.unique(sources, axis=0, return_inverse=True)
        return np.array([zlib.crc32(self._content(row)) for row in distinct.tolist()], np.uint32)[inverse.reshape(-1)]

    def fingerprint(self, environment: int, codes: Bytes) -> Fingerprint:
        """Of one environment's compound; equal to that of a row of the table with the same parameters.

        Raises:
            SimulationError: a byte names no row of the table.
        """
        sources = self.sources(np.array([environment]), np.asarray(codes, np.uint8)[None])
        content = self._content(sources[0].tolist())
        return Fingerprint(digest_bytes(content), f"{zlib.crc32(content):08x}")

    def _content(self, sources: Sequence[int]) -> bytes:
        """What a fingerprint covers, as :meth:`DisturbanceTable.row_fingerprint` has it."""
        return b"[" + b",".join(self._parts[row][kind] for kind, row in enumerate(sources)) + b"]"


_OWN_ROW, _NOBODY = -1, -2


def _backgrounds(table: DisturbanceTable) -> tuple[int, ...]:
    """The row that gives each kind's background: the first of the next kind's mildest cell."""
    following = [KINDS[(kind + 1) % len(KINDS)] for kind in range(len(KINDS))]
    return tuple(table.cell_rows(cell_name(kind, INTENSITIES[0]))[0] for kind in following)


def _sources(table: DisturbanceTable, background: Sequence[int]) -> Rows:
    """i64[3, 256]: the table row that each byte of each kind names."""
    found = np.full((len(KINDS), 256), _NOBODY, np.int64)
    for kind, name in enumerate(KINDS):
        found[kind, OWN], found[kind, BACKGROUND] = _OWN_ROW, background[kind]
        for intensity in INTENSITIES:
            for place, row in enumerate(table.cell_rows(cell_name(name, intensity))[:PLACES]):
                found[kind, compound_code(intensity, place)] = row
    return found


def _levels_of_rows(table: DisturbanceTable, background: Sequence[int]) -> npt.NDArray[np.int8]:
    """i8[R, 3]: the level of each kind in each row of the table; a row's own kind has its intensity."""
    levels = np.full((len(table), len(KINDS)), -1, np.int8)
    for kind, columns in enumerate(_COLUMNS):
        known: dict[bytes, int] = {}
        for cell in CELLS:
            name, intensity = cell.rsplit("-", 1)
            for row in table.cell_rows(cell) if name == KINDS[kind] else ():
                known.setdefault(table.parameters[row, columns].tobytes(), int(intensity))
        known[table.parameters[background[kind], columns].tobytes()] = 0
        for row, content in enumerate(table.rows):
            own = content.intensity if content.kind == KINDS[kind] else None
            levels[row, kind] = known.get(table.parameters[row, columns].tobytes(), -1) if own is None else own
    return levels


def _part(table: DisturbanceTable, row: int, kind: int) -> bytes:
    """The parameters of one kind in one row, as they stand in what a fingerprint covers."""
    named: Any = [[name, value] for name, value in zip(PARAMETER_NAMES, table.rows[row].values, strict=True)]
    return canonical_json(named[_COLUMNS[kind]])[1:-1]
