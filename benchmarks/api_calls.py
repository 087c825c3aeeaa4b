"""What is timed of functions that wait: a service on this machine that answers after 50 ms."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pyarrow as pa

import geneva
from benchmarks.cases import Bench, Outcome, Target, numbers

ANSWER_SECONDS = 0.05
AT_ONCE = 32

_SERVICE = f"""
import asyncio

async def serve(reader, writer):
    while await reader.readline():
        while (await reader.readline()).strip():
            pass
        await asyncio.sleep({ANSWER_SECONDS})
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n42")
    writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextlib.contextmanager
def service() -> Iterator[int]:
    """Run the service in a process of its own; give its port."""
    process = subprocess.Popen([sys.executable, "-c", _SERVICE], stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()


class Client:
    """Asks the service for each row, over connections that are kept open."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def setup(self) -> None:
        self.idle = []

    async def close(self) -> None:
        for _, writer in self.idle:
            writer.close()

    async def __call__(self, x: float) -> float:
        connection = self.idle.pop() if self.idle else await self.connected()
        reader, writer = connection
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while (await reader.readline()).strip():
            pass
        answer = await reader.readexactly(2)
        self.idle.append(connection)
        return x + int(answer)

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


def async_http(bench: Bench) -> Outcome:
    """An async function of 50 ms a row, 32 calls at once in one task."""
    rows = bench.rows(6_000)
    outcome = Outcome(
        "async_http",
        "async UDF, 50 ms of HTTP a row, 32 calls at once",
        target=Target(1 / 0.9, "waits"),
    )
    table = bench.table(outcome.name, numbers(rows), 2)
    with service() as port:
        for run in range(bench.repeat):
            column = f"geneva_{run}"
            table.add_columns({column: geneva.udf(Client, data_type=pa.float64())(port)})
            started = time.perf_counter()
            result = table.backfill(column, concurrency=1)
            outcome.runs.append(time.perf_counter() - started)
            outcome.ideal_runs.append(rows * ANSWER_SECONDS / AT_ONCE)
            if not bench.is_quick:
                outcome.loop_runs.append(asyncio.run(_plain(rows, port)))
            outcome.metrics = result.progress.metrics()
    return outcome


async def _plain(rows: int, port: int) -> float:
    """The same calls by asyncio alone, out of as many loops as there are calls at once."""
    client, numbers = Client(port), iter(range(rows))
    await client.setup()

    async def work() -> None:
        for number in numbers:
            await client(float(number))

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    seconds = time.perf_counter() - started
    await client.close()
    return seconds


WARM = (async_http,)
