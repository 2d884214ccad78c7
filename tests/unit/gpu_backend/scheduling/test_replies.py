# Replies of one request: which of them computes the prompt, and which wait for it.

from __future__ import annotations

from gpu_backend.scheduling.replies import RequestReplies
from gpu_backend.step.messages import Generate
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.sequence import ReplyTimes, Sequence, Status


def replies_of(request_id: str, count: int) -> list[Sequence]:
    """Return a request's replies, of a prompt of two blocks."""
    sampling = SamplingParams(max_tokens=4)
    request = Generate(request_id, (1,) * 8, sampling, count)
    return [Sequence(index, request, sampling, 12, ReplyTimes(0.0), index) for index in range(count)]


def test_replies_follow_the_first_until_its_prompt_is_computed() -> None:
    """Then all wait at once, and know the prompt's hashes."""
    book = RequestReplies(block_size=4)
    leader = book.add(replies_of("x", 3))
    leader.block_hashes = [b"a", b"b", b"of the reply"]
    book.check()

    assert [reply.status for reply in book] == [Status.WAITING, Status.FOLLOWING, Status.FOLLOWING]
    released = book.release_followers(leader)
    book.check()
    assert [reply.reply_index for reply in released] == [1, 2]
    assert all(reply.status is Status.WAITING and reply.block_hashes == [b"a", b"b"] for reply in released)


def test_next_reply_takes_the_place_of_the_first_that_leaves() -> None:
    """The others follow it; one that follows leaves without a trace; the last one takes the request with it."""
    book = RequestReplies(block_size=4)
    replies = replies_of("x", 4)
    leader = book.add(replies)

    assert book.remove(replies[2]) == []
    book.check()
    assert book.remove(leader) == [replies[1]]
    book.check()
    assert replies[1].followers == [replies[3]] and replies[3].status is Status.FOLLOWING
    assert book.of("x") == [replies[1], replies[3]] and book.of("x", 3) == [replies[3]]
    assert book.remove(replies[1]) == [replies[3]] and book.remove(replies[3]) == []
    assert len(book) == 0 and book.of("x") == []
