# One reply, from the engine's tokens to pieces of text.

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpu_backend.server.checkpoint.tokens import TextCodec
from gpu_backend.server.reply import Piece, ReplyWriter, join_replies
from gpu_backend.step.messages import FinishReason, NewTokens, Timings
from gpu_backend.step.plan import TokenLogprob
from gpu_backend.step.sampling_params import SamplingParams
from protocol.errors import BadRequest

ALPHABET = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
END = 256


def codec() -> TextCodec:
    tokenizer = Tokenizer(models.BPE(vocab=dict(ALPHABET), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return TextCodec(tokenizer)


CODEC = codec()
SAMPLING = SamplingParams(max_tokens=100, stop_token_ids=frozenset({END}), logprobs=0)


def tokens(text: str) -> tuple[int, ...]:
    return CODEC.encode(text, 1000, add_special_tokens=False)


def writer(stops: tuple[str, ...] = (), resumed: tuple[int, ...] = (), skip: int = 0) -> ReplyWriter:
    return ReplyWriter(0, CODEC, SAMPLING, stops, frozenset({END}), resumed, skip)


def event(token_ids: tuple[int, ...], finish: FinishReason | None = None) -> NewTokens:
    timings = Timings(1.0, 2.0, 3.0, 0.5) if finish else None
    logprobs = tuple(TokenLogprob(-0.5) for _ in token_ids)
    return NewTokens("r", 0, token_ids, logprobs, finish, cached_tokens=16, timings=timings)


def written(reply: ReplyWriter, token_ids: tuple[int, ...], cuts: list[int], finish: FinishReason) -> list[Piece]:
    """Feed the tokens in chunks that end at ``cuts``, and return what comes of them."""
    ends = sorted({cut % (len(token_ids) + 1) for cut in cuts} | {len(token_ids)})
    pieces, start = [], 0
    for end in ends:
        piece = reply.write(event(token_ids[start:end], finish if end == len(token_ids) else None))
        pieces += [piece] if piece else []
        start = end
    return pieces


@given(st.text(max_size=30), st.lists(st.integers(0, 200), max_size=5), st.sampled_from(["", "ab", "é", "\n\n"]))
def test_a_reply_is_the_same_however_its_tokens_come(text: str, cuts: list[int], stop: str) -> None:
    """Streamed token by token or all at once: same text, same tokens counted, same scores, same end."""
    stops = (stop,) if stop else ()
    at_once, in_pieces = writer(stops), writer(stops)
    (whole,) = join_replies(written(at_once, tokens(text), [], FinishReason.LENGTH), 1)
    (joined,) = join_replies(written(in_pieces, tokens(text), cuts, FinishReason.LENGTH), 1)

    assert joined == whole
    assert joined.text == (text.split(stop)[0] if stop else text)
    assert at_once.num_tokens == in_pieces.num_tokens == len(whole.token_ids)


def test_the_end_token_counts_but_has_no_text() -> None:
    """The token that ends a reply was generated, so it is counted and told; it is neither text nor scored."""
    reply = writer()
    piece = reply.write(event((*tokens("hi"), END), FinishReason.STOP))

    assert piece is not None
    assert (piece.text, piece.token_ids[-1], piece.finish_reason) == ("hi", END, FinishReason.STOP)
    assert len(piece.scored) == 2
    assert reply.num_tokens == 3


def test_a_stop_string_ends_the_reply_before_it() -> None:
    """Tokens up to the one that completes the stop string count; later ones are as if they had never come."""
    reply = writer(stops=("STOP",))
    piece = reply.write(event(tokens("one STOP two")))

    assert piece is not None
    assert (piece.text, piece.finish_reason, reply.num_tokens) == ("one ", FinishReason.STOP, len("one STOP"))
    assert [scored.offset for scored in piece.scored] == [0, 1, 2, 3]
    assert reply.write(event(tokens("more"), FinishReason.ABORT)) is None
    assert reply.num_tokens == len("one STOP")
    assert reply.timings is not None


@given(st.lists(st.integers(0, 12), max_size=4))
def test_a_stop_string_does_not_end_a_reply_before_its_least_length(cuts: list[int]) -> None:
    """It counts only if a token after ``min_tokens`` completes it, however the tokens come."""
    sampling = replace(SAMPLING, min_tokens=5)
    whole_and_shown = {"abcabxyzab": "abcabxyz", "xyzabcdef": "xyzabcdef", "xxababab": "xxab", "xabzxabz": "xabzx"}
    for text, shown in whole_and_shown.items():
        reply = ReplyWriter(0, CODEC, sampling, ("ab", "xabzz"), frozenset({END}))
        (joined,) = join_replies(written(reply, tokens(text), cuts, FinishReason.LENGTH), 1)

        assert joined.text == shown


def test_scores_come_with_their_text() -> None:
    """While text is kept back because a stop string may begin, so are its tokens' scores; the tokens are not."""
    reply = writer(stops=("xyz",))
    held = reply.write(event(tokens("xy")))
    shown = reply.write(event(tokens("a")))

    assert held is not None and shown is not None
    assert (held.text, len(held.scored), len(held.token_ids)) == ("", 0, 2)
    assert (shown.text, len(shown.scored), len(shown.token_ids)) == ("xya", 3, 1)


def test_text_kept_back_is_shown_when_the_reply_ends() -> None:
    """The beginning of a stop string that never came is text like any other."""
    piece = writer(stops=("xyz",)).write(event(tokens("ab xy"), FinishReason.LENGTH))

    assert piece is not None
    assert piece.text == "ab xy"


@given(st.text(min_size=1, max_size=20), st.data())
def test_a_resumed_reply_goes_on_where_its_reader_was(text: str, data: st.DataObject) -> None:
    """What another replica said and this one says join to the reply that one replica would have made."""
    assume(ids := tokens(text))  # there are none for a mark of control tokens
    at = data.draw(st.integers(1, len(ids)))
    first = writer(stops=("ab",))
    (before,) = join_replies(written(first, ids[:at], [1, 3], None), 1)  # type: ignore[arg-type]
    seen = data.draw(st.integers(0, len(before.text)))
    (alone,) = join_replies(written(writer(stops=("ab",)), ids, [], FinishReason.LENGTH), 1)

    second = writer(stops=("ab",), resumed=ids[:at], skip=seen)
    pieces = [second.beginning] if second.beginning else []
    if second.finish_reason is None:
        pieces += written(second, ids[at:], [], FinishReason.LENGTH)
    (after,) = join_replies(pieces, 1)

    assert before.text[:seen] + after.text == alone.text
    assert second.num_tokens == len(alone.token_ids)


def test_a_reply_resumed_at_its_end_is_finished_at_once() -> None:
    """The tokens may already hold the end: the engine need not hear of such a reply."""
    assert writer(resumed=(*tokens("hi"), END)).finish_reason is FinishReason.STOP
    assert writer(stops=("i",), resumed=tokens("hi")).finish_reason is FinishReason.STOP
    assert writer(resumed=tokens("x" * 100)).finish_reason is FinishReason.LENGTH


def test_a_reader_cannot_have_seen_more_than_was_said() -> None:
    """An offset beyond the resumed text is a mistake of the caller."""
    with pytest.raises(BadRequest) as caught:
        writer(resumed=tokens("hi"), skip=3)

    assert caught.value.param == "resume_text_chars"
