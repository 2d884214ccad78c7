# A conversation's summary as its clients keep it: sealed under the pepper and for their team, so that what comes back
# is what was answered here, and to that team.

from __future__ import annotations

import base64
import binascii

from gateway.calls.hooks import Ending
from gateway.dialects.endpoint import ReplyFacts
from gateway.storage.encryption import Sealer, Unsealable
from gateway.upstreams.wire.errors import UpstreamError
from protocol.chat import ChatReply
from protocol.errors import invalid_param, missing_param
from protocol.responses import InputItem
from protocol.responses_to_chat import SEAL, is_compacted_elsewhere

OPENING = "This is a summary of our conversation until here; what I said in it may stand above, too. Go on from it.\n\n"


class Summaries:
    """Seals summaries, and opens them again."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer

    def seal(self, team_id: str, summary: str) -> str:
        """Return the ``encrypted_content`` of a summary."""
        return SEAL + base64.b64encode(self._sealer.seal(summary.encode(), team_id)).decode()

    def opened(self, team_id: str, items: tuple[InputItem, ...], where: str) -> tuple[InputItem, ...]:
        """Return items with each summary that was sealed here as what a user says. ``where`` they stand. Raises
        BadRequest for one that was sealed for another team, or altered."""
        opened = list(items)
        for place, item in enumerate(items):
            if item.type == "compaction" and not is_compacted_elsewhere(item):
                words = self._unsealed(team_id, item.encrypted_content, f"{where}[{place}].encrypted_content")
                opened[place] = InputItem(role="user", content=OPENING + words)
        return tuple(opened)

    async def refuse_empty(self, reply: ReplyFacts, ending: Ending) -> None:
        """Refuse an answer that sums nothing up, before anything of it is written. Raises UpstreamError."""
        whole = ending[0] if isinstance(ending, tuple) else None
        if isinstance(whole, ChatReply) and not (whole.choices[0].message.content or "").strip():
            raise UpstreamError(
                f"The model '{reply.target.model.name}' answered without a summary. Try again, or name another model.",
                outcome="malformed",
            )

    def _unsealed(self, team_id: str, content: str | None, param: str) -> str:
        if content is None:
            raise missing_param(param, f"Missing required parameter: '{param}'.")
        try:
            sealed = base64.b64decode(content.removeprefix(SEAL), validate=True)
            return self._sealer.unseal(sealed, team_id).decode()
        except (binascii.Error, ValueError, Unsealable) as exc:
            words = (
                f"'{param}' is no summary that this gateway made for your team: it was changed, or made elsewhere. "
                "Send the item back as it was answered, or leave it out and send the items of the conversation."
            )
            raise invalid_param(param, words) from exc
