# What a house says of itself to operators.

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from billing.upkeep.auditor import Found
from gateway.storage.books import Books
from gateway.telemetry.metrics import Metrics
from tests.support.house import House
from tests.support.waiting import until

COUNTED = ("tollgate_hold_exceeded_total", "tollgate_holds_swept_total", "tollgate_redis_refusals_total")


@pytest.mark.parametrize("path", ["/health/ready", "/health"])
def test_a_ready_house_names_its_parts(house: House, path: str) -> None:
    """Quotas and the journal have their say beside Postgres and Redis; load generators look at /health."""
    answer = httpx.get(house.url + path).json()

    assert answer["parts"].keys() == {"postgres", "redis", "quotas", "journal", "owners"}
    assert answer["parts"]["journal"] == "ok"
    assert answer["status"] == ("ok" if set(answer["parts"].values()) == {"ok"} else "degraded")


@pytest.mark.parametrize("kept", ["x.too-old", "x.unreadable", "rejected.jsonl"])
def test_quarantined_journal_files_are_told_until_they_are_dealt_with(house: House, kept: str) -> None:
    """Calls that may not have been billed wait for people: a ready house is degraded until the file is gone."""
    file = house.settings.data_dir / "journal" / kept
    file.touch()
    until(lambda: httpx.get(house.url + "/health/ready").json()["parts"]["journal"] != "ok")  # looked at once a second
    told = httpx.get(house.url + "/health/ready")
    with house.client(house.admin_key) as client:
        shown = client.get("/metrics").text
    file.unlink()

    assert (told.status_code, told.json()["status"], told.json()["parts"]["journal"]) == (
        200,
        "degraded",
        "quarantined",
    )
    assert "tollgate_journal_files_quarantined 1.0" in shown
    until(lambda: httpx.get(house.url + "/health/ready").json()["parts"]["journal"] == "ok")


def test_the_money_rooms_are_measured(house: House) -> None:
    """What the quotas and the sweeper count can be scraped from the first moment."""
    with house.client(house.admin_key) as client:
        shown = {line.split(" ")[0] for line in client.get("/metrics").text.splitlines()}

    assert shown >= {*COUNTED, "tollgate_quotas_standalone", "tollgate_journal_backlog"}
    assert not {name for name in shown if "_created" in name}


def test_a_scrape_shows_what_others_counted() -> None:
    """However often it is rendered, each is counted once."""
    metrics = Metrics()
    quotas = SimpleNamespace(exceeded=2, is_standalone=True, rates=SimpleNamespace(refusals=1))
    books = SimpleNamespace(
        quotas=quotas,
        journal=SimpleNamespace(backlog=7, damaged=6, quarantined=9),
        owner=SimpleNamespace(recovered=8, buried=5),
        sweeper=SimpleNamespace(lost=4),
        auditor=SimpleNamespace(found=Found(1.0, statements=2, counters=3, books=10)),
    )
    metrics.books.follow(cast(Books, books))
    metrics.render()
    quotas.exceeded, quotas.is_standalone = 3, False

    lines = metrics.render().decode().splitlines()

    assert [f"{name} {count}" in lines for name, count in zip(COUNTED, (3.0, 5.0, 1.0), strict=True)] == [True] * 3
    assert "tollgate_quotas_standalone 0.0" in lines and "tollgate_journal_backlog 7.0" in lines
    assert "tollgate_journals_lost_total 4.0" in lines and "tollgate_journals_damaged_total 6.0" in lines
    assert "tollgate_rebuilds_total 8.0" in lines and "tollgate_journal_files_quarantined 9.0" in lines
    assert 'tollgate_books_differ{book="statements"} 2.0' in lines
    assert 'tollgate_books_differ{book="counters"} 3.0' in lines and "tollgate_books_compared 10.0" in lines
