# Text to tokens and tokens to text: the checkpoint's tokenizer, and the pieces of text that its tokens stand for.
# A reply is put together from bytes, so that no character is ever split and any cut of the tokens gives the same text.

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gpu_backend.server.checkpoint.control_tokens import MARK, AddedTokens, Rewriting
from gpu_backend.server.checkpoint.tool_calls import CLOSE, OPEN

LONG_TEXT = 4096  # characters; encoding more would hold up the streams of others
CHARACTERS_PER_TOKEN = 16  # no ordinary text has more; a longer prompt is counted piece by piece
SHOWN_TOKENS = (OPEN, CLOSE)  # special in some vocabularies, ordinary in others; tool calls are found by them
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TooManyTokens(Exception):
    """A text has ``count`` tokens, or at least as many if it was not counted whole."""

    def __init__(self, count: int, *, counted_whole: bool) -> None:
        super().__init__(f"{count} tokens")
        self.count = count
        self.counted_whole = counted_whole


class TextCodec:
    """Encodes prompts and tells what each token adds to a reply.

    Understands byte-level vocabularies (GPT-2, Llama 3, Qwen) and SentencePiece ones with byte fallback (Llama 2).
    Raises ``ValueError`` for other kinds.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._spell = _spelling(tokenizer)
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        special = frozenset(token.content for token in added.values() if token.special)
        others = frozenset(token.content for token in added.values()) - special
        rewritten = any(token.normalized for token in added.values())
        self.added_tokens = AddedTokens(special, others, self._rewriting() if rewritten else None)
        self._pieces = {
            token_id: b"" for token_id, token in added.items() if token.special and token.content not in SHOWN_TOKENS
        }

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Read ``tokenizer.json``. Raises ``FileNotFoundError`` where there is none, ``ValueError`` for nonsense."""
        file = folder / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(f"{file} does not exist; the engine needs a checkpoint with a fast tokenizer")
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as exc:  # the library raises nothing more precise
            raise ValueError(f"{file} cannot be read: {exc}") from exc

    def encode(self, text: str, most: int, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of ``text``. Raises ``TooManyTokens`` if they are more than ``most``.

        A text that is far too long is refused after a part of it, before it costs time and memory. Without
        ``add_special_tokens`` it may have marks of ``ControlTokens``, and is encoded part by part.
        """
        size = CHARACTERS_PER_TOKEN * (most + 1)
        while len(text) > size:
            beginning = len(self._ids_of(text[:size], add_special_tokens=False))
            if beginning - self._longest > most:  # the cut may have split one token into as many
                raise TooManyTokens(beginning - self._longest, counted_whole=False)
            size *= 4
        ids = self._ids_of(text, add_special_tokens=add_special_tokens)
        if len(ids) > most:
            raise TooManyTokens(len(ids), counted_whole=True)
        return tuple(ids)

    def _ids_of(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not add_special_tokens and MARK in text:
            return self._ids_of_parts([part for part in text.split(MARK) if part])
        if len(text) <= LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # A batch, if only of one, is encoded without the interpreter's lock, on which all streams wait.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _ids_of_parts(self, parts: list[str]) -> list[int]:
        """Return the tokens of parts of one text. SentencePiece puts a space before each, where the text has none."""
        space, ids = self._tokenizer.token_to_id("▁"), list[int]()
        for part, encoded in zip(
            parts, self._tokenizer.encode_batch_fast(parts, add_special_tokens=False), strict=True
        ):
            own = encoded.ids
            is_odd = bool(ids and own) and own[0] == space and not part.startswith((" ", "▁"))
            ids += own[1:] if is_odd else own
        return ids

    def _rewriting(self) -> Rewriting | None:
        """Return how texts are rewritten before added tokens are looked for in them; None: they are not."""
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return None

        def found(text: str) -> list[tuple[str, int, int]]:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            places = zip(encoded.ids, encoded.offsets, strict=True)
            return [(self._added[token].decode(), *where) for token, where in places if token in self._added]

        return Rewriting(normalizer.normalize_str, found)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of a whole run of tokens, special ones left out."""
        decoder = Detokenizer(self)
        return "".join([decoder.feed(token_id) for token_id in token_ids]) + decoder.finish()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, name: str) -> int | None:
        """Return the id of a vocabulary entry, or None."""
        return self._tokenizer.token_to_id(name)

    def is_special(self, name: str) -> bool:
        """Whether a text is one special token of the vocabulary."""
        return name in self.added_tokens.special

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a reply: none for special tokens and unknown ids."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self.label(token_id)
        return piece

    def label(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, special ones by their names."""
        if (name := self._added.get(token_id)) is not None:
            return name
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._spell(token)


class Detokenizer:
    """Turns one reply's tokens into text as they come; bytes wait until their character is whole.

    The pieces joined, the last from ``finish``, equal decoding all tokens at once. Bytes that are not UTF-8 are shown
    as U+FFFD.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes."""
        return self._decoder.decode(self._codec.piece(token_id))

    def finish(self) -> str:
        """Return what is left of a character that was never completed."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds where a reply must end, and keeps back text that may be the beginning of a stop string.

    Of several stop strings the one that is complete first counts, whatever the pieces were. The time is linear in the
    text and in the number of stop strings (Knuth, Morris and Pratt).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [(string, _borders(string)) for string in strings]
        self._begun = [0] * len(strings)  # how many characters of each the text ends with
        self._firsts = frozenset(string[0] for string in strings)
        self._held = ""

    def feed(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Take in text; return what may be shown, and whether a stop string ended the reply there.

        A stop string that is complete while the reply must go on is text like any other.
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text, False
        whole = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = self._advance(character)
            if complete and may_stop:
                self._held = ""
                return whole[: end - complete], True
        shown = len(whole) - max(self._begun)
        self._held = whole[shown:]
        return whole[:shown], False

    def _advance(self, character: str) -> int:
        """Go on by a character; return the length of the longest stop string that it completes, or 0."""
        complete = 0
        for place, (string, borders) in enumerate(self._strings):
            size = self._begun[place]
            while size and string[size] != character:
                size = borders[size - 1]
            size += string[size] == character
            if size == len(string):
                complete = max(complete, size)
                size = borders[-1]
            self._begun[place] = size
        return complete

    def finish(self) -> str:
        """Return the text kept back: the reply ended, so it began no stop string."""
        held, self._held = self._held, ""
        return held


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON file's object; an empty one if there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that tokenizer_config.json names, as chat templates know them."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = tokenizer_config.get(name)
        if token is not None:
            found[name] = token["content"] if isinstance(token, dict) else token
    return found


@lru_cache(256)
def _borders(string: str) -> tuple[int, ...]:
    """Return for each beginning of ``string`` how long its longest end is that is a shorter beginning, too."""
    borders, size = [0], 0
    for character in string[1:]:
        while size and string[size] != character:
            size = borders[size - 1]
        size += string[size] == character
        borders.append(size)
    return tuple(borders)


def _spelling(tokenizer: Tokenizer) -> Any:
    """Return the function from a vocabulary entry to the bytes it stands for."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {"type": None}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        return _spell_byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _spell_sentence_piece
    raise ValueError(f"the tokenizer's decoder is {decoder['type']}; byte-level and SentencePiece ones are understood")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable characters stand for their own byte, the others for bytes in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def _spell_sentence_piece(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()
