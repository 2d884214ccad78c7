# Which announced replicas are asked: those that are signed, on time, of the right model and where they may be.

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest

from gateway.fleet.membership import FORGOTTEN, GONE, LATE, LOST, SKEW, Admission, Membership, why_not_asked
from protocol.serving.announcements import LONGEST, Announcement, fitting, read_signed, signed

SECRET, OTHER = "a secret of the fleet 0123", "a secret of a stranger 0123"
HERE = "http://10.0.0.1:8100/v1"
BEGAN = 1_000_000.0  # unix seconds when the monotonic clock stood at 0


def said(number: int = 1, instance: str = "a", at: float = 0.0, **more: Any) -> Announcement:
    """Return an announcement of ``instance``, sent at a time of the monotonic clock."""
    facts: dict[str, Any] = {"pool": "own", "base_url": HERE, "model": "tiny", "state": "active"}
    return Announcement(number=number, instance_id=instance, sent_at=BEGAN + at, **(facts | more))


class Gateway:
    """A pool as one gateway knows it."""

    def __init__(self, *networks: str, served: str = "tiny") -> None:
        ranges = tuple(map(ip_network, networks))
        self.pool = Membership(Admission("own", (SECRET,), ranges, frozenset({served})))

    def hear(self, *announcements: Announcement, at: float = 0.0, secret: str = SECRET) -> tuple[str, ...]:
        """Look at a Redis with these in it, and return which addresses are asked."""
        found = {one.instance_id.encode(): signed(one, secret) for one in announcements}
        self.pool.hear(found, at, BEGAN + at)
        return self.pool.base_urls()

    def states(self) -> list[str]:
        """Return the state of each replica."""
        return [self.pool.state_of(one) for one in self.pool.members()]


def test_only_what_is_signed_is_believed() -> None:
    """Another secret, another pool, another instance's field, a changed letter, none: no such address is asked."""
    gateway, good = Gateway(), signed(said(), SECRET)
    forged = {
        b"other secret": signed(said(instance="other secret"), OTHER),
        b"other pool": signed(said(instance="other pool", pool="theirs"), SECRET),
        b"a copy": good,
        b"changed": signed(said(instance="changed"), SECRET).replace(b"10.0.0.1", b"10.6.6.6"),
        b"bare": good.partition(b" ")[2],
        b"long": signed(said(instance="long", model="x" * 20_000), SECRET),
        b"empty": b"",
    }
    gateway.pool.hear(forged, 0.0, BEGAN)

    assert gateway.pool.base_urls() == () and gateway.pool.members() == []
    assert (gateway.pool.unsigned, gateway.pool.too_long) == (len(forged) - 1, 1)
    assert gateway.hear(said()) == (HERE,)


def test_an_adapter_is_one_of_the_names_that_calls_ask_for() -> None:
    """A replica that has it loaded is asked, one that has not, or has unloaded it, is not."""
    gateway, adapters = Gateway(served="sql"), [f"adapter-{number}" for number in range(100)]

    assert gateway.hear(said()) == ()
    assert gateway.hear(said(2, adapters=(*adapters, "sql"))) == (HERE,)
    assert gateway.hear(said(3, adapters=adapters)) == ()


def test_a_replica_of_many_adapters_is_no_stranger() -> None:
    """Its announcement names as many as there is room for, and how many it has besides: calls for these go there
    unseen. One that asks for more than that is not served."""
    many = said(adapters=tuple(f"adapter-{number:05}-ü" for number in range(2000)))
    told = fitting(many)
    value = signed(told, SECRET)

    assert LONGEST - 100 < len(value) <= LONGEST and read_signed(value, (SECRET,)) == told
    assert len(told.adapters) + told.adapters_left_out == 2000 and told.adapters == many.adapters[: len(told.adapters)]
    assert fitting(said()) == said() and fitting(said(adapters=("a",))).adapters_left_out == 0
    assert Gateway(served="adapter-01999-ü").hear(told) == (HERE,)
    assert Gateway(served="another").hear(said(adapters=("a",))) == ()


def test_a_secret_is_replaced_without_a_gap() -> None:
    """While both are among the gateway's secrets, engines with either are believed."""
    value = signed(said(), SECRET)

    assert read_signed(value, (OTHER, SECRET)) == read_signed(value, (SECRET,)) == said()
    assert read_signed(value, (OTHER,)) is None


def test_a_recorded_heartbeat_prolongs_no_life() -> None:
    """What was heard before is no news, in whatever order it is put back; nor is what was recorded long ago."""
    gateway, records = Gateway(), [said(number, at=number / 5) for number in range(1, 6)]
    there = said(9, "b", at=1.0, base_url="http://10.0.0.2:8100/v1")
    for record in records:
        gateway.hear(record, there, at=record.sent_at - BEGAN)
    for step, record in enumerate(records):
        now = 1.0 + step * LATE / 2
        gateway.hear(record, said(10 + step, "b", at=now, base_url=there.base_url), at=now)

    assert gateway.pool.base_urls() == (there.base_url,)
    assert gateway.states() == [LOST, "active"]
    late = Gateway()
    assert late.hear(records[-1], at=1.0 + SKEW + 1) == ()
    assert late.states() == [LOST] and "old by the gateway's clock" in str(late.pool.members()[0].refused)


def test_a_lost_heartbeat_counts_within_a_second() -> None:
    """The others are asked then; the one that is lost is shown as that, and forgotten after a minute."""
    gateway, other = Gateway(), "http://10.0.0.2:8100/v1"
    gateway.hear(said(1), said(1, "b", base_url=other))
    asked, now = [], 0.0
    while now < 0.9:
        now += 0.15
        asked.append(gateway.hear(said(1), said(2 + int(100 * now), "b", at=now, base_url=other), at=now))

    assert asked[0] == (HERE, other) and asked[-1] == (other,)
    assert gateway.states() == [LOST, "active"]
    assert gateway.hear(at=1.0) == (other,) and gateway.states() == ["active"]  # the lost one was taken back
    assert gateway.pool.hear({}, FORGOTTEN + 0.1, BEGAN) == ["a"]


def test_a_replica_that_is_followed_at_its_address_is_not_missed() -> None:
    """As one that was killed and started again: another start is another replica."""
    gateway = Gateway()
    gateway.hear(said(state="failed"))

    assert gateway.hear(said(state="failed"), said(instance="b", at=0.5), at=0.5) == (HERE,)
    assert gateway.hear(said(state="failed"), said(2, "b", at=0.9), at=0.9) == (HERE,)
    assert gateway.states() == ["active"]


def test_late_heartbeats_of_all_take_no_replica_away_at_once() -> None:
    """A slow Redis or a busy machine is hardly the replicas' fault; what stays silent is not asked in the end."""
    gateway = Gateway()
    gateway.hear(said())
    late = [gateway.hear(said(), at=at / 10) for at in range(1, int(10 * GONE))]

    assert late == [(HERE,)] * len(late) and gateway.states() == [LOST]
    assert gateway.hear(said(), at=GONE + 0.1) == ()


def test_a_replica_that_is_heard_draining_brings_no_lost_one_back() -> None:
    """Redis works then: what is silent is not there."""
    gateway, other = Gateway(), "http://10.0.0.2:8100/v1"
    gateway.hear(said(), said(1, "b", base_url=other))
    gateway.hear(said(), said(2, "b", at=0.5, base_url=other), at=0.5)

    assert gateway.hear(said(), said(3, "b", at=0.9, base_url=other, state="draining"), at=0.9) == ()


def test_time_without_a_look_is_no_silence() -> None:
    """After Redis was away a replica has as long as ever to be heard."""
    gateway, other = Gateway(), "http://10.0.0.2:8100/v1"
    gateway.hear(said(), said(instance="b", base_url=other))
    gateway.hear(said(2, at=0.2), said(2, "b", base_url=other), at=0.2)

    assert gateway.hear(said(2), said(3, "b", at=8.0, base_url=other), at=8.0) == (HERE, other)
    assert gateway.hear(said(2), said(4, "b", at=8.5, base_url=other), at=8.5) == (HERE, other)
    assert gateway.hear(said(2), said(5, "b", at=8.7, base_url=other), at=8.7) == (other,)


def test_a_redis_that_comes_and_goes_loses_no_replica() -> None:
    """It answers once between two outages, before any heartbeat reaches it. One that stays silent once it is back is
    lost."""
    gateway = Gateway()
    for number in (1, 2):
        gateway.hear(said(number, at=number / 10), at=number / 10)
    asked = []
    for back in (15.0, 30.0):
        gateway.pool.miss()
        asked.append(gateway.hear(said(2), at=back))
    gateway.hear(said(2), said(1, "b", at=30.5, base_url="http://10.0.0.2:8100/v1"), at=30.5)

    assert asked == [(HERE,)] * 2 and gateway.states() == ["active", "active"]
    gateway.hear(said(2), said(2, "b", at=30.7, base_url="http://10.0.0.2:8100/v1"), at=30.7)
    assert gateway.states() == [LOST, "active"]


def test_what_lay_in_a_silent_redis_refuses_no_replica() -> None:
    """A heartbeat that was sent as it fell silent is executed when it speaks again, older than clocks may differ. A
    clock that goes on to differ is told all the same."""
    gateway, back = Gateway(), SKEW + 8
    for number in (1, 2):
        gateway.hear(said(number, at=number / 10), at=number / 10)
    asked = [gateway.hear(said(3, at=0.3), at=back + at) for at in (0.1, 0.9)]
    asked.append(gateway.hear(said(4, at=back + 1), at=back + 1))
    for at in (12, 24):
        gateway.hear(said(5, at=0.4), at=back + at)

    assert asked == [(HERE,)] * 3
    assert "old by the gateway's clock" in str(gateway.pool.members()[0].refused)


def test_a_dead_replica_is_lost_to_a_busy_machine_too() -> None:
    """One that looks less often than heartbeats may be late: the second look without one tells; the first, of a replica
    that was dead before all looks."""
    gateway, other = Gateway(), "http://10.0.0.2:8100/v1"
    gateway.hear(said(), said(instance="b", base_url=other), said(9, "dead"))
    gateway.hear(said(2, at=1.0), said(2, "b", base_url=other), said(9, "dead"), at=1.0)
    known = {one.said.instance_id: gateway.pool.state_of(one) for one in gateway.pool.members()}
    asked = [gateway.hear(said(2), said(2 + at, "b", at=at, base_url=other), at=1.0 + at) for at in (1, 2)]

    assert known == {"a": "active", "b": "active"}
    assert asked == [(HERE, other), (other,)]


@pytest.mark.parametrize("state", ["starting", "sleeping", "draining", "failed"])
def test_only_an_active_replica_is_asked(state: str) -> None:
    """A drain counts with the next heartbeat, and none but a heartbeat brings it back."""
    gateway = Gateway()

    assert gateway.hear(said(1)) == (HERE,)
    assert gateway.hear(said(2, state=state)) == () and gateway.states() == [state]
    assert gateway.hear(said(3)) == (HERE,)


def test_calls_go_to_the_version_that_they_ask_for() -> None:
    """A replica of another model or version is shown, with what it serves, and not asked."""
    gateway = Gateway(served="tiny@2")

    assert gateway.hear(said(1, version="1")) == ()
    assert gateway.pool.members()[0].refused == "it serves tiny and tiny@1, and calls ask for tiny@2"
    assert gateway.hear(said(2, version="2")) == (HERE,)
    gateway.pool.follow(Admission("own", (SECRET,), (), frozenset({"tiny@1"})))
    assert gateway.pool.base_urls() == ()


@pytest.mark.parametrize(
    ("address", "networks", "words"),
    [
        ("http://10.0.0.1:8100/v1", ["10.0.0.0/8"], None),
        ("https://[fd00::1]:8100/v1", ["10.0.0.0/8", "fd00::/16"], None),
        ("http://gpu-0:8100/v1", [], None),
        ("http://203.0.113.5:8100/v1", ["10.0.0.0/8"], "none of fleet.networks"),
        ("http://[::ffff:10.0.0.1]:8100/v1", ["10.0.0.0/8"], "none of fleet.networks"),
        ("http://gpu-0:8100/v1", ["10.0.0.0/8"], "a name"),
        ("http://10.0.0.1@203.0.113.5/v1", ["10.0.0.0/8"], "form"),
        ("http://203.0.113.5\\@10.0.0.1/v1", ["10.0.0.0/8"], "form"),
        ("http://10.0.0.1:8100/v1?x=/v1", [], "form"),
        ("http://10.0.0.1:8100/v1#/v1", [], "form"),
        ("http://10.0.0.1:8100/admin", [], "form"),
        ("http://10.0.0.1:99999/v1", [], "form"),
        ("http://10.0.0.1:8100/ v1\n/v1", [], "form"),
        ("file:///v1", [], "form"),
        ("http://169.254.169.254/v1", [], "metadata"),
        ("http://[::ffff:169.254.169.254]/v1", [], "metadata"),
        ("http://0.0.0.0:8100/v1", [], "no machine"),
    ],
)
def test_where_a_replica_may_be(address: str, networks: list[str], words: str | None) -> None:
    """What is signed may still be no address for prompts."""
    why = why_not_asked(address, tuple(map(ip_network, networks)))

    assert why is None if words is None else words in str(why)
