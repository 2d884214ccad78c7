# Which announced replicas of a pool are there, and which of them are asked, by their heartbeats. Pure: what Redis held
# and the time are arguments. A heartbeat counts when it is news: one that was recorded earlier and put back by another
# prolongs no replica's life.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from gateway.config.weakness import why_no_service
from protocol.errors import Unshown
from protocol.serving.announcements import ACTIVE, LONGEST, Announcement, read_signed

LATE = 0.6  # seconds without a heartbeat, after which others of the pool are asked,
GONE = 10.0  # and after which a replica is not asked at all, others or none
SKEW = (
    30.0  # seconds that a replica's clock may differ from ours; so long a recorded heartbeat could pass for a new one
)
FORGOTTEN = 60.0  # seconds after its last heartbeat that a replica is known, and by its number what is recorded: > SKEW
RECALLED = 86_400.0  # seconds after which a kept announcement counts no more
MOST = 1000  # announcements of a pool

LOST = "lost"  # the state of a replica whose heartbeat is late
RIGHT = "its address is not of the form http://HOST:PORT/v1"

Networks = Collection[IPv4Network | IPv6Network]


class Admission(Unshown, Struct, frozen=True):
    """Which announcements a pool goes by."""

    pool: str
    secrets: tuple[str, ...]
    networks: tuple[IPv4Network | IPv6Network, ...]
    served: frozenset[str]  # names by which its replicas are asked: each has all of them


class Member(Struct, frozen=True, kw_only=True):
    """An announced replica as a gateway knows it."""

    said: Announcement
    heard_at: float  # monotonic seconds: when its last heartbeat was read
    heard_on: float  # unix seconds
    refused: str | None = None  # why no call goes there, whatever its state

    def is_late(self, now: float) -> bool:
        """Whether its heartbeat is missing."""
        return now - self.heard_at > LATE

    @property
    def is_able(self) -> bool:
        """Whether it takes calls, if it is there."""
        return self.said.state == ACTIVE and self.refused is None


class Membership:
    """The announced replicas of one pool. ``looked_at``: when ``hear`` was last called."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.looked_at = 0.0
        self.unsigned = 0  # announcements of the last look that none of the secrets signed
        self.too_long = 0  # those that were not read at all
        self._known: dict[str, Member] = {}  # by instance id
        self._gone: set[str] = set()  # of these, those whose announcements were taken back
        self._anew: set[str] = set()  # and those that were heard again since time without a look was last made up for
        self._is_missed = False  # Redis had no answer since the last look

    def hear(self, found: Mapping[bytes, bytes], now: float, unix: float) -> list[str]:
        """Take what Redis held at ``now`` (monotonic; ``unix``: the same in unix seconds), and return which replicas
        are forgotten now."""
        # Nothing was read in between, which was no replica's fault; but looks may be that far apart again and again.
        if now - self.looked_at > LATE:
            excused = self.on_time() & self._anew
            self._known |= {name: replace(self._known[name], heard_at=now) for name in excused}
            if not self._is_missed:
                self._anew.clear()
        self._is_missed = False
        self.looked_at, self.unsigned, self.too_long = now, 0, 0
        for field, value in list(found.items())[:MOST]:
            if len(value) > LONGEST:
                self.too_long += 1
                continue
            said = read_signed(value, self.admission.secrets)
            if said is None or said.pool != self.admission.pool or said.instance_id.encode() != field:
                self.unsigned += 1
            else:
                self._take(said, now, unix)
        self._gone = {name for name, each in self._known.items() if name.encode() not in found and each.is_late(now)}
        forgotten = [name for name, each in self._known.items() if now - each.heard_at > FORGOTTEN]
        for instance_id in forgotten:
            del self._known[instance_id]
            self._anew.discard(instance_id)
        return forgotten

    def miss(self) -> None:
        """Redis has no answer: what is made up for at the next look costs no replica its excuse."""
        self._is_missed = True

    def recall(self, values: Iterable[bytes], now: float, unix: float) -> None:
        """Take announcements that were read by another process, for a start without Redis: they are asked as long as
        nothing is heard. Such a one is at most a day old: by then its address may be another's."""
        self.looked_at = now
        for said in filter(None, (read_signed(value, self.admission.secrets) for value in values)):
            if said.pool == self.admission.pool and abs(unix - said.sent_at) <= RECALLED:
                member = Member(said=said, heard_at=now, heard_on=said.sent_at, refused=self._refusal_of(said))
                self._known[said.instance_id] = member
                self._anew.add(said.instance_id)

    def on_time(self) -> set[str]:
        """Return the ids of the replicas whose heartbeats come."""
        return {name for name, each in self._known.items() if not each.is_late(self.looked_at)}

    def follow(self, admission: Admission) -> None:
        """Go by other rules from now on."""
        self.admission = admission
        self._known = {name: replace(each, refused=self._refusal_of(each.said)) for name, each in self._known.items()}

    def members(self) -> list[Member]:
        """Return the replicas that are there, or that are missed, by address; one that another has followed is not."""
        there = [each for name, each in self._known.items() if name not in self._gone]
        heard = {each.said.base_url for each in there if not each.is_late(self.looked_at)}
        there = [each for each in there if each.said.base_url not in heard or not each.is_late(self.looked_at)]
        return sorted(there, key=lambda each: (each.said.base_url, each.said.instance_id))

    def state_of(self, member: Member) -> str:
        """Return a replica's state as it was last looked at."""
        return LOST if member.is_late(self.looked_at) else member.said.state

    def base_urls(self) -> tuple[str, ...]:
        """Return the addresses that are asked. Where none of the pool is heard, whatever its state, it is hardly the
        replicas' fault: they are asked for a while yet, and their breakers know better."""
        on_time = [each for each in self._known.values() if not each.is_late(self.looked_at)]
        recent = [each for each in self._known.values() if self.looked_at - each.heard_at <= GONE]
        return tuple(sorted({each.said.base_url for each in on_time or recent if each.is_able}))

    def _take(self, said: Announcement, now: float, unix: float) -> None:
        known = self._known.get(said.instance_id)
        if known is not None and said.number <= known.said.number:
            return
        if abs(age := unix - said.sent_at) <= SKEW:
            member = Member(said=said, heard_at=now, heard_on=unix, refused=self._refusal_of(said))
            if known is not None:  # what is read for the first time may be of one that is dead
                self._anew.add(said.instance_id)
        elif known is not None and known.refused is None and now - known.heard_at <= GONE:
            return  # it may have lain in a connection to a Redis that was silent: the next one tells
        else:  # it was recorded, or the clocks differ; no call goes by it
            why = f"its announcement is {age:.0f} s old by the gateway's clock"
            heard_at = now - GONE if known is None else known.heard_at
            member = Member(said=said, heard_at=heard_at, heard_on=said.sent_at, refused=why)
        self._known[said.instance_id] = member

    def _refusal_of(self, said: Announcement) -> str | None:
        missing = sorted(self.admission.served - said.names)  # they may be among those that had no room
        if len(missing) > said.adapters_left_out:
            return f"it serves {' and '.join(sorted(said.names))}, and calls ask for {' and '.join(missing)}"
        return why_not_asked(said.base_url, self.admission.networks)


def why_not_asked(base_url: str, networks: Networks) -> str | None:
    """Return why no prompt is sent to an announced address; ``None``: nothing speaks against it."""
    try:
        parts = urlsplit(base_url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return RIGHT
    is_bare = base_url == f"{parts.scheme}://{parts.netloc}{parts.path}" and "@" not in parts.netloc
    is_plain = base_url.isascii() and base_url.isprintable() and " " not in base_url
    if parts.scheme not in ("http", "https") or not host or not (is_bare and is_plain and parts.path.endswith("/v1")):
        return RIGHT
    if (why := why_no_service(host)) is not None:
        return f"its address is {why}"
    address = None
    with suppress(ValueError):
        address = ip_address(host)
    if address is not None and (address.is_unspecified or address.is_multicast):
        return "its address is that of no machine"
    if networks and address is None:
        return "its address is a name, and fleet.networks lets IP addresses alone in"
    if networks and not any(address in one for one in networks):
        return "its address is in none of fleet.networks"
    return None
