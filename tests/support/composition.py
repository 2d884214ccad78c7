# What composes with what, as declared. With speculation: every feature of a request and of the engine is in EXACT, with
# the reason why tokens and usage are the same with drafts and without, or in OFF. Each has a test of its own name in
# tests/integration/gpu_backend/test_speculation.py, and a line in docs/speculation.md. With each other: all but APART.

from __future__ import annotations

from itertools import combinations

EXACT = {
    "temperature": "each place of a draft is sampled with the noise of its own position",
    "top_p": "a function of the place's logits",
    "top_k": "a function of the place's logits",
    "min_p": "a function of the place's logits",
    "seed": "the noise is a function of (seed, reply index, position), drafts or not",
    "n": "each reply is a sequence with its own reply index",
    "logit_bias": "a function of the place's logits",
    "presence_penalty": "the tokens before a place, drafts included, are counted for it",
    "frequency_penalty": "the tokens before a place, drafts included, are counted for it",
    "repetition_penalty": "the tokens before a place, drafts included, are counted for it",
    "min_tokens": "a place's number in the reply says whether it may end there",
    "max_tokens": "no draft reaches the last token that is allowed",
    "stop_token_ids": "drafts are cut before a stop token; the place before it samples it",
    "ignore_eos": "leaves the end token out of the stop tokens",
    "stop": "stop strings are found in the text, token by token; tokens after one are not counted",
    "logprobs": "reported for each place that holds, from its own logits",
    "prompt_logprobs": "scored while the prompt is computed, where nothing is drafted",
    "grammar": "drafts are cut where the grammar forbids one or ends; each place has the mask of where it stands",
    "tools": "a grammar, or text that the front reads",
    "resume_token_ids": "known tokens, as the prompt's are",
    "deadline_ms": "decided before anything is computed",
    "tenant": "service is counted in tokens that a reply has, not in drafts",
    "weight": "service is counted in tokens that a reply has, not in drafts",
    "priority": "decides who is let in first, before anything is drafted",
    "tier": "drafts are planned last, within what the step's budget and the tier's leave",
    "prefix cache": "only blocks full of computed tokens are published; drafts are in none of them",
    "preemption": "drafts live for one step; a sequence that is computed again has its own tokens alone",
    "adapter": "drafts come from the text, or from a model without it; what they are verified by has it",
    "pictures": "drafts follow the prompt, where the pictures are; what they are verified by has seen them",
    "abort": "blocks of drafts are given back in the step that reserved them",
    "remote": "only full blocks of the prompt come from another engine, and are found like what is cached",
    "holds_blocks": "only full blocks of the prompt are kept for another engine; drafts are in none of them",
}

OFF = {"embeddings": "nothing is generated"}

# What an engine does for all requests at once, with how each is asked for in its configuration.
ENGINE_FEATURES = {
    "ngram": "--speculative-method ngram",
    "draft": "--speculative-method draft",
    "eagle3": "--speculative-method eagle3",
    "mtp": "--speculative-method mtp",
    "overlap": "a step is launched before the last one's tokens are known",
    "prefix cache": "blocks of equal beginnings are computed once",
    "host cache": "--host-kv-bytes: evicted blocks go to host memory and come back",
    "preemption": "too few KV blocks for all sequences that run",
    "swap": "a preempted sequence is copied to host memory where that takes less than computing it again",
    "chunks": "a prompt is longer than --max-num-batched-tokens",
    "experts": "a model with mixtures of experts",
    "sinks": "a model whose heads have attention sinks, and windows in every other layer",
    "sliding window": "a model whose queries look back only so far",
    "latent": "a model with attention over latent vectors, whose experts lie in groups",
    "states": "a model most of whose layers keep one state of a sequence in the place of keys and values",
    "graphs": "--cuda-graphs: decodes are replayed",
    "kv transfer": "--kv-transfer-address: blocks come from other engines, and are held for them",
    "tensor parallel": "--tensor-parallel-size: several processes have a part of each layer",
    "expert parallel": "--enable-expert-parallel: of a mixture's experts each of these has some",
    "pipeline parallel": "--pipeline-parallel-size: several processes have some of the layers",
}
# Every pair of features gives the tokens that a reply has alone in a plain engine, but for these, which exclude each
# other. tests/integration/gpu_backend/test_composition.py has a test for each pair; heads answer all.
APART: dict[frozenset[str], str] = {
    frozenset(("n", "resume_token_ids")): "a reply is resumed alone: refused unless n is 1",
    frozenset(("grammar", "tools")): "a reply has one grammar: an expression beside a forced tool is refused",
    **{frozenset(pair): "an engine has one method" for pair in combinations(("ngram", "draft", "eagle3", "mtp"), 2)},
    **{
        frozenset(("states", other)): "it goes on from blocks alone, or goes back: refused, and no prefix is found"
        for other in ("ngram", "draft", "eagle3", "mtp", "prefix cache", "host cache", "swap", "kv transfer", "remote")
    },
    frozenset(("eagle3", "pipeline parallel")): "it reads layers that lie in several stages: refused",
    frozenset(("kv transfer", "tensor parallel")): "blocks are exchanged by engines of one process: refused",
    frozenset(("kv transfer", "pipeline parallel")): "blocks are exchanged by engines of one process: refused",
}
