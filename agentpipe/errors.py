"""The tree of typed errors.

Every error says what is wrong (the message), where (keyword fields such as ``file``, ``row``, ``field``,
``environment``, ``step``) and what to do about it (``remedy``).
"""

from __future__ import annotations


class AgentpipeError(Exception):
    """Base of all errors that agentpipe raises on purpose.

    Args:
        message: What is wrong, one sentence.
        remedy: What the reader can do about it.
        **where: Where it happened; shown in the order given. ``None`` values are left out.
    """

    def __init__(self, message: str, *, remedy: str = "", **where: object) -> None:
        self.message = message
        self.remedy = remedy
        self.where: dict[str, object] = {key: value for key, value in where.items() if value is not None}
        super().__init__(self._text())

    def _text(self) -> str:
        place = ", ".join(f"{key} {value}" for key, value in self.where.items())
        text = f"{self.message} [{place}]" if place else self.message
        return f"{text} - {self.remedy}" if self.remedy else text

    def as_dict(self) -> dict[str, object]:
        """The error as a JSON-ready object: ``type``, ``message``, ``where``, ``remedy``."""
        where = {
            key: value if isinstance(value, int | float | bool) else str(value) for key, value in self.where.items()
        }
        return {"type": type(self).__name__, "message": self.message, "where": where, "remedy": self.remedy}


class InputError(AgentpipeError):
    """Raised when something a person supplied cannot be used."""


class SettingsError(InputError):
    """Raised when a setting is unknown, malformed or out of range."""


class TableError(InputError):
    """Raised when a disturbance table, or a change to it, is not valid."""


class UnpublishedError(TableError):
    """Raised when Redis holds no disturbance table, or not the version that is asked for."""


class CatalogError(InputError):
    """Raised when the environment catalogue or its split is not valid."""


class MachineHistoryError(InputError):
    """Raised when a machine-history table cannot be turned into a line profile."""


class FeedbackError(InputError):
    """Raised when a whole feedback file cannot be read."""


class StoreError(AgentpipeError):
    """Raised when a durable store cannot be read or written."""


class HomeError(StoreError):
    """Raised when the home directory cannot be used (missing, read-only, of another format)."""


class LockHeldError(StoreError):
    """Raised when another process holds the lock; the message names the holder."""


class DiskFullError(StoreError):
    """Raised when a write fails for want of space; what was there before is untouched."""


class CorruptError(StoreError):
    """Raised when stored bytes do not match their digest, length or format."""


class VersionError(StoreError):
    """Raised when something stored was written under a format version that this program does not read."""


class RecordError(StoreError):
    """Raised when an episode cannot be stored as it is (too long, incomplete, of another shape)."""


class RedisServerError(StoreError):
    """Raised when the Redis server cannot be reached, refuses the login, or refuses what is asked of it."""


class ShrunkError(StoreError):
    """Raised when a shard holds only seeds and actions: its records have to be made again before they can be read."""


class SimulationError(AgentpipeError):
    """Raised when a pool or simulator is used wrongly or computes nonsense."""


class NonFiniteError(SimulationError):
    """Raised at the first NaN or infinity, naming environment, field and step."""


class ActionError(SimulationError):
    """Raised when an action is out of range or not allowed by the mask."""


class EmptyMaskError(SimulationError):
    """Raised when no action at all is allowed."""


class LearningError(AgentpipeError):
    """Raised when training cannot go on."""


class CheckpointError(LearningError):
    """Raised when a checkpoint or policy package is damaged or does not fit."""


class GateError(LearningError):
    """Raised when a circuit breaker stops training; the last good state is kept."""


class EvaluationError(AgentpipeError):
    """Raised when an evaluation cannot be trusted (overlapping splits, no episodes, ...)."""


class ServingError(AgentpipeError):
    """Raised when a bundle cannot be built, verified or served."""


class BundleError(ServingError):
    """Raised when a bundle is damaged, incomplete or refused."""


class ParityError(ServingError):
    """Raised when the exported graph and the policy disagree."""


class ServiceError(ServingError):
    """Raised when a server cannot be started or reached (port in use, not installed, ...)."""


class RefusedError(ServiceError):
    """Raised when a server answers that it does not take a request or a model; the message is its own."""


class AnswerError(ServiceError):
    """Raised when what a server answers cannot be a decision: something missing, of another shape, or not finite."""


class NoServerError(ServiceError):
    """Raised when no server can be had: none installed, none that answers, or one that is too old."""


class LineError(ServingError):
    """Raised when a production line cannot be reached, or speaks nonsense."""


class AlertError(AgentpipeError):
    """Raised when an alert is not delivered, where the caller asked to know."""
