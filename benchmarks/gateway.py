# What the gateway costs: CPU milliseconds per request, requests per second and added latency, in front of the scripted
# upstream, beside the upstream alone, a bare pass-through on the same libraries and, where they are installed, other
# gateways (peers.py says which and how to install them), in one run, with what is promised of the ratios.
#
#   python -m benchmarks.gateway [--rounds 5] [--quick] [--only CASE] [--profile FILE] [--safety]
#                                [--peer smg=DIR] [--peer portkey=DIR] [--peer litellm=DIR]
#
# The server that is measured has a core to itself; upstream, load generator, Postgres and Valkey share another. Servers
# take turns in every round (A B C A B C …), so that a noisy neighbour hits all of them. CPU time is that of the
# server's own processes and threads; what Postgres and Valkey use for the gateway is told apart. Both are read a moment
# after the last answer, when what a server does behind its calls (usage records that are written, say) is done.

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.gateway_report import write_report
from benchmarks.measured import Case, Measured
from benchmarks.peers import Peer, read_peer
from benchmarks.stack import Server, rows_written, start_gateway, start_pass_through, start_upstream

TOKENS = 16
SETTLE = 0.8  # seconds: a gateway flushes its journal within 0.5
CASES = (
    Case(name="plain", model="bench-plain", script=f"tokens={TOKENS}", streams=False, connections=32, requests=1500),
    Case(
        name="stream, unpaced",
        model="bench-unpaced",
        script=f"tokens={TOKENS}",
        streams=True,
        connections=32,
        requests=1000,
    ),
    Case(
        name="stream, 20 ms a token",
        model="bench-paced",
        script=f"tokens={TOKENS},pace=0.02",
        streams=True,
        connections=64,
        requests=600,
    ),
    # One call after another: what is slept between two steps, and begun again with cold caches, is waited for.
    Case(
        name="a lone caller",
        model="bench-plain",
        script=f"tokens={TOKENS}",
        streams=False,
        connections=1,
        requests=400,
    ),
)
# What a caller waits for: requests sent at fixed moments, half as many as the gateway can take from clients that all
# wait for it. Calls that come alone cost more than those that come together, so its core is busier than half of the
# time; and then as many as keep it busy for about that.
HALF_LOAD = Case(
    name="plain, half load",
    model="bench-plain",
    script=f"tokens={TOKENS}",
    streams=False,
    connections=32,
    requests=500,
)
HALF_BUSY = replace(HALF_LOAD, name="plain, core half busy")
AT_A_RATE = (HALF_LOAD, HALF_BUSY)
# A few at once, for whom there is always room: what the content policy adds to the wait for a first token.
CALM = Case(
    name="stream, four at once",
    model="bench-paced",
    script=f"tokens={TOKENS},pace=0.02",
    streams=True,
    connections=4,
    requests=150,
)
NAMES = [case.name for case in (*CASES, *AT_A_RATE, CALM)]

QUESTION = [
    {"role": "system", "content": "You answer questions about rivers in whole sentences, in at most two of them. " * 4},
    {"role": "user", "content": "Which river is the longest in Europe, and through how many countries does it run?"},
    {"role": "assistant", "content": "The Volga; it runs through Russia alone, for some 3,500 kilometres. " * 3},
    {
        "role": "user",
        "content": "And the second longest? Name the capitals on its banks, from source to mouth. [number]",
    },
]


class Options(Struct, frozen=True, kw_only=True):
    """How long to measure."""

    cases: tuple[Case, ...]
    rounds: int
    scale: float  # of every case's number of requests
    profile: Path | None  # the gateway alone, under benchmarks.sampling
    safety: bool  # a gateway without a content policy beside one that blocks prompts and flags answers; nothing else
    peers: tuple[Peer, ...]


def main() -> None:
    """Measure, print the table and write it to benchmarks/results/."""
    options = read_options()
    cores = sorted(os.sched_getaffinity(0))
    own, shared = cores[0], cores[-1]
    os.sched_setaffinity(0, {shared})  # what is started from here, the generator above all, stays there
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollgate-bench-")))
        models = {case.model: f"gpt-4o:{case.script}" for case in CASES}
        listed = [f"--model={name}" for name in models.values()]
        upstream = stack.enter_context(start_upstream(shared, "--fast", *listed))
        wrapper = [sys.executable, "-m", "benchmarks.sampling", str(options.profile)] if options.profile else ()
        gateway = stack.enter_context(start_gateway(upstream, models, folder, own, shared, wrapper))
        servers = [gateway]
        if options.safety:
            checked = start_gateway(upstream, models, folder / "checked", own, shared, safety="block")
            servers.append(stack.enter_context(checked))
        elif options.profile is None:
            passing = stack.enter_context(start_pass_through(upstream, own))
            peers = [stack.enter_context(peer.start(upstream, models, folder, own)) for peer in options.peers]
            servers = [upstream, passing, gateway, *peers]
        measured = measure(servers, options, own, shared)
        booked = rows_written(gateway)
    if options.profile is None and not options.safety:
        closed = tuple(case for case in options.cases if case not in AT_A_RATE)
        paced = tuple(case for case in AT_A_RATE if any(one.case == case.name for one in measured))
        is_whole = closed == CASES and options.scale == 1.0
        size = len(body_of(CASES[0], gateway))
        write_report(measured, closed, paced, options.peers, booked, options.rounds, size, is_kept=is_whole)


def read_options() -> Options:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description="Measure what the gateway costs.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="the case of this name alone, or those whose names hold it")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, one round: does it run at all?")
    parser.add_argument("--profile", type=Path, help="run the gateway alone and write where its CPU time goes here")
    parser.add_argument("--safety", action="store_true", help="the gateway with and without a content policy alone")
    more = "measure this gateway as well, which is installed in DIR: smg, portkey or litellm"
    parser.add_argument("--peer", type=read_peer, action="append", default=[], metavar="NAME=DIR", help=more)
    said = parser.parse_args()
    cases = named(said.only, (*CASES, CALM) if said.safety else (*CASES, HALF_LOAD, HALF_BUSY))
    if not cases:
        parser.error(f"no case is called {said.only!r}: there are {', '.join(map(repr, NAMES))}")
    rounds, scale = (1, 0.1) if said.quick else (said.rounds, 1.0)
    return Options(
        cases=cases,
        rounds=rounds,
        scale=scale,
        profile=said.profile,
        safety=said.safety,
        peers=tuple(said.peer),
    )


def named(words: str, cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return the case of that name, else all whose names hold the words."""
    exact = tuple(case for case in cases if case.name == words)
    return exact or tuple(case for case in cases if words in case.name)


def measure(servers: Sequence[Server], options: Options, own: int, shared: int) -> list[Measured]:
    """Run every case against every server, in turns, after a warm-up that counts for nothing.

    Cases of a fixed rate come last: theirs follows from what the gateway does under those before.
    """
    closed = [case for case in options.cases if case not in AT_A_RATE]
    asked = [case for case in AT_A_RATE if case in options.cases]
    measured = measure_closed(closed, servers, options, own, shared)
    if options.profile or options.safety or not asked:
        return measured
    plain = [one for one in measured if one.case == CASES[0].name]
    plain = plain or measure_closed(CASES[:1], servers, replace(options, rounds=1), own, shared)
    rates = {
        server.name: statistics.median(one.per_second for one in plain if one.server == server.name)
        for server in servers
    }
    rate = rates["gateway"] / 2
    able = [server for server in servers if rates[server.name] >= 1.5 * rate]  # the others cannot take so many
    half = measure_at(HALF_LOAD, rate, able, options, own, shared)
    lone = [one.cpu_ms for one in half if one.server == "gateway"]
    if HALF_BUSY in asked:
        half += measure_at(HALF_BUSY, 500 / statistics.median(lone), able, options, own, shared)
    return measured + half


def measure_closed(
    cases: Sequence[Case], servers: Sequence[Server], options: Options, own: int, shared: int
) -> list[Measured]:
    """Run cases whose clients send when their last answer is whole."""
    measured: list[Measured] = []
    for case in cases:
        for server in servers:
            _place(server, servers, own, shared)
            run_case(case, server, 0, max(64, round(case.requests * options.scale / 3)))
        for number in range(options.rounds):
            for server in servers:
                _place(server, servers, own, shared)
                result = run_case(case, server, number, max(64, round(case.requests * options.scale)))
                measured.append(result)
                print(result.line(), flush=True)
    return measured


def measure_at(
    case: Case, rate: float, servers: Sequence[Server], options: Options, own: int, shared: int
) -> list[Measured]:
    """Send ``rate`` requests a second, at fixed moments, to every server in turns."""
    measured: list[Measured] = []
    for number in range(options.rounds):
        for server in servers:
            _place(server, servers, own, shared)
            result = run_case(case, server, number, max(64, round(case.requests * options.scale)), rate)
            measured.append(result)
            print(result.line(), flush=True)
    return measured


def run_case(case: Case, server: Server, number: int, requests: int, rate: float | None = None) -> Measured:
    """Send one case's requests to one server and return what they cost."""
    plan = {
        "url": server.url,
        "key": server.key,
        "headers": server.headers,
        "body": msgspec.Raw(body_of(case, server)),
        "connections": case.connections,
        "requests": requests,
        "rate": rate,
    }
    before, helpers_before = server.cpu(), server.helpers_cpu()
    command = [sys.executable, "-m", "benchmarks.load", msgspec.json.encode(plan).decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise SystemExit(f"the load generator failed: {done.stderr}")
    time.sleep(SETTLE)
    cpu, helpers = server.cpu() - before, server.helpers_cpu() - helpers_before
    outcome = json.loads(done.stdout)
    if outcome["failures"]:
        failed = f"{outcome['failures']} of {requests} requests failed: {outcome['failure']}"
        raise SystemExit(f"{server.name}, {case.name}: {failed}")
    return Measured(
        case=case.name,
        server=server.name,
        round=number,
        requests=outcome["requests"],
        cpu_ms=cpu * 1000 / outcome["requests"],
        helpers_ms=helpers * 1000 / outcome["requests"],
        per_second=outcome["requests"] / outcome["wall"],
        memory=server.memory(),
        bytes_per_answer=outcome["bytes_per_answer"],
        first=outcome["first"],
        total=outcome["total"],
    )


def body_of(case: Case, server: Server) -> bytes:
    """Return the request: some servers know the model by our name, the others by the upstream's."""
    model = case.model if server.takes_our_names else f"gpt-4o:{case.script}"
    body: dict[str, object] = {"model": model, "messages": QUESTION, "max_tokens": 256, "temperature": 0.7}
    if case.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body)


def _place(measured: Server, servers: Sequence[Server], own: int, shared: int) -> None:
    """Give the server that is measured its core; an upstream that is not goes back to the shared one."""
    for server in servers:
        if server.name == "upstream":
            server.pin(own if server is measured else shared)


if __name__ == "__main__":
    main()
