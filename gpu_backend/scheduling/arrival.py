# What is refused as soon as it comes, because waiting would be in vain: there is no room in the queue, or the deadline
# will pass before the reply's end. A caller that is refused now can still ask another replica.

from __future__ import annotations

import math

from gpu_backend.scheduling.budget import largest_chunk
from gpu_backend.scheduling.scheduler import Scheduler
from gpu_backend.step.config import StepConfig
from gpu_backend.step.cost import StepCost, StepWork, chunk_work
from gpu_backend.step.messages import Embed, Generate, Refused


def refuse_on_arrival(command: Generate | Embed, scheduler: Scheduler, config: StepConfig) -> Refused | None:
    """Say why a request that could be served is not taken now; None if it is."""
    if scheduler.admission.is_full_for(command.tier, command.tenant):
        reason = f"The {command.tier} queue of this engine has no room for more of yours. Try again later."
        return Refused(command.request_id, reason, 1.0)
    if isinstance(command, Embed) or command.deadline_ms is None or config.step_cost is None:
        return None
    seconds = predict_seconds(command, scheduler, config, config.step_cost)
    late = seconds - command.deadline_ms / 1000
    if late <= 0:
        return None
    reason = (
        f"This engine would take about {seconds * 1000:.0f} ms, and x-deadline-ms is {command.deadline_ms}. "
        "Allow more time, or ask again later."
    )
    return Refused(command.request_id, reason, late)


def predict_seconds(command: Generate, scheduler: Scheduler, config: StepConfig, cost: StepCost) -> float:
    """Predict how long a request that comes now takes to its end.

    Prompts that go before it are computed as fast as decodes allow; without a slot or room for it, it waits until as
    many of the running sequences have ended; then its reply takes a decode step a token. A reply's length is
    the mean of late; an idle engine, which that estimate could keep idle for ever, goes by the first token.
    """
    running, before = list(scheduler.running), scheduler.admission.before(command.tier)
    context = sum(sequence.num_computed for sequence in running)
    decodes = StepWork(len(running), context, context)
    step = cost.seconds(decodes)
    limit = config.step_stretch * cost.seconds_launched(decodes) if running else math.inf
    chunk = max(1, largest_chunk(cost, decodes, limit, 0, config.max_num_batched_tokens))
    seconds_per_token = cost.seconds(decodes + chunk_work(0, chunk)) / chunk
    prompts = sum(s.remaining for s in running if s.remaining > 1) + sum(s.remaining for s in before)

    mean = scheduler.admission.forecast.mean
    free = 0 if scheduler.admission.lacks_room else config.max_num_seqs - len(running)
    turns = max(0, len(before) + 1 - free)
    until_slot = turns * mean * step / max(len(running), 1)

    known = len(command.prompt_token_ids) + len(command.resume_token_ids)
    towers = sum(picture.tower_tokens for picture in command.pictures)
    prefill = (known + towers) * seconds_per_token + cost.pair * chunk_work(0, known).pairs
    is_idle = not running and not before
    tokens = 1 if is_idle else min(mean, command.sampling.max_tokens - len(command.resume_token_ids))
    one_more = cost.seconds(decodes + StepWork(1, known, known))
    return max(prompts * seconds_per_token, until_slot) + prefill + tokens * one_more
