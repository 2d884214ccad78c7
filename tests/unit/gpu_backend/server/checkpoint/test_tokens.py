# Text to tokens and back: nothing split, nothing lost, whatever the pieces were.

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpu_backend.server.checkpoint.tokens import Detokenizer, StopStrings, TextCodec, TooManyTokens

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    vocab = {character: i for i, character in enumerate(BYTES)} | {"he": 256, "llo": 257, "ä½": 258, "Ġwor": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"<unk>": 256, "▁": 257, "▁the": 258, "cat": 259, "中": 260}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()
BYTE_CODEC, PIECE_CODEC = TextCodec(BYTE_LEVEL), TextCodec(SENTENCE_PIECE)


def streamed(codec: TextCodec, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(codec)
    return [*map(detokenizer.feed, token_ids), detokenizer.finish()]


@given(st.lists(st.integers(0, 261)))
def test_pieces_of_any_tokens_join_to_the_whole_text(token_ids: list[int]) -> None:
    """Valid text, broken characters and special tokens alike: streaming equals decoding all at once."""
    assert "".join(streamed(BYTE_CODEC, token_ids)) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)


@given(st.text())
def test_no_piece_ends_inside_a_character(text: str) -> None:
    """Each piece of a sound text is sound itself, and the pieces join to the text."""
    pieces = streamed(BYTE_CODEC, BYTE_LEVEL.encode(text).ids)

    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_sentence_piece_bytes_join_to_characters(text: str) -> None:
    """Byte-fallback tokens wait for their character, and a reply keeps its leading space."""
    token_ids = [258, *text.encode(), 259]

    assert "".join(streamed(PIECE_CODEC, token_ids)) == f" the{text}cat"
    assert SENTENCE_PIECE.decode(token_ids) == f"the{text}cat"  # what the library strips at the start of a text


def test_special_tokens_have_names_but_no_text() -> None:
    """A special token adds nothing to a reply; an added token that is not special does."""
    special, tool = BYTE_LEVEL.token_to_id(SPECIAL), BYTE_LEVEL.token_to_id("<tool>")

    assert (BYTE_CODEC.piece(special), BYTE_CODEC.label(special)) == (b"", SPECIAL.encode())
    assert BYTE_CODEC.piece(tool) == b"<tool>"
    assert BYTE_CODEC.piece(10_000) == b""  # a model may have more rows than its tokenizer has words


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "c", "abc", ""]), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_cut_the_same_place_however_the_text_comes(pieces: list[str], stops: list[str]) -> None:
    """The text ends before the stop string that is complete first, and nothing of it is shown before that."""
    text = "".join(pieces)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = min(
        (text[: ends[0] - len(stop)] for stop in stops if text[: ends[0]].endswith(stop)), key=len
    ) if ends else text  # fmt: skip

    matcher, shown, has_stopped = StopStrings(stops), "", False
    for piece in pieces:
        new, has_stopped = matcher.feed(piece)
        shown += new
        assert expected.startswith(shown)
        if has_stopped:
            break
    shown += "" if has_stopped else matcher.finish()

    assert (shown, has_stopped) == (expected, bool(ends))


def test_text_is_buffered_only_while_a_stop_string_may_begin() -> None:
    """What cannot be part of a stop string is shown at once."""
    matcher = StopStrings(["\n\nUser:"])

    assert matcher.feed("Hello\n") == ("Hello", False)
    assert matcher.feed("\nUs") == ("", False)
    assert matcher.feed("e it") == ("\n\nUse it", False)


def test_truncation_and_padding_of_the_tokenizer_are_switched_off() -> None:
    """Settings left over from training must not cut or fill prompts."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)

    assert len(TextCodec(tokenizer).encode("twelve chars", 100, add_special_tokens=False)) == 12


def test_too_many_tokens_are_counted() -> None:
    """A text slightly too long is counted whole."""
    with pytest.raises(TooManyTokens) as caught:
        BYTE_CODEC.encode("x" * 11, 10, add_special_tokens=False)

    assert (caught.value.count, caught.value.counted_whole) == (11, True)


def test_far_too_long_texts_are_refused_after_a_part() -> None:
    """A text of megabytes costs no more than its beginning."""
    with pytest.raises(TooManyTokens) as caught:
        BYTE_CODEC.encode("x" * 4_000_000, 10, add_special_tokens=False)

    assert not caught.value.counted_whole
    assert 10 < caught.value.count < 1000


def test_long_texts_of_few_tokens_are_read_whole() -> None:
    """Many characters are no reason to refuse: only tokens count."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("=" * 1000, special=False)])

    assert len(TextCodec(tokenizer).encode("=" * 8000, 10, add_special_tokens=False)) == 8


def test_unknown_kinds_of_tokenizers_are_refused(tmp_path: Path) -> None:
    """A decoder that we cannot follow byte by byte is refused at the start, not garbled later."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()

    with pytest.raises(ValueError, match="WordPiece"):
        TextCodec(tokenizer)


def test_a_broken_tokenizer_file_is_a_plain_error(tmp_path: Path) -> None:
    """What the library says of a broken file reaches the operator who starts the engine."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))

    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        TextCodec.load(tmp_path)
