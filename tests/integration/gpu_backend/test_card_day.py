# What `make gpu` writes when something goes wrong on the day there is a card: the page is there, whole and plain about
# what is missing, whatever a part, a row, a kernel or a check does.

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine, gpu
from benchmarks.gpu import Part
from tests.gpu import __main__ as checks
from tests.gpu import operations
from tests.gpu.check import Check, Failed, Outcome, Setting
from tests.gpu.processes import run_beside

FLOAT32 = (torch.float32,)
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
(folder / "rows.md").write_text("# Rows of " + folder.name + "\\n")
(folder / "rows.json").write_text('{"rows": 1}')
"""
FATES = {
    "fine": "",
    "raises": "raise RuntimeError('no kernel image is available')",
    "dies": "os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": """
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(folder / "child").write_text(str(child.pid))
time.sleep(60)
""",
    "silent": "[file.unlink() for file in folder.glob('rows.*')]; raise MemoryError('CUDA out of memory')",
    "last": "",
}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any], str, list[int]]:
    """Run parts of every fate; return the exit status, both files, and the processes that the hanging part began."""
    modules, out, pids = tmp_path / "modules", tmp_path / "out", []
    modules.mkdir()
    for name, fate in FATES.items():
        (modules / f"fate_{name}.py").write_text(HEAD + fate)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(gpu, "parts", lambda tiny: [Part(f"part that {name}", f"fate_{name}") for name in FATES])
    monkeypatch.setattr(gpu.engine_rows, "GROUP_SECONDS", 3.0)
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    monkeypatch.setattr(gpu, "EVERY", 0.2)
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--out", str(out)])
    run_part = gpu.run_part

    def note_child(part: Part, folder: Path, *rest: Any) -> str:
        problem = run_part(part, folder, *rest)
        pids.extend(int(file.read_text()) for file in folder.glob("child"))
        return problem

    monkeypatch.setattr(gpu, "run_part", note_child)
    status = gpu.main()
    (facts,), (text,) = ([file.read_text() for file in out.glob(f"*.{kind}")] for kind in ("json", "md"))
    return status, json.loads(facts), text, pids


def test_page_is_whole_whatever_becomes_of_its_parts(page: Any) -> None:
    """Who raises, dies or hangs is told of with the last it said, keeps what it had, and is gone with its children."""
    status, facts, text, children = page

    problems = {name.removeprefix("part that "): problem for name, problem in facts["problems"].items()}
    assert status == 1 and list(problems) == ["raises", "dies", "hangs", "silent"]
    assert problems["raises"] == "ended with status 1; the last it said: RuntimeError: no kernel image is available"
    assert problems["dies"].startswith("ended with status -11") and problems["hangs"].startswith("out of time after 3")
    assert all(f"**PROBLEM** in part that {name}: " in text for name in problems)
    assert list(facts["parts"]) == [f"part that {name}" for name in FATES if name != "silent"]
    assert "## part that silent\n\nNothing was measured: ended with status 1; the last it said: MemoryError" in text
    assert text.index("Rows of part that fine") < text.index("Rows of part that hangs") < text.index("that last")
    assert len(children) == 1 and is_gone(children[0])


def test_parts_that_are_left_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the time is over before a part begins, the page says so."""
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--out", str(tmp_path), "--seconds", "1"])

    status = gpu.main()

    (text,) = (file.read_text() for file in tmp_path.glob("*.md"))
    assert status == 1 and text.count("Nothing was measured: left out: no time") == len(list(gpu.parts(True)))


def test_most_telling_parts_come_first() -> None:
    """Checks, our rows at every shape that has a goal, one peer, and only then what explains them; each can have half
    of its time within the ten minutes, and the goals' all of it.
    """
    order = list(gpu.parts(tiny=False))
    names = [part.name for part in order]

    ours = ["engine Qwen3-0.6B", "engine Llama-3.1-8B", "engine Qwen3-14B"]
    assert names[:7] == ["checks", *ours, "transformers Llama-3.1-8B", "predicted", "profile"] and len(names) == 10
    assert sum(part.longest for part in order[:5]) + 2 * gpu.GRACE <= gpu.ALL_SECONDS
    assert sum(part.longest / 2 for part in order) < gpu.ALL_SECONDS < 600


def test_row_that_runs_out_of_memory_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is a row that says so; those behind it are measured, by an engine that has none of its requests left."""
    drive, seen = engine.drive, []

    def fail_once(loop: Any, requests: Any, *rest: Any) -> Any:
        seen.append(len(requests))
        if len(requests) == 8 and seen.count(8) == 1:  # of the shared workload
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(loop.runner, "launch", out_of_memory)
                return drive(loop, requests, *rest)
        return drive(loop, requests, *rest)

    def out_of_memory(plan: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(engine, "drive", fail_once)
    monkeypatch.setattr(sys, "argv", ["engine", "--tiny", "--only", "engine tiny", "--out", str(tmp_path)])
    monkeypatch.setattr(engine, "start", lambda *_: iter(()))
    status = engine.main()

    (facts,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    rows = {row["workload"]: row for row in facts["rows"]}
    assert status == 1 and [name for name, row in rows.items() if row["failed"]] == ["shared"]
    assert "out of memory" in rows["shared"]["note"]
    assert all(row["output_tokens"] == row["planned_tokens"] > 0 for name, row in rows.items() if name != "shared")


def test_kernel_that_does_not_compile_fails_its_check_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does one whose numbers are wrong; the checks behind them run, and what there was no time for is said."""

    def broken(setting: Setting) -> str:
        raise TypeError("CompilationError: at 3:11: unsupported ptr type")

    def wrong(setting: Setting) -> str:
        raise Failed("relative error 1.0e+00, above 1e-02")

    own = (Check("broken", broken, FLOAT32), Check("wrong", wrong, FLOAT32), operations.CHECKS[0])
    monkeypatch.setattr(checks, "_checks", lambda device: own)
    monkeypatch.setattr(sys, "argv", ["checks", "--tiny", "--out", str(tmp_path)])
    status = checks.main()
    monkeypatch.setattr(sys, "argv", ["checks", "--tiny", "--seconds", "-1"])
    nothing = checks.main()

    lines = (tmp_path / "checks.md").read_text().splitlines()[2:]
    assert status == 1 and [line.split()[0] for line in lines] == ["FAIL", "FAIL", "PASS", "PASS"]
    assert "CompilationError" in lines[0] and "relative error" in lines[1] and "bfloat16" in lines[2]
    assert nothing == 1 and "0 passed, 0 failed, 4 left out for want of time" in capsys.readouterr().out


SHARE = """
import json, os, signal, sys
index, count, done = map(int, sys.argv[sys.argv.index("--share") + 1].split())
for number in range(index, 6, count)[done:]:
    if number == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps({"name": f"check {number}", "passed": number != 3, "figures": "", "seconds": 0.1}), flush=True)
    if number == 3:
        sys.exit()  # the device is of no use to it any more
"""


def test_check_that_breaks_its_process_or_its_device_costs_no_other(tmp_path: Path) -> None:
    """Checks run in several processes; behind one that breaks its own, the rest of its share run in the next."""
    (tmp_path / "share.py").write_text(SHARE)
    wanted = [(Check(f"check {number}", lambda setting: "", FLOAT32), torch.float32) for number in range(6)]
    outcomes: list[Outcome] = []

    run_beside(wanted, 2, [sys.executable, str(tmp_path / "share.py")], time.monotonic() + 60, outcomes.append)

    found = {outcome.name: (outcome.passed, outcome.figures) for outcome in outcomes}
    assert len(outcomes) == len(found) == 6
    assert found.pop("check 2, float32") == (False, f"its process ended with status {-signal.SIGSEGV}")
    assert {name: passed for name, (passed, _) in found.items()} == {f"check {n}": n != 3 for n in (0, 1, 3, 4, 5)}


def test_process_of_some_checks_says_what_each_came_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second half of the checks but for its first, a line of JSON each."""
    own = tuple(Check(f"check {number}", lambda setting: "fine", FLOAT32) for number in range(6))
    monkeypatch.setattr(checks, "_checks", lambda device: own)
    monkeypatch.setattr(sys, "argv", ["checks", "--tiny", "--share", "1 2 1"])
    status = checks.main()

    told = [Outcome(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert status == 0 and [(o.name, o.passed) for o in told] == [
        ("check 3, float32", True),
        ("check 5, float32", True),
    ]


def is_gone(pid: int) -> bool:
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]:
            return True
        time.sleep(0.1)
    return False
