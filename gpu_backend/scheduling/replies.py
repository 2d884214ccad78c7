# The unfinished replies of each request. The first one computes their prompt; the others follow it, in no queue, until
# its blocks can be shared. If the first one leaves before, the next takes its place.

from __future__ import annotations

from collections.abc import Iterator

from gpu_backend.step.sequence import Sequence, Status


class RequestReplies:
    """Owns the replies of all requests, and knows which of them follow another one's prompt."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_request: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_request.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for replies in self._by_request.values():
            yield from replies

    def add(self, replies: list[Sequence]) -> Sequence:
        """Take the replies of one request; return the one that computes the prompt."""
        leader, *leader.followers = replies
        for follower in leader.followers:
            follower.status = Status.FOLLOWING
        self._by_request[leader.request.request_id] = list(replies)
        return leader

    def of(self, request_id: str, reply_index: int | None = None) -> list[Sequence]:
        """Return a request's unfinished replies, or the one of that index; none if it is unknown or done."""
        replies = self._by_request.get(request_id, [])
        return [reply for reply in replies if reply_index is None or reply.reply_index == reply_index]

    def remove(self, sequence: Sequence) -> list[Sequence]:
        """Let a reply go; return the one, if any, that now has to compute the prompt in its place."""
        replies = self._by_request[sequence.request.request_id]
        replies.remove(sequence)
        if not replies:
            del self._by_request[sequence.request.request_id]
        for leader in replies:
            if sequence in leader.followers:
                leader.followers.remove(sequence)
        heirs = sequence.followers[:1]
        for heir in heirs:
            heir.followers = sequence.followers[1:]
        sequence.followers = heirs
        return self.release_followers(sequence)

    def release_followers(self, sequence: Sequence) -> list[Sequence]:
        """Return the replies that followed one: from now on they wait like others, and know the prompt's hashes."""
        released, sequence.followers = sequence.followers, []
        for follower in released:
            follower.status = Status.WAITING
            follower.block_hashes = sequence.block_hashes[: follower.num_prompt // self._block_size]
        return released

    def check(self) -> None:
        """Assert that exactly the replies that follow one are those with that status."""
        following = sorted(follower.sequence_id for reply in self for follower in reply.followers)
        assert following == sorted(s.sequence_id for s in self if s.status is Status.FOLLOWING), "a follower is lost"
