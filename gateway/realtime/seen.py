# What went past in a conversation, in tokens: what a response is charged by that its upstream did not count to its end.

from __future__ import annotations

import math

from billing.core.records import bounded_usage
from protocol.usage import Usage
from router.catalog.targets import ModelSpec
from router.prompt_size.prompt_bounds import USUAL_TOKEN_BYTES

# Of a second, as OpenAI counts them ("Managing costs" of the Realtime API: a token for 100 ms heard, for 50 ms said).
HEARD_TOKENS, SPOKEN_TOKENS = 10, 20
PCM_BYTES, G711_BYTES = 48_000, 8_000  # of a second of sound: 16 bits at 24 kHz, and 8 bits at 8 kHz
BASE64 = 4 / 3


class Context:
    """How long a conversation is. What an upstream counts takes the place of what is estimated here."""

    def __init__(self) -> None:
        self.heard_bytes, self.spoken_bytes = PCM_BYTES, PCM_BYTES  # of a second, of either side's sound
        self._words = self._heard = 0.0  # tokens

    def hear(self, sound: int) -> None:
        """Add sound of the client, of so many characters in base64."""
        self._heard += sound / BASE64 / self.heard_bytes * HEARD_TOKENS

    def read(self, size: int) -> None:
        """Add bytes of text."""
        self._words += size / USUAL_TOKEN_BYTES

    def counted(self, used: Usage) -> None:
        """Go by what a response has used: its prompt and what it said are what the next one is asked with."""
        self._heard = used.audio_input_tokens + used.audio_output_tokens
        self._words = used.input_tokens + used.output_tokens - self._heard

    def usage(self, said: Said, model: ModelSpec) -> Usage:
        """Return about what a response has used by now, and no more than is held for it."""
        heard = min(math.ceil(self._heard), model.context)
        spoken = min(math.ceil(said.sound / BASE64 / self.spoken_bytes * SPOKEN_TOKENS), model.max_output)
        words = math.ceil(said.words / USUAL_TOKEN_BYTES)
        usage = Usage(
            input_tokens=min(math.ceil(self._words) + heard, model.context),
            output_tokens=min(words + spoken, model.max_output),
            audio_input_tokens=heard,
            audio_output_tokens=spoken,
        )
        return bounded_usage(usage)


class Said:
    """What a response has said by now: bytes of words, and of sound in base64."""

    def __init__(self) -> None:
        self.words = self.sound = 0
