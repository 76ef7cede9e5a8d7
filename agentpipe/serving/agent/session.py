"""One agent from start to end: the shortest way to the first answer first, everything else behind it.

*Ready* is an agent that can answer: bundle read, graph loaded, journal recovered. *Complete* is one whose metrics,
candidate in the shadow and memory are there as well; these come in a thread of their own, one after the other, and what
fails among them is said and costs nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from agentpipe.closing import Closing
from agentpipe.errors import AgentpipeError, BundleError, InputError, LineError, LockHeldError
from agentpipe.serving import layout
from agentpipe.serving.agent.deciders import RulesDecider, read_policy
from agentpipe.serving.agent.following import Follower
from agentpipe.serving.agent.generations import Generations
from agentpipe.serving.agent.healing import Healing, declared_rungs
from agentpipe.serving.agent.interlocks import Interlocks, read_interlocks
from agentpipe.serving.agent.journal import Journal
from agentpipe.serving.agent.outbox import InboxSink, Shipper, Sink, StreamSink
from agentpipe.serving.agent.parties import quietly
from agentpipe.serving.agent.probes import Part
from agentpipe.serving.agent.remembering import MemoryMaker
from agentpipe.serving.agent.runtime import Runtime
from agentpipe.serving.agent.socket_line import SocketLine
from agentpipe.serving.agent.states import OrderStates
from agentpipe.serving.agent.vocabulary import vocabulary_of
from agentpipe.storage import prepare_home, read_json, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agentpipe.serving.agent.deciders import PolicyFiles
    from agentpipe.serving.agent.memory import Memory
    from agentpipe.serving.agent.parties import Onlooker
    from agentpipe.serving.agent.probes import Change
    from agentpipe.serving.agent.shadow import Shadow
    from agentpipe.serving.agent.states import Remembered
    from agentpipe.serving.agent.types import LineAdapter
    from agentpipe.settings import Settings

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
FOLLOWED: Final = "the policy changed:"
NOT_FOLLOWED: Final = "the policy did not change:"
"""what is said of another champion begins like this"""
FEEDBACK: Final = "feedback"
"""the part that is lost while decisions cannot be handed on"""
_HOLDS: Final = 1_000_000
"""times that the fallback may repeat an action: what limits it is the diagnosis after five late steps"""


@dataclass(frozen=True)
class AgentOptions:
    """What an agent is started with.

    Args:
        line: ``tcp://HOST:PORT``, or what a stream is read from (see ``mapping``).
        bundle: folder of the bundle; None: the champion's. Another champion, and other content of the folder, is
            followed while the agent works: orders that begin from then on get it.
        name: of the agent; its folder is ``HOME/agent/<name>``.
        interlocks: file of hard limits; None: none.
        shadow: folder of a candidate's bundle that decides beside it; None: nobody does.
        mapping: file that says which columns of a stream mean what; None: ``line`` is an address.
        feedback: where decisions are handed on to.
        memory: whether cases are looked up; where there is no memory, it is made in the background.
    """

    line: str
    bundle: Path | None = None
    name: str = "agent"
    interlocks: Path | None = None
    shadow: Path | None = None
    mapping: Path | None = None
    feedback: Literal["inbox", "stream"] = "inbox"
    memory: bool = True


class Session(Closing):
    """Everything of one agent, started and ended together; :meth:`run` works.

    Args:
        options: see there.
        settings: home, sections ``agent``, ``alerts``, ``feedback``.
        say: told what a person should know, one line.
        line: an adapter instead of ``options.line``.

    Raises:
        InputError, InterlockError: an option or a file of interlocks cannot be used.
        BundleError: the bundle is damaged, or there is no champion.
        LockHeldError: an agent of this name runs already.
        StoreError: the home or the journal cannot be used.
        LineError: the address is none.
    """

    def __init__(
        self,
        options: AgentOptions,
        settings: Settings,
        *,
        say: Callable[[str], object] = str,
        line: LineAdapter | None = None,
    ) -> None:
        if not _NAME.fullmatch(options.name):
            remedy = "use small letters, digits, - and _"
            raise InputError(f"{options.name!r} is no name of an agent", field="name", remedy=remedy)
        self.options, self.settings, self.say = options, settings, quietly(say)
        self.folder = settings.home / "agent" / options.name
        self.metrics_port: int | None = None
        self.complete = threading.Event()
        self._lost: set[str] = set()
        self._shadow: Shadow | None = None
        self._shadow_lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        try:
            self._build(line)
        except BaseException:
            self._stack.close()
            raise

    def _build(self, line: LineAdapter | None) -> None:
        options, settings = self.options, self.settings
        prepare_home(settings.home)
        self._stack.enter_context(agent_lock(self.folder))
        policy = read_policy(self._bundle())
        self.vocabulary = vocabulary_of(policy.signature)
        states = OrderStates(self._remembered)
        *rungs, rules = declared_rungs(policy, settings.agent.triton, states=states)
        self.generations = Generations(policy, rungs)
        limits = self._interlocks()
        self.journal = Journal(self.folder / "journal", damaged=self.folder / "damaged", say=self.say)
        self._stack.callback(self.journal.close)
        self.line = line or self._open_line()
        self._stack.callback(self.line.close)
        self._onlookers: list[Onlooker] = [self.generations]
        self.follower = Follower(
            self.generations,
            self._bundle,
            lambda files: declared_rungs(files, settings.agent.triton, states=states)[:-1],
            up=self._up,
            every=settings.agent.follow_every,
            installed=self._installed,
            refused=self._refused,
        )
        self.healing = Healing(
            [*self.generations.rungs, rules],
            policy.signature,
            settings,
            self.folder,
            options.name,
            line_probe=self._probe_line,
            others=[Part("champion", self.follower.probe)],
            ready=[rungs[-1].name],
            on_change=self._changed,
            say=self.say,
        )
        self.maker = MemoryMaker()
        self._stack.callback(self.maker.close)
        self.healing.metrics.policy(policy.version)
        self._stack.callback(self.healing.close)
        self._stack.callback(self._end_shadow)
        self._stack.callback(self.follower.close)
        self.shipper = Shipper(
            self.journal,
            self._sink(),
            agent=options.name,
            say=self.say,
            on_trouble=lambda why: self.healing.tell(FEEDBACK, why),
        )
        self._stack.callback(self.shipper.close)
        self.runtime = Runtime(
            self.line,
            self.healing,
            RulesDecider(policy.signature, holds=_HOLDS),
            self.journal,
            limits,
            self.vocabulary,
            reserve=settings.agent.reserve_seconds,
            folder=self.folder,
            onlookers=self._onlookers,
            on_ended=self.shipper.wake,
            say=self.say,
        )
        self._stack.callback(self.runtime.close)
        self.runtime.refresh()
        gauges = {
            "feedback_backlog": lambda: self.shipper.backlog,
            "journal_damaged": lambda: self.journal.damaged,
            "ready": lambda: float(self.runtime.working),
            "complete": lambda: float(self.complete.is_set()),
            "takeover": lambda: float(self.runtime.taken_over > 0),
        }
        for name, read in gauges.items():
            self.healing.metrics.gauge(name, read)

    def run(self) -> None:
        """Works until :meth:`stop`, or the end of the line.

        Raises:
            ForeignLineError: the line is not one of this policy.
            ServingError: it cannot listen to the line any more.
        """
        self.shipper.start()
        self.follower.start()
        threading.Thread(target=self._fill, name="background", daemon=True).start()
        self.runtime.run()

    def stop(self) -> None:
        """Ends :meth:`run`. Any thread."""
        self.runtime.stop()

    def close(self) -> None:
        """Ends everything, the last first; what can be handed on is."""
        self._stack.close()

    @property
    def policy(self) -> PolicyFiles:
        """The bundle of orders that begin now."""
        return self.generations.newest.files

    def figures(self) -> dict[str, Any]:
        """What has happened, as a JSON object."""
        level = self.healing.ladder.level
        return {
            "agent": self.options.name,
            "policy": self.policy.version,
            "level": {"index": level.index, "name": level.name},
            "feedback_trouble": self.shipper.trouble,
            **self.runtime.figures(),
            "backlog": self.shipper.backlog,
            "journal_damaged": self.journal.damaged,
        }

    # ------------------------------------------------------------------------------------------- inside

    def _bundle(self) -> Path:
        return self.options.bundle or champion_bundle(self.settings.home)

    def _remembered(self, line_id: str, order_id: str) -> Remembered | None:
        return self.journal.remembered(line_id, order_id)

    def _up(self, rung: str) -> bool:
        return self.healing.ladder.up(rung)

    def _installed(self, before: PolicyFiles, after: PolicyFiles) -> None:
        self.healing.metrics.policy(after.version)
        self.say(f"{FOLLOWED} {after.version[:16]} in place of {before.version[:16]}: orders that begin from now on")
        if self._shadow is not None:
            self._load("shadow", self._start_shadow)

    def _refused(self, why: str) -> None:
        self.healing.metrics.policy_refused()
        self.say(f"{NOT_FOLLOWED} {why}; {self.policy.version[:16]} goes on")

    def _interlocks(self) -> Interlocks:
        if self.options.interlocks is None:
            return Interlocks((), self.vocabulary)
        return read_interlocks(self.options.interlocks, self.vocabulary, self.policy.signature.action_count)

    def _open_line(self) -> LineAdapter:
        seconds = self.settings.agent.decision_seconds
        if self.options.mapping is not None:
            from agentpipe.serving.agent.stream_line import open_stream_line

            return open_stream_line(self.options.line, self.options.mapping, self.policy.signature, seconds)
        return SocketLine(self.options.line, self.policy.signature, seconds=seconds, agent=self.options.name)

    def _probe_line(self, timeout: float) -> None:
        del timeout
        by = getattr(self.line, "displaced", "")
        if by:
            text = f"the agent {by} has taken this one's place at the line"
            raise LineError(text, remedy="end one of them: a line works with one agent")
        runtime: Runtime | None = getattr(self, "runtime", None)  # see _changed
        if runtime is not None and not runtime.presence.connected:
            raise LineError("the line is not connected", remedy="start it, or correct --line")

    def _changed(self, change: Change) -> None:
        if not change.up or change.part in self._lost:  # the first good probe is no news
            self.say(f"{change.part} is {'back' if change.up else 'lost'}: {change.reason}")
        self._lost.discard(change.part) if change.up else self._lost.add(change.part)
        runtime: Runtime | None = getattr(self, "runtime", None)  # probes may be faster than we are
        if runtime is not None:
            runtime.refresh()

    def _sink(self) -> Sink:
        if self.options.feedback == "inbox":
            return InboxSink(self.folder / "outbox", self.settings.home / "feedback" / "inbox")
        if self.settings.redis_url is None:
            remedy = "set REDIS_URL, or hand on to the inbox"
            raise InputError("decisions cannot be handed to a stream without Redis", field="feedback", remedy=remedy)
        return StreamSink(self.settings.redis_url.get_secret_value(), self.settings.feedback.stream)

    def _fill(self) -> None:
        """Loads what the first answer does not need."""
        parts: dict[str, Callable[[], None]] = {"metrics": self._serve_metrics}
        if self.options.shadow is not None:
            parts["shadow"] = self._start_shadow
        if self.options.memory:
            parts["memory"] = self._load_memory
        missing = [name for name, load in parts.items() if not self._load(name, load)]
        if self.maker.ended:
            return
        if missing:
            self.say(f"incomplete: without {', '.join(missing)}")
            return
        self.complete.set()
        self.say(f"complete after {process_age():.2f} s")

    def _load(self, name: str, load: Callable[[], None]) -> bool:
        try:
            load()
        except AgentpipeError as error:
            self.say(f"{name} is not there: {error.message}")
            return False
        return True

    def _serve_metrics(self) -> None:
        agent = self.settings.agent
        self.metrics_port = self.healing.metrics.serve(agent.metrics_port, agent.metrics_host)

    def _start_shadow(self) -> None:
        """The candidate beside the champion of now, with a report of its own."""
        from agentpipe.serving.agent.shadow import Shadow

        assert self.options.shadow is not None
        self._end_shadow()
        candidate, champion = read_policy(self.options.shadow), self.policy
        if candidate.version == champion.version:
            self.say("the candidate of the shadow is the policy in use: there is nothing to compare")
            return
        shadow = Shadow(candidate, champion, self.folder / "shadow", self.vocabulary, say=self.say)
        with self._shadow_lock:
            self._shadow = shadow
            self._onlookers.append(shadow)

    def _end_shadow(self) -> None:
        with self._shadow_lock:
            shadow, self._shadow = self._shadow, None
            if shadow is not None:
                self._onlookers.remove(shadow)
        if shadow is not None:
            shadow.close()

    def _load_memory(self) -> None:
        from agentpipe.serving.agent.recall import Recall, open_memory

        home = self.settings.home
        memory = open_memory(home, self.policy.signature)
        if memory is None and next(home.glob("trajectories/*/*"), None) is not None:
            memory = self._make_memory()
        if memory is None:
            if not self.maker.ended:
                self.say("no memory: there are no recorded trajectories that it could be made from")
            return
        recall = Recall(memory, self.vocabulary, self.journal)
        self._stack.callback(recall.close)
        self._onlookers.append(recall)

    def _make_memory(self) -> Memory | None:
        from agentpipe.serving.agent.recall import open_memory

        self.say("the memory is being made from recorded trajectories")
        with contextlib.suppress(InputError):  # nothing that could be remembered
            self.maker.make(self.settings.home, self.policy.path)
        return open_memory(self.settings.home, self.policy.signature)


def champion_bundle(home: Path) -> Path:
    """The bundle of the champion.

    Raises:
        BundleError: there is no champion, or its bundle is not in the home.
        CorruptError, VersionError: the champion's pointer is damaged.
    """
    from agentpipe.learning.succession.champion import ChampionStore

    current = ChampionStore(home / "champion").current()
    if current is None:
        raise BundleError("there is no champion yet", home=home, remedy="name a bundle with --bundle")
    named = current.figures.get("bundle")
    for path in [*([home / str(named)] if named else []), *sorted((home / "bundles").glob("bundle-*"))]:
        if _package_of(path) == current.digest:
            return path
    text = f"no bundle of the champion {current.digest[:16]} is in the home"
    raise BundleError(text, home=home, remedy="name one with --bundle")


def _package_of(bundle: Path) -> str | None:
    path = bundle / layout.PROVENANCE
    if not path.is_file():
        return None
    content = read_json(path)
    package = content.get("package") if isinstance(content, dict) else None
    return package.get("digest") if isinstance(package, dict) else None


@contextlib.contextmanager
def agent_lock(folder: Path) -> Iterator[None]:
    """Holds an agent's folder while the body runs; the lock dies with the process.

    Raises:
        LockHeldError: an agent of this name runs already.
        DiskFullError, HomeError: the folder cannot be made.
    """
    path = folder / "lock"
    with typed_os_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = f"an agent called {folder.name} runs already"
            raise LockHeldError(text, file=path, remedy="end it, or choose another --name") from error
        yield
    finally:
        os.close(descriptor)


def process_age() -> float:
    """Seconds since this process was started by the system, to a hundredth."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
