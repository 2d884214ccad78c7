# Takes what rules find out of an answer before it goes out. A stream is held back by what a find may still begin in: a
# few words of prose, LOOKBACK characters at the most; what was cut out of its pieces leaves as one name in its place.

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from billing.core.records import UsageRecord
from gateway.calls.call import Call
from gateway.calls.hooks import NO_HOOK, ReplyHook
from gateway.moderation.classifier.plain import plain
from gateway.moderation.moderator import Moderator
from gateway.moderation.redaction import Redactor, redacted_call
from gateway.moderation.rules.rules import Place, end_of_open, end_so_far, places_by_rules
from gateway.moderation.texts import said_by, texts_of, texts_of_reply, tools_given
from gateway.upstreams.wire.signatures import is_claudes
from protocol.chat import ChatReply, ThinkingBlock
from protocol.completions import CompletionReply
from protocol.decoding import NOT_JSON
from protocol.events import Delta, ToolCallDelta
from protocol.inference import WholeReply
from protocol.media.audio import TranscriptionReply
from protocol.serving.off_loop import off_loop
from router.catalog.targets import Target

LOOKBACK = 256  # characters of one text that are held back at the most; no rule needs more to know what it finds
CONTEXT = 128  # characters that have left and are still read, for what has to stand before a find, or must not
STEP = 16  # characters after which a text is looked at again
# Behind five words without a digit or sign nothing goes on that began before them.
_QUIET = re.compile(r"(?<=\s)(?:[^\W\d_]{1,40}(?:['\u2019][a-z]{1,2})?[,;.!?]?\s{1,3}){5}\S{0,60}\Z")
_NUMBER = r"-?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,3})?"
_NUMBERS = re.compile(rf"{_NUMBER}(?:,\s*{_NUMBER})*")  # of JSON: one, or some of a list
_BARE = re.compile(r"[:,\[]\s*-?\Z")  # before one


def output_redaction_of(moderator: Moderator, call: Call, target: Target) -> ReplyHook:
    """Return what takes out of the answer to a call what its policy has redacted there."""
    policy = moderator.policy_for(call)
    if policy is None or not (groups := policy.redacted_groups("output")):
        return NO_HOOK
    names, asked = call.redacted, policy.redacted_groups("input")
    if names is None and asked and call.is_batch_item:  # it may be a line that its provider has answered
        names = redacted_call(call, asked)[0].redacted
    redactor = Redactor(groups, names)
    if not asked:  # else they were noted as finds were taken out of the request
        for text in texts_of(call.request, call.extra, call.as_message or call.shown):
            redactor.note_marks(text)
    return OutputRedaction(moderator, call, redactor)


class OutputRedaction(ReplyHook):
    """Takes finds out of one answer. It goes on with the names of what was taken out of its request."""

    def __init__(self, moderator: Moderator, call: Call, redactor: Redactor) -> None:
        self._moderator = moderator
        self._call = call
        self._redactor = redactor
        self._given = tools_given(call.request)
        self._choices: dict[int, _Choice] = {}

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Return what may go out now, without finds."""
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = _Choice(self._redactor, self._given)
        *before, last = _with_each_call_once(delta)
        return [left for each in before for left in choice.take(each)] + choice.take(last)

    def rest(self) -> Sequence[Delta]:
        """Return what was held back of an answer that broke, without finds."""
        return [delta for choice in self._choices.values() for delta in choice.rest()]

    async def whole(self, whole: WholeReply) -> WholeReply:
        """Return a whole answer without finds; the very same where there are none."""
        if not isinstance(whole, ChatReply | CompletionReply | TranscriptionReply):
            return whole
        size = sum(map(len, texts_of_reply(whole)))
        return await off_loop(size, partial(self._redactor.take_out, whole))

    def close(self, record: UsageRecord) -> None:
        """Tell what was taken out."""
        self._moderator.note_redacted(self._call, "output", self._redactor.findings())


class _Choice:
    """One reply so far: its texts, and the deltas that wait for them."""

    __slots__ = ("_current", "_given", "_held", "_redactor", "_said", "_texts", "_was_thought_cut")

    def __init__(self, redactor: Redactor, given: frozenset[str]) -> None:
        self._redactor = redactor
        self._given = given  # names of tools that the caller gave
        self._texts: dict[str | int, _Text] = {}  # words, thinking, the arguments of each call
        self._current: _Text | None = None
        self._said = 0  # characters, of all texts
        self._held: deque[tuple[Delta, list[tuple[str | int, _Text, _Piece]]]] = deque()
        self._was_thought_cut = False  # since thinking was signed last

    def take(self, delta: Delta) -> list[Delta]:
        """Take a delta in, and return those that may go out; at the end of the reply all that are left."""
        pieces = []
        for kind, said in said_by(delta, self._given):
            text = self._texts.get(kind)
            if text is None:
                text = self._texts[kind] = _Text(self._redactor)
            if text is not self._current:
                if self._current is not None:
                    self._current.left_at = self._said
                self._current = text
            self._said += len(said)
            pieces.append((kind, text, text.add(said)))
        self._held.append((delta, pieces))
        return self.rest() if delta.finish_reason is not None else self._settled()

    def rest(self) -> list[Delta]:
        """Return the deltas that wait, of a reply that goes on no more."""
        for text in self._texts.values():
            text.look(is_over=True)
        return self._settled()

    def _settled(self) -> list[Delta]:
        """Return the deltas whose texts are settled. A text that was left long ago is: what follows is another one."""
        out: list[Delta] = []
        while self._held:
            delta, pieces = self._held[0]
            for _, text, piece in pieces:
                if not piece.is_settled and text is not self._current and self._said - text.left_at >= LOOKBACK:
                    text.look(is_over=True)
            if not all(piece.is_settled for _, _, piece in pieces):
                break
            self._held.popleft()
            if (left := self._rewritten(delta, {kind: piece for kind, _, piece in pieces})) is not None:
                out.append(left)
        return out

    def _rewritten(self, delta: Delta, pieces: dict[str | int, _Piece]) -> Delta | None:
        """Return a delta as it leaves, ``None`` where nothing of it is left: the very same where nothing was found."""
        cut = {kind: "".join(piece.said) for kind, piece in pieces.items() if piece.is_cut}
        changes: dict[str, object] = {kind: said for kind, said in cut.items() if kind in _FIELDS}
        if cut.keys() - changes.keys():
            changes["tool_calls"] = tuple(_call_without(call, cut) for call in delta.tool_calls)
        if cut:
            changes |= {"logprobs": None, "token_ids": ()}
            self._was_thought_cut = self._was_thought_cut or "reasoning" in cut
        if delta.signature:
            if self._was_thought_cut and is_claudes(ThinkingBlock("", delta.signature)):
                changes["signature"] = ""  # it is for other words
            self._was_thought_cut = False
        for name in ("citation", "server_block"):
            if (said := getattr(delta, name)) is not None and (left := self._redactor.take_out(said)) is not said:
                changes[name] = left
        if delta.told is not None and (told := self._told(delta.told, pieces)) is not delta.told:
            changes["told"] = told
        if not changes:
            return delta
        left = replace(delta, **changes)
        return None if left == Delta(delta.index) else left

    def _told(self, told: dict[str, Raw], pieces: dict[str | int, _Piece]) -> dict[str, Raw]:
        """Return an event of a response without finds: the piece that it tells as that was cut, all else by itself."""
        for piece in pieces.values():
            if _text(told.get("delta", Raw())) == piece.came:
                if not piece.is_cut:
                    return told
                scores = {"logprobs": Raw(b"[]")} if "logprobs" in told else {}
                return told | {"delta": Raw(msgspec.json.encode("".join(piece.said)))} | scores
        left: dict[str, Raw] = self._redactor.take_out(told)
        return left


_FIELDS = ("text", "reasoning", "refusal")


def _with_each_call_once(delta: Delta) -> list[Delta]:
    """Return a delta, or several where it says more than one piece of a call."""
    calls = delta.tool_calls
    if len(calls) < 2 or len({call.index for call in calls}) == len(calls):
        return [delta]
    return [*(Delta(delta.index, tool_calls=(call,)) for call in calls[:-1]), replace(delta, tool_calls=calls[-1:])]


def _call_without(call: ToolCallDelta, cut: dict[str | int, str]) -> ToolCallDelta:
    name = cut.get(f"name {call.index}", call.name)
    return replace(call, name=name, arguments=cut.get(call.index, call.arguments))


def _text(data: Raw) -> str | None:
    try:
        return msgspec.json.decode(data, type=str)
    except NOT_JSON:
        return None


class _Piece:
    """What one delta adds to a text: ``came`` of it, and what leaves of it as far as it is settled, ``said``."""

    __slots__ = ("_at", "_text", "came", "is_cut", "said")

    def __init__(self, came: str) -> None:
        self.came = self._text = came
        self._at = 0  # characters that are settled
        self.said: list[str] = []
        self.is_cut = False

    @property
    def is_settled(self) -> bool:
        """Whether all of it is."""
        return self._at >= len(self._text)

    @property
    def left(self) -> str:
        """What of it is not settled yet."""
        return self._text[self._at :]

    @left.setter
    def left(self, text: str) -> None:
        self._text, self._at = text, 0

    def settle(self, size: int) -> str:
        """Return the next characters, settled now: nothing else of it is touched, as it may have very many finds."""
        part = self._text[self._at : self._at + size]
        self._at += len(part)
        return part


class _Text:
    """One text of a reply as it comes, in pieces that are settled from the front."""

    __slots__ = ("_before", "_fresh", "_json", "_open", "_pieces", "_redactor", "_was_cut", "left_at")

    def __init__(self, redactor: Redactor) -> None:
        self.left_at = 0  # what the whole reply had said when another text went on
        self._redactor = redactor
        self._before = ""  # the end of what is settled
        self._was_cut = False  # whether that ends in a find
        self._pieces: deque[_Piece] = deque()  # that are not settled
        self._fresh = 0  # characters since the last look
        self._open = ""  # the rule whose find goes on with what comes
        self._json: _JsonPlace | None = None  # where it is what tools read

    def add(self, came: str) -> _Piece:
        """Take a piece in."""
        piece = _Piece(came)
        self._pieces.append(piece)
        self._fresh += len(came)
        if self._fresh >= STEP:
            self.look(is_over=False)
        return piece

    def look(self, *, is_over: bool) -> None:
        """Settle what no find can begin in any more; all of it where the text ``is_over``."""
        self._fresh = 0
        if self._open and not self._go_on(self._unsettled(), is_over=is_over):
            return
        if not (text := self._unsettled()):
            return
        if not self._before and (head := text.lstrip()):
            self._json = _JsonPlace() if head[0] in "{[" else None
        text, places = self._places(text)
        begun = len(self._before)
        said = self._before + text
        edge = len(said) if is_over else max(begun, _edge_of(said))
        for place in places:
            if place.start >= edge:
                break
            if place.end > edge:
                if len(said) - place.start <= LOOKBACK:
                    edge = max(begun, place.start)
                    break
                self._open = "" if said[place.end :].strip(".") else place.name
                place = end_so_far(place, said)
                edge = place.end
            begun = self._cut(said, begun, place)
        self._settle(edge - begun)

    def _places(self, text: str) -> tuple[str, list[Place]]:
        """Return what is not settled, as its reader sees it where finds hide behind look-alikes, and the finds that
        end in it."""
        groups = self._redactor.groups
        said = self._before + text
        strings = _Strings(self._json, said, len(self._before))
        places = places_by_rules(said, groups, strings.end_of)
        shown = plain(said)
        if shown != said and len(places_by_rules(shown, groups)) > len(places):
            self._before = plain(self._before)
            for piece in self._pieces:
                left = plain(piece.left)
                piece.is_cut = piece.is_cut or left != piece.left
                piece.left = left
            text = self._unsettled()
            said = self._before + text
            strings = _Strings(self._json, said, len(self._before))
            places = places_by_rules(said, groups, strings.end_of)
        begun = len(self._before)
        return text, [place for place in places if place.end > begun and strings.may_lose(place)]

    def _cut(self, said: str, begun: int, place: Place) -> int:
        """Settle what stands before a find, put its name in its place, and return its end."""
        start = max(begun, place.start)
        self._settle(start - begun)
        goes_on = place.start < begun and self._was_cut
        name = "" if goes_on else self._redactor.name_of(place.name, place.group, said[place.start : place.end])
        while self._pieces[0].is_settled:
            self._pieces.popleft()
        self._pieces[0].said.append(name)
        self._drop(place.end - start)
        return place.end

    def _go_on(self, text: str, *, is_over: bool) -> bool:
        """Drop what belongs to the find that is open; tell whether it is over."""
        end, is_open = end_of_open(self._open, text, is_over=is_over)
        if self._json is not None and (quote := self._json.end_of_string(text)) is not None and quote <= end:
            end, is_open = quote, False
        self._drop(end)
        if not is_open:
            self._open = ""
        return not is_open

    def _unsettled(self) -> str:
        return "".join([piece.left for piece in self._pieces])

    def _settle(self, size: int) -> None:
        for piece, part in self._consumed(size):
            piece.said.append(part)
            self._was_cut = False

    def _drop(self, size: int) -> None:
        for piece, _ in self._consumed(size):
            piece.is_cut = self._was_cut = True

    def _consumed(self, size: int) -> Iterator[tuple[_Piece, str]]:
        """Yield the next characters with their pieces, and count them as settled."""
        while size > 0:
            piece = self._pieces[0]
            size -= len(part := piece.settle(size))
            if piece.is_settled:
                self._pieces.popleft()
            if part:
                self._before = (self._before + part)[-CONTEXT:]
                if self._json is not None:
                    self._json.pass_over(part)
                yield piece, part


def _edge_of(said: str) -> int:
    """Return up to where no find can be that is not known yet."""
    furthest = len(said) - LOOKBACK
    quiet = _QUIET.search(said, max(0, furthest))
    return furthest if quiet is None else quiet.start()


class _Strings:
    """The strings of JSON in what is settled last and what follows. A find is taken out of a string alone, so that JSON
    stays JSON; what stands elsewhere, a number, is left for the rules to block."""

    def __init__(self, json: _JsonPlace | None, said: str, begun: int) -> None:
        self._json = json  # the place at ``begun``; None: this is no JSON
        self._said, self._begun = said, begun

    @cached_property
    def _quotes(self) -> tuple[bool, list[int]]:
        """Whether the text begins in a string, and where strings end and begin."""
        if self._json is None:
            return False, []
        is_inside, quotes = self._json.quotes_in(self._said[self._begun :])
        return is_inside, [self._begun + quote for quote in quotes]

    def _around(self, place: int) -> tuple[bool, int | None]:
        """Return whether a place is in a string, and where the next quote is."""
        is_inside, quotes = self._quotes
        passed = bisect_left(quotes, place)
        return is_inside ^ (passed % 2 == 1), quotes[passed] if passed < len(quotes) else None

    def end_of(self, place: int) -> int | None:
        """Return where the string ends that a place is in; ``None`` where it is in none, or that goes on."""
        is_inside, quote = self._around(max(self._begun, place))
        return quote if is_inside else None

    def may_lose(self, place: Place) -> bool:
        """Whether a find may be cut out."""
        if self._json is None:
            return True
        is_inside, quote = self._around(max(self._begun, place.start))
        if is_inside:
            return quote is None or quote >= place.end
        is_number = _NUMBERS.fullmatch(self._said, place.start, place.end) is not None
        return not (is_number and _BARE.search(self._said, max(0, place.start - CONTEXT), place.start))


class _JsonPlace:
    """Where in JSON a text is."""

    __slots__ = ("_is_escaped", "_is_inside")

    def __init__(self) -> None:
        self._is_inside = False  # a string
        self._is_escaped = False

    def pass_over(self, part: str) -> None:
        """Go on behind the next characters."""
        for _ in self._quotes(part):
            pass

    def end_of_string(self, text: str) -> int | None:
        """Return where the string ends that the text is in."""
        is_inside, quotes = self.quotes_in(text)
        return quotes[0] if is_inside and quotes else None

    def quotes_in(self, text: str) -> tuple[bool, list[int]]:
        """Return whether a string is open, and where strings end and begin in the text that follows."""
        here = _JsonPlace()
        here._is_inside, here._is_escaped = self._is_inside, self._is_escaped
        return self._is_inside, [*here._quotes(text)]

    def _quotes(self, text: str) -> Iterator[int]:
        """Yield where strings begin and end, going on behind the text."""
        for place, sign in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif sign == '"':
                self._is_inside = not self._is_inside
                yield place
            elif self._is_inside and sign == "\\":
                self._is_escaped = True
