# The tables of the service: teams and their keys, batches and files, callbacks, the audit log, idempotency.
# A change here needs a file in migrations/versions/; a test compares the two.

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Computed,
    Date,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    Uuid,
    false,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from billing.ledger.tables import ZERO, metadata

NOW = text("now()")


def moment(name: str) -> Column:
    """Return a column for a moment that may not have come yet."""
    return Column(name, DateTime(timezone=True))


def since() -> Column:
    """Return the column that says when a row was made."""
    return Column("created_at", DateTime(timezone=True), nullable=False, server_default=NOW)


teams = Table(
    "teams",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("weight", Double, nullable=False, server_default=text("1")),
    Column("allowed_models", ARRAY(Text)),  # null: all
    Column("allow_smaller", Boolean, nullable=False, server_default=text("true")),
    Column("safety", JSONB),  # gateway.core.settings.TeamSafety; null: the deployment's
    Column("limits", JSONB, nullable=False, server_default=text("'{}'::jsonb")),  # billing.core.holds.Limits
    # Its own limits for one model each. A model that was named once stays, if without limits: leases know it from then.
    Column("model_limits", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    Column("user_limits", JSONB, nullable=False, server_default=text("'{}'::jsonb")),  # gateway.core.principals.Team
    Column("tag_limits", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    Column("calls_without_user", Text, nullable=False, server_default="refuse"),
    Column(
        "hash_key", Text, nullable=False, server_default=text("replace((gen_random_uuid())::text, '-'::text, ''::text)")
    ),
    moment("suspended_at"),
    moment("deleted_at"),  # the row stays, for the books speak of it
    Column("webhook_url", Text),  # where its events go; null: nowhere
    Column("cost_centre", Text),  # to which its cost goes, as finance names it
    Column("company_keys", Text, nullable=False, server_default="otherwise"),  # gateway.core.principals.CompanyKeys
    Column("own_key_cost", Text, nullable=False, server_default="none"),  # gateway.core.principals.OwnKeyCost
    Column("contents", JSONB),  # gateway.core.principals.TeamContents; null: contents of its calls are not kept
    since(),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=NOW),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),  # "key_…"
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False, index=True),
    Column("name", Text, nullable=False, server_default=text("''")),
    Column("digest", LargeBinary, nullable=False, unique=True),  # HMAC-SHA-256 of the key under the pepper
    Column("pepper", Text),  # its name, see gateway.core.keys.pepper_name; null: not noted yet
    Column("prefix", Text, nullable=False),  # "tg-ab12": enough for a reader to tell keys apart
    Column("previous_digest", LargeBinary, unique=True),  # of the secret that its team has replaced
    moment("previous_until"),  # how long that one works
    Column("replaced_by", Text),  # the key that an admin's rotation made in its place
    Column("limits", JSONB, nullable=False, server_default=text("'{}'::jsonb")),  # billing.core.holds.Limits
    Column("allowed_models", ARRAY(Text)),  # of those that the team may use; null: all
    Column("allowed_addresses", ARRAY(Text)),  # ranges; null: everywhere
    Column("allowed_endpoints", ARRAY(Text)),  # names of gateway.dialects.table; null: all
    Column("cache", Text),  # "on", "all" or "off"; null: as the model that is asked for
    since(),
    moment("expires_at"),
    moment("revoked_at"),
    moment("last_used_at"),  # to about a minute
)

admin_keys = Table(
    "admin_keys",
    metadata,
    Column("id", Text, primary_key=True),  # "adm_…"
    Column("role", Text, nullable=False),  # gateway.core.principals.Role
    Column("team_id", Text, ForeignKey("teams.id")),  # whose admin it is; null: not of one team
    Column("name", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False, unique=True),  # HMAC-SHA-256 of the key under the pepper
    Column("pepper", Text, nullable=False),  # its name, see gateway.core.keys.pepper_name
    Column("prefix", Text, nullable=False),
    Column("created_by", Text, nullable=False),  # an actor, as in the audit log
    Column("person", Text),  # who has signed in, and uses this by a cookie; null: a key
    since(),
    moment("expires_at"),
    moment("revoked_at"),
    moment("last_used_at"),  # to about a minute
)

files = Table(
    "files",
    metadata,
    Column("id", Text, primary_key=True),  # "file-…"
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),  # "batch" or "batch_output"
    Column("bytes", BigInteger, nullable=False, server_default=ZERO),
    Column("status", Text, nullable=False),  # "uploading", then "processed"
    since(),
    moment("expires_at"),
    Index("files_team_id_created_at_idx", "team_id", "created_at"),
    Index("files_expires_at_idx", "expires_at"),
)

# The bytes of a file, in order; their concatenation is the file.
file_chunks = Table(
    "file_chunks",
    metadata,
    Column("file_id", Text, ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),  # "batch_…"
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False),
    Column("key_id", Text, ForeignKey("api_keys.id"), nullable=False),
    Column("endpoint", Text, nullable=False),  # "/v1/chat/completions"
    Column("model", Text),  # when all items name the same
    Column("status", Text, nullable=False),
    Column("priority", Text, nullable=False, server_default=text("'normal'")),
    Column("completion_window", Text, nullable=False, server_default=text("'24h'")),
    Column("callback_url", Text),
    Column("input_file_id", Text, ForeignKey("files.id", ondelete="SET NULL")),
    Column("output_file_id", Text, ForeignKey("files.id", ondelete="SET NULL")),
    Column("error_file_id", Text, ForeignKey("files.id", ondelete="SET NULL")),
    Column("errors", JSONB),  # [{"code", "line", "message", "param"}]
    Column("metadata", JSONB),
    Column("is_aside", Boolean, nullable=False, server_default=false()),  # made by the deployment itself
    Column("input_bytes", BigInteger, nullable=False, server_default=ZERO),  # of its requests, or of their file
    Column("total", Integer, nullable=False, server_default=ZERO),
    Column("completed", Integer, nullable=False, server_default=ZERO),
    Column("failed", Integer, nullable=False, server_default=ZERO),
    Column("input_tokens", BigInteger, nullable=False, server_default=ZERO),  # of the finished items
    Column("output_tokens", BigInteger, nullable=False, server_default=ZERO),
    Column("cost_nanousd", BigInteger, nullable=False, server_default=ZERO),
    Column("failures", JSON),  # of an ended one: failed items by code, the most frequent first; null: not asked for yet
    Column("tries", Integer, nullable=False, server_default=ZERO),  # to check the input file
    since(),
    moment("estimated_completion"),
    moment("in_progress_at"),
    moment("expires_at"),
    moment("finalizing_at"),
    moment("completed_at"),
    moment("failed_at"),
    moment("expired_at"),
    moment("cancelling_at"),
    moment("cancelled_at"),
    Index("batches_team_id_created_at_idx", "team_id", "created_at"),
    Index("batches_input_file_id_idx", "input_file_id", postgresql_where=text("input_file_id IS NOT NULL")),
    Index("batches_output_file_id_idx", "output_file_id"),
    Index("batches_error_file_id_idx", "error_file_id"),
    Index(
        "batches_open_idx",
        "expires_at",
        postgresql_where=text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
    ),
)

batch_items = Table(
    "batch_items",
    metadata,
    Column("batch_id", Text, ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("custom_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),  # JSON as it came
    Column("status", Text, nullable=False),
    Column("lease_owner", Text),  # the worker that has claimed it
    moment("lease_until"),
    Column("tries", Integer, nullable=False, server_default=ZERO),
    moment("not_before"),  # the earliest next try
    Column("losses", SmallInteger, nullable=False, server_default=ZERO),  # tries whose lease ended by itself
    Column("request_id", Uuid),  # of the try whose answer is kept
    Column("response", LargeBinary),  # JSON of the output line's "response"
    Column("error", LargeBinary),  # JSON of the output line's "error"
    moment("finished_at"),
    Column("provider_batch_id", Text),  # in which it goes, or went, to its provider
    Column("provider_line", LargeBinary),  # as it is sent there; null once it was
    Column("sent", JSONB),  # gateway.batch.at_providers.store.Sent: what was known when it was put there
    Column("is_live_only", Boolean, nullable=False, server_default=false()),  # no provider's batch answered it
    Index(
        "batch_items_due_idx",
        "batch_id",
        text("coalesce(not_before, '-infinity')"),
        "position",
        postgresql_where=text("status IN ('queued', 'running')"),
    ),
    Index(
        "batch_items_lost_idx",
        "batch_id",
        "position",
        postgresql_where=text("losses > 0 AND status IN ('queued', 'running')"),
    ),
    Index(
        "batch_items_provider_batch_id_idx",
        "provider_batch_id",
        "position",
        postgresql_where=text("provider_batch_id IS NOT NULL"),
    ),
)

# Batches at the Batch APIs of providers, each with lines of one batch for one target. Its id names what its lines hold,
# too (owners.id).
provider_batches = Table(
    "provider_batches",
    metadata,
    Column("id", Text, primary_key=True),  # "pb_…"
    Column("batch_id", Text, ForeignKey("batches.id", ondelete="CASCADE"), nullable=False),
    Column("provider", Text, nullable=False),
    Column("place", Text, nullable=False),  # Target.key and the price's edition: what its lines have in common
    Column("target", JSONB, nullable=False),  # router.catalog.targets.Target, at the price of batches
    Column("key_digest", Text, nullable=False),  # of the provider's key that it belongs to
    Column("status", Text, nullable=False),  # "gathering", "submitting", "submitted" or "ended"
    Column("lines", Integer, nullable=False, server_default=ZERO),
    Column("bytes", BigInteger, nullable=False, server_default=ZERO),
    Column("upstream_id", Text),  # as the provider calls it
    Column("tries", SmallInteger, nullable=False, server_default=ZERO),  # to submit it
    Column("outcome", Text),  # how it ended, in the provider's word or ours
    Column("lease_owner", Text),  # the worker that looks after it
    moment("lease_until"),
    Column("next_look_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    since(),
    Column("touched_at", DateTime(timezone=True), nullable=False, server_default=NOW),  # when its last line came
    moment("tried_at"),  # when it was last sent there: before that was done
    moment("submitted_at"),
    moment("cancelled_at"),  # when the provider was asked to stop
    moment("ended_at"),
    Index("provider_batches_batch_id_idx", "batch_id"),
    Index("provider_batches_open_idx", "next_look_at", postgresql_where=text("status <> 'ended'")),
)

# The outbox: callbacks to deliver, written in the transaction that ends the batch.
callbacks = Table(
    "callbacks",
    metadata,
    Column("id", Text, primary_key=True),  # "evt_…", also the webhook-id
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False, index=True),
    Column("batch_id", Text, ForeignKey("batches.id", ondelete="SET NULL")),
    Column("event", Text, nullable=False),  # "batch.completed"
    Column("url", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),  # JSON, as signed and sent
    Column("tries", Integer, nullable=False, server_default=ZERO),
    Column("next_try_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    Column("lease_owner", Text),
    moment("lease_until"),
    Column("last_status", Integer),
    Column("last_error", Text),
    since(),
    moment("delivered_at"),
    moment("given_up_at"),  # undelivered for 24 hours
    Column("receiver", Text, Computed("substring(url, '://([^/?#]+)')", persisted=True)),  # host and port
    # After it there is one last try.
    Column("expires_at", DateTime(timezone=True), nullable=False, server_default=text("now() + interval '24 hours'")),
    Index("callbacks_batch_id_idx", "batch_id", postgresql_where=text("batch_id IS NOT NULL")),
    Index("callbacks_due_idx", "next_try_at", postgresql_where=text("delivered_at IS NULL AND given_up_at IS NULL")),
)

webhook_secrets = Table(
    "webhook_secrets",
    metadata,
    Column("id", Text, primary_key=True),  # "whs_…"
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False, index=True),
    Column("secret", LargeBinary, nullable=False),  # encrypted
    since(),
)

# Keys of providers that teams brought, for their own calls.
provider_keys = Table(
    "provider_keys",
    metadata,
    Column("id", Text, primary_key=True),  # "pvk_…"
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False, index=True),
    Column("provider", Text, nullable=False),  # as tollgate.yaml names it
    Column("name", Text, nullable=False),
    Column("secret", LargeBinary, nullable=False),  # encrypted
    Column("fingerprint", Text, nullable=False),  # tells it from others, and nothing about it
    since(),
    moment("rotated_at"),
)

# What admins did, and what the safety checks found. Never prompts, never secrets.
audit_log = Table(
    "audit_log",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    since(),
    Column("actor", Text, nullable=False),  # an admin key's fingerprint, "cli:USER" or "system"
    Column("action", Text, nullable=False),  # "team.created", "key.revoked", "safety.input_blocked"
    Column("team_id", Text),
    Column("subject", Text),  # the id of what was acted on
    Column("request_id", Text),
    Column("details", JSONB),
    Column("address", Text),  # of the client, as connections are counted by
    Column("reason", Text),  # that the client gave
    Index("audit_log_created_at_idx", "created_at"),
    Index("audit_log_team_id_created_at_idx", "team_id", "created_at"),
)

# Calls that were refused, so that a team can ask why. Not a part of the accounting: a part of a flood may be missing.
refused_calls = Table(
    "refused_calls",
    metadata,
    Column("request_id", Uuid, primary_key=True),  # UUIDv7: the moment is in it
    Column("team_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("model_asked", Text),  # null: the body was not read that far
    Column("http_status", Integer, nullable=False),
    Column("code", Text, nullable=False),
    Column("param", Text),
    Column("limit_name", Text),  # "team.usd_per_day"
    Column("message", Text),  # what the caller was told, but where it may quote what was asked
    Index("refused_calls_team_id_request_id_idx", "team_id", "request_id"),
)

# Calls that came with an Idempotency-Key, and the stored answers of those that ended well.
idempotency = Table(
    "idempotency",
    metadata,
    Column("team_id", Text, ForeignKey("teams.id", ondelete="CASCADE"), primary_key=True),
    Column("endpoint", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("body_digest", LargeBinary, nullable=False),  # HMAC-SHA-256 of all that was asked, under the pepper
    Column("request_id", Text, nullable=False),  # of the call that answers
    Column("owner", Text, nullable=False),  # the gateway that runs it
    moment("lease_until"),  # null once it is answered
    Column("status", Integer),  # HTTP, once it is answered
    Column("answer", LargeBinary),  # status, headers and body, compressed and encrypted
    since(),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Index("idempotency_expires_at_idx", "expires_at"),
    Index("idempotency_running_idx", "request_id", postgresql_where=text("lease_until IS NOT NULL")),
)

# Responses that their callers go on from or read again, one turn of a conversation each.
stored_responses = Table(
    "stored_responses",
    metadata,
    Column("id", Text, primary_key=True),  # "resp_…"
    Column("team_id", Text, ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
    Column("previous_id", Text),  # of the turn before; null: the first
    Column("sealed", LargeBinary, nullable=False),  # input items and response, compressed and encrypted
    Column("conversation_bytes", BigInteger, nullable=False),  # of this turn and those before it, in JSON
    Column("is_open", Boolean, nullable=False, server_default=false()),  # whether it runs in the background
    since(),
    Index("stored_responses_team_id_created_at_idx", "team_id", "created_at"),
    Index("stored_responses_created_at_idx", "created_at"),
)

# Items that teams keep here for responses to go on from; each response adds its own.
conversations = Table(
    "conversations",
    metadata,
    Column("id", Text, primary_key=True),  # "conv_…"
    Column("team_id", Text, ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
    Column("sealed", LargeBinary, nullable=False),  # its metadata, compressed and encrypted
    Column("items", BigInteger, nullable=False, server_default=ZERO),
    Column("bytes", BigInteger, nullable=False, server_default=ZERO),  # of its items in JSON
    Column("last_position", BigInteger, nullable=False, server_default=ZERO),
    Column("touched_at", DateTime(timezone=True), nullable=False),  # when something was last done with it
    since(),
    Index("conversations_team_id_touched_at_idx", "team_id", "touched_at"),
    Index("conversations_touched_at_idx", "touched_at"),
)
conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation_id", Text, ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
    Column("position", BigInteger, primary_key=True),  # from 1 on, with gaps where items were deleted
    Column("id", Text, nullable=False),
    Column("sealed", LargeBinary, nullable=False),  # the item as it is told, compressed and encrypted
    Column("size", BigInteger, nullable=False),  # bytes in JSON
    Index("conversation_items_id_idx", "conversation_id", "id", unique=True),
)

# What the streams of responses in the background said, for those who listen from any gateway.
response_events = Table(
    "response_events",
    metadata,
    Column("response_id", Text, ForeignKey("stored_responses.id", ondelete="CASCADE"), primary_key=True),
    Column("last_event", BigInteger, primary_key=True),  # sequence_number of the last that is in it
    Column("sealed", LargeBinary, nullable=False),  # events as they are sent, compressed and encrypted
)

# What was asked and answered, of the calls of teams that want it kept. Not a part of the accounting.
call_contents = Table(
    "call_contents",
    metadata,
    Column("request_id", Uuid, primary_key=True),
    Column("team_id", Text, ForeignKey("teams.id", ondelete="CASCADE"), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),  # when the call was made
    Column("sealed", LargeBinary, nullable=False),  # gateway.contents.keeper.Contents, compressed and encrypted
    Index("call_contents_team_id_created_at_idx", "team_id", "created_at"),
)

# Thresholds of budgets that were reached, each once in a period. A row goes when its cap was raised so far that less
# than the threshold is used: then it may be reached again.
budget_alerts = Table(
    "budget_alerts",
    metadata,
    Column("team_id", Text, ForeignKey("teams.id"), primary_key=True),
    Column("key_id", Text, primary_key=True),  # "" for the team's own limit
    Column("limit_name", Text, primary_key=True),  # "usd_per_day", "usd_per_month" or "tokens_per_day"
    Column("period", Text, primary_key=True),  # "2026-11-21" or "2026-11"
    Column("threshold", Integer, primary_key=True),  # percent of the cap
    Column("cap", BigInteger, nullable=False),  # nano-dollars or tokens
    Column("used", BigInteger, nullable=False),  # when it was noticed
    Column("callback_id", Text, ForeignKey("callbacks.id", ondelete="SET NULL")),  # null: no callback was sent
    since(),
    Index("budget_alerts_callback_id_idx", "callback_id", postgresql_where=text("callback_id IS NOT NULL")),
    Index("budget_alerts_created_at_idx", "created_at"),
)

# From where keys were used, for as long as a key's past counts: keyed hashes of networks, which only tell them apart.
key_networks = Table(
    "key_networks",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("day", Date, primary_key=True),
    Column("network", LargeBinary, primary_key=True),
    Index("key_networks_day_idx", "day"),
)

# What was unusual about the day of a key, each signal once.
unusual_uses = Table(
    "unusual_uses",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("day", Date, primary_key=True),
    Column("signal", Text, primary_key=True),  # gateway.webhooks.unusual_use.Signal
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False),
    Column("details", JSONB, nullable=False),
    since(),
    Index("unusual_uses_day_idx", "day"),
)

# What an automatic route's quality takes for one team, as its shadow calls show it.
recalibrations = Table(
    "recalibrations",
    metadata,
    Column("team_id", Text, ForeignKey("teams.id"), primary_key=True),
    Column("route", Text, primary_key=True),
    Column("quality", Double, nullable=False),  # the route's own, when this was measured
    Column("applied", Double, nullable=False),  # the score asked for in its place
    Column("outcomes", Integer, nullable=False),  # that it rests on
    Column("changed_at", DateTime(timezone=True), nullable=False),
    Column("learned", LargeBinary),  # the team's own scores, as router.learning packs them; null: none that pay
)

# Calls that a small model answered and that are asked of a large one too, or the other way round (explored). What they
# said is kept until it is compared.
held_back = Table(
    "held_back",
    metadata,
    Column("request_id", Uuid, primary_key=True),  # of the call that was answered
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False),
    Column("key_id", Text, ForeignKey("api_keys.id"), nullable=False),
    Column("route", Text, nullable=False),
    Column("score", Double, nullable=False),
    Column("scored_by", Text),  # version of the complexity model
    Column("form", LargeBinary),  # the text statistics that it read, float16, where the team's own scores are learned
    Column("is_explored", Boolean, nullable=False, server_default=false()),  # a large model answered
    Column("small_model", Text),  # the one that answered
    Column("large_model", Text),  # likewise
    Column("status", Text, nullable=False),  # "waiting", "asked", "to_judge", "judging", "compared" or "dropped"
    Column("reason", Text),  # why it was dropped
    Column("body", LargeBinary),  # JSON of what is to be asked next
    Column("answer", LargeBinary),  # what the caller got
    Column("batch_id", Text),  # in which it is asked
    Column("position", Integer),
    Column("suffices", Boolean),  # what was found
    Column("small_nanousd", BigInteger, nullable=False),  # what its answer cost
    Column("large_nanousd", BigInteger, nullable=False, server_default=ZERO),  # likewise
    Column("judge_nanousd", BigInteger, nullable=False, server_default=ZERO),
    Column("reserved_nanousd", BigInteger, nullable=False),  # of the day's budget: the most, then what it was
    since(),
    moment("ended_at"),
    Index("held_back_team_id_created_at_idx", "team_id", "created_at"),
    Index("held_back_created_at_idx", "created_at"),
    Index("held_back_open_idx", "status", postgresql_where=text("status NOT IN ('compared', 'dropped')")),
)
