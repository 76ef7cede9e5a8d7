"""What breaks, and what it costs: faults at random instants while an agent works a line.

``python -m benchmarks.chaos --bundle BUNDLE`` kills Triton, cuts the networks to Triton and to the line, freezes
sensors, fills the disk and kills the agent, ``--times`` times each. It prints decisions lost, recorded twice and late,
the time to degrade and to recover, and how many orders end well with everything, without Triton, with a sensor lost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentpipe.environments.catalog import load_catalog
from agentpipe.errors import ServiceError
from agentpipe.serving.agent.simulated_line import LineOptions
from agentpipe.serving.server import TritonServer, install_triton
from agentpipe.storage import write_json
from agentpipe_tests.serving.agent.proxy import Proxy
from benchmarks.chaos_plant import Agent, Books, Line, audit, free_port, percentiles, wait_for
from benchmarks.measure import results_folder, stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS = ("triton", "network", "line", "sensor", "disk", "sigkill")
PACKAGES = ("numpy", "onnxruntime", "tritonclient", "grpcio")
MODES = ("swallow", "half", "reset", "refuse")
SENSORS = 25  # of the first five machines, which every line has
HOME_MB = 64


class Server(Protocol):
    """A Triton that can be killed and brought back at the same address."""

    address: str

    def kill(self) -> None:
        """Ends it without notice."""

    def start(self) -> None:
        """Starts it again; ready when this returns."""


class RealServer:
    """A Triton of this machine that serves one bundle."""

    def __init__(self, bundle: Path) -> None:
        self._bundle, self._installation = bundle, install_triton()
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Starts it; ready when this returns."""
        self._server = TritonServer(self._bundle, self._installation, grpc_port=self._port)

    def kill(self) -> None:
        """SIGKILL for it and its stub."""
        with contextlib.suppress(ProcessLookupError):  # it has been killed before
            os.killpg(self._server._process.pid, signal.SIGKILL)  # noqa: SLF001 - nothing but a benchmark kills it
        self._server._process.wait()  # noqa: SLF001
        self._server.stop()


@dataclass
class Outcome:
    """What one kind of fault cost."""

    kind: str
    times: int = 0
    degraded: list[float] = field(default_factory=list)
    """seconds from the fault until the agent said that the part is lost"""
    recovered: list[float] = field(default_factory=list)
    """seconds from the cure until it said that the part is back"""
    missed: int = 0
    """deadlines that the line saw pass without an answer, over all connections"""

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        both = {"degraded_s": percentiles(self.degraded), "recovered_s": percentiles(self.recovered)}
        return {"kind": self.kind, "times": self.times, "missed": self.missed, **both}


class Chaos:
    """A line, two proxies, a server and an agent, to which faults can be done.

    Args:
        bundle: that both serve.
        server: the Triton.
        home: of the agent; its disk is filled.
        stations: environments of the hold-out side by side.
        probe_every: seconds.
        seed: of instants, modes and sensors.
    """

    def __init__(
        self, bundle: Path, server: Server, home: Path, *, stations: int, probe_every: float, seed: int = 0
    ) -> None:
        self._random, self._server, self._home = random.Random(seed), server, home
        self.probe_every = probe_every
        environments = load_catalog().environments("holdout")[::171][:stations]
        self.line = Line(environments, LineOptions(seconds=0.5, every=0.02, seed=seed))
        self.to_line, self.to_server = Proxy(self.line.address), Proxy(server.address)
        settings = {
            "triton": [self.to_server.address],
            "probe_every": probe_every,
            "probe_timeout": min(2.0, max(0.5, probe_every)),
        }
        self.agent = Agent(self.to_line.address, bundle, home, settings)
        try:
            self._at_the_top()
            wait_for(lambda: self.line.taken > 20, "the agent works")
        except BaseException:
            self.agent.kill()
            self.line.close()
            raise

    def fault(self, kind: str, outcome: Outcome) -> None:
        """One fault at a random instant, its cure a while after the agent has noticed, and the recovery.

        Begins with the agent at the top of its ladder: a busy machine may have taken it down.
        """
        self._at_the_top()
        time.sleep(self._random.random() * self.probe_every)
        missed = self.line.served.figures()["missed"]
        getattr(self, f"_{kind}")(outcome)
        outcome.times += 1
        taken = self.line.taken
        wait_for(lambda: self.line.taken > taken + 5, "the agent works again")
        outcome.missed += self.line.served.figures()["missed"] - missed

    def _lost_and_back(self, part: str, outcome: Outcome, cure: Callable[[], None], begun: float) -> None:
        outcome.degraded.append(self._when(f"{part}", "is lost", begun) - begun)
        time.sleep(self._random.random() * self.probe_every)
        before = time.monotonic()
        cure()
        cured = time.monotonic()
        outcome.recovered.append(max(0.0, self._when(f"{part}", "is back", before) - cured))

    def _at_the_top(self) -> None:
        wait_for(lambda: self.agent.level() == 0, "the top of the ladder", pause=0.05, more=self.agent.newest)

    def _when(self, part: str, what: str, since: float) -> float:
        """The moment at which the agent first said so."""
        wait_for(lambda: self.agent.said(part, what, since), f"{part} {what}", more=self.agent.newest)
        moment = self.agent.said(part, what, since)
        assert moment is not None
        return moment

    def _triton(self, outcome: Outcome) -> None:
        begun = time.monotonic()
        self._server.kill()
        self._lost_and_back("triton", outcome, self._server.start, begun)

    def _network(self, outcome: Outcome) -> None:
        begun = time.monotonic()
        self.to_server.set(self._random.choice(MODES))
        self._lost_and_back("triton", outcome, lambda: self.to_server.set("pass"), begun)

    def _line(self, outcome: Outcome) -> None:
        begun = time.monotonic()
        self.to_line.set(self._random.choice(MODES))
        outcome.degraded.append(self._when("the line", "is lost", begun) - begun)
        time.sleep(self._random.random() * self.probe_every)
        taken = self.line.taken
        self.to_line.set("pass")
        outcome.recovered.append(wait_for(lambda: self.line.taken > taken, "a decision"))

    def _sensor(self, outcome: Outcome) -> None:
        station = self._random.choice(list(self.line.served.stations.values()))
        begun = time.monotonic()
        self.line.freeze(station, self._random.randrange(SENSORS), self._random.gauss(0.0, 2.0))
        self._lost_and_back(f"sensor {station.name}", outcome, lambda: self.line.thaw(station), begun)

    def _disk(self, outcome: Outcome) -> None:
        begun = time.monotonic()
        filler = self._home / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        self._lost_and_back("disk", outcome, filler.unlink, begun)

    def _sigkill(self, outcome: Outcome) -> None:
        self.agent.kill()
        time.sleep(self._random.random() * self.probe_every)
        self.agent.start()
        started, taken = self.agent.started, self.line.taken
        outcome.degraded.append(wait_for(lambda: self.agent.ready(started), "ready"))
        wait_for(lambda: self.line.taken > taken, "the first decision")
        self._at_the_top()
        outcome.recovered.append(time.monotonic() - started)

    def end(self) -> tuple[dict[str, Any], Books]:
        """Ends everything; the agent's last figures, and the books."""
        figures = self.agent.end()
        self.line.close()
        self.to_line.close()
        self.to_server.close()
        return figures, audit(self.line.served, self._home)


@contextlib.contextmanager
def running(bundle: Path) -> Iterator[RealServer]:
    """A Triton that serves ``bundle`` while the body runs."""
    server = RealServer(bundle)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """``folder`` on a file system of 64 MiB while the body runs; False where this machine does not allow one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={HOME_MB}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def run_kind(kind: str, bundle: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One kind of fault, ``--times`` times, with a line, a server and an agent of its own."""
    with running(bundle) as server, tempfile.TemporaryDirectory() as folder, small_disk(Path(folder)) as small:
        if kind == "disk" and not small:
            return {"kind": kind, "skipped": "no small file system can be mounted here"}
        chaos = Chaos(
            bundle, server, Path(folder), stations=options.stations, probe_every=options.every, seed=options.seed
        )
        try:
            outcome = Outcome(kind)
            for _ in range(options.times):
                chaos.fault(kind, outcome)
        finally:
            last, books = chaos.end()
    named = ("late", "fallbacks", "asked", "expired", "withdrawn", "repeated", "decisions")
    counted = {name: len(value) if isinstance(value, list) else value for name, value in asdict(books).items()}
    return {**outcome.figures(), **counted, **{f"last_agent_{name}": last.get(name) for name in named}}


def success(bundle: Path, options: argparse.Namespace, *, triton: bool, frozen: bool) -> dict[str, Any]:
    """Share of orders that end well, on equal episodes."""
    environments = load_catalog().environments("holdout")[::31][: 2 * options.stations]
    line = Line(environments, LineOptions(seconds=0.5, orders=options.orders, seed=options.seed))
    draws = random.Random(options.seed)
    for station in line.served.stations.values():
        if frozen:
            line.freeze(station, draws.randrange(SENSORS), draws.gauss(0.0, 2.0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [stack.enter_context(running(bundle)).address] if triton else []
        agent = Agent(line.address, bundle, folder, {"triton": servers})
        stack.callback(agent.end)
        wait_for(lambda: not line.running, "all orders", 3_600.0)
    figures = line.served.figures()
    return {"triton": triton, "frozen": frozen, **{name: figures[name] for name in ("orders", "successes", "missed")}}


def main(arguments: list[str] | None = None) -> None:
    """Runs it, prints the figures, and writes them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="of a trained policy, such as the champion's")
    parser.add_argument("--times", type=int, default=20, help="faults of each kind")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two probes of a part")
    parser.add_argument("--stations", type=int, default=4)
    parser.add_argument("--orders", type=int, default=300, help="orders of each success share; 0 = none")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="two of each, few orders")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.times, options.every, options.orders = 2, 0.2, min(options.orders, 20)
    try:
        install_triton()
    except ServiceError as error:
        raise SystemExit(f"no Triton here: {error}") from error
    figures: dict[str, Any] = {"probe_every_s": options.every, "stations": options.stations}
    figures |= {"kinds": [], "success": []}
    for kind in options.kinds:
        figures["kinds"].append(run_kind(kind, options.bundle, options))
        print(figures["kinds"][-1], flush=True)
    for triton, frozen in ((True, False), (False, False), (False, True)) if options.orders else ():
        figures["success"].append(success(options.bundle, options, triton=triton, frozen=frozen))
        print(figures["success"][-1], flush=True)
    out = results_folder(options.out, smoke=options.smoke)
    write_json(out / "chaos.json", {**stamp("python -m benchmarks.chaos", PACKAGES), **figures})


if __name__ == "__main__":
    main()
