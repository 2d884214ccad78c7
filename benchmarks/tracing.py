# What a trace costs a gateway: CPU for each call that ends, none of it traced and all of it, to a collector in another
# process that takes everything.
#   python -m benchmarks.tracing [--calls 20000]

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

from billing.core.records import Attempt, Status, UsageRecord
from gateway.calls.call import Call
from gateway.telemetry.trace_export import TraceExport
from gateway.telemetry.tracing import Tracer

AT_ONCE, PAUSE = 100, 0.02  # calls that end, and seconds until as many do
CALL = cast(Call, SimpleNamespace(traceparent=None))


def record(number: int) -> UsageRecord:
    """Return a call that one upstream answered."""
    return UsageRecord(
        request_id=f"0192f0c0-1111-7222-8333-{number:012x}",
        team_id="team_a",
        key_id="key_a",
        endpoint="chat.completions",
        model_asked="small",
        model_used="small",
        provider="upstream",
        provider_endpoint="local http://upstream/v1",
        status=Status.ANSWERED,
        input_tokens=20,
        output_tokens=30,
        cost_nanousd=80_000,
        first_token_ms=20.0,
        total_ms=50.0,
        attempts=(Attempt("upstream/local/http://upstream/v1/small", "ok", 19.0),),
        route_reason="named",
        created_at=1000.0,
    )


async def measure(records: list[UsageRecord], url: str | None, share: float = 0.0) -> tuple[float, float]:
    """Return microseconds of CPU for each call: of the whole process, and of the loop that serves callers."""
    tracer = None if url is None else Tracer(TraceExport(url), share)
    whole, loop = time.process_time(), time.thread_time()
    for begin in range(0, len(records), AT_ONCE):
        if tracer is not None:
            for each in records[begin : begin + AT_ONCE]:
                tracer.note(CALL, each)
        await asyncio.sleep(PAUSE)
    loop = time.thread_time() - loop
    if tracer is not None:
        await tracer.close()
    return (time.process_time() - whole) * 1e6 / len(records), loop * 1e6 / len(records)


def collect(ready: Connection) -> None:
    """Take whatever is posted, for ever."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ready.send(server.server_port)
    server.serve_forever()


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=20_000)
    records = [record(number) for number in range(parser.parse_args().calls)]
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    collector = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,), daemon=True)
    collector.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    for name, given, share in (("not traced", None, 0.0), ("share 0", url, 0.0), ("share 1", url, 1.0)):
        whole, loop = asyncio.run(measure(records, given, share))
        print(f"{name:12} {whole:6.1f} µs of CPU a call, {loop:6.1f} of them in the loop")
    collector.terminate()


if __name__ == "__main__":
    main()
