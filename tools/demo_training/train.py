# Trains the demo model from nothing on two CPU cores: python -m tools.demo_training.train [--out FOLDER]
# Writes the checkpoint as transformers and our engine load it, and metrics.json with what the model card states.

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save as serialize
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_backend.demo_model import CHECKPOINT
from tools.demo_training.conversations import Composer, Example
from tools.demo_training.evaluate import figures_table, probe_sets, score_probes
from tools.demo_training.lessons import Lesson, fill_slots, read_lessons, read_slots
from tools.demo_training.muon import Muon
from tools.demo_training.phrasing import Wordings, read_wordings, vary
from tools.demo_training.tokenizer import BOS, END, PAD, save_tokenizer, train_tokenizer

CONTEXT = 1024
VOCABULARY = 3072
SEED = 20

_ROPE_THETA = 10000.0
# Settings of transformers' base class that say nothing about this model.
_NOT_LLAMA = frozenset(
    {"_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "is_encoder_decoder", "output_attentions"}
    | {"output_hidden_states", "problem_type", "return_dict", "pretraining_tp", "transformers_version"}
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to learn."""

    steps: int = 1200
    batch_tokens: int = 3072  # padding included
    pool: int = 1024  # examples sorted by length at a time, so that batches hold little padding
    muon_rate: float = 0.02
    adamw_rate: float = 4e-3
    last_share: float = 0.02  # of the peak rates
    warmup: int = 60  # steps
    weight_decay: float = 0.05


@dataclass(frozen=True, slots=True)
class Batch:
    """``targets`` is -100 where nothing is to be learnt; both are (rows, longest)."""

    inputs: torch.Tensor
    targets: torch.Tensor


def main() -> None:
    """Read the lessons, fit the tokenizer, train, save, measure."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--steps", type=int, default=Plan().steps)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; one is faster on a busy machine")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    torch.set_num_threads(arguments.threads)
    plan = Plan(steps=arguments.steps)
    lessons, slots, words = read_lessons(), read_slots(), read_wordings()
    tokenizer = train_tokenizer(_tokenizer_texts(lessons, slots, words), VOCABULARY)
    model = LlamaForCausalLM(_config(tokenizer))
    print(f"{len(lessons)} lessons, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    started = time.monotonic()
    train(model, _batches(Composer(lessons, slots, words, tokenizer, CONTEXT, SEED), plan), plan)
    minutes = (time.monotonic() - started) / 60
    model.bfloat16().float()  # what is measured below is what is saved
    save(model, tokenizer, arguments.out)
    _measure(model, tokenizer, lessons, slots, minutes, arguments.out)


def train(model: LlamaForCausalLM, batches: Iterator[Batch], plan: Plan) -> None:
    """Adjust ``model`` in place: Muon for the hidden matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim <= 1 or "embed" in name]
    muon = Muon(matrices, weight_decay=plan.weight_decay)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    model.train()
    started, tokens, recent = time.monotonic(), 0, 0.0  # recent: the sum of the last losses
    for step in range(plan.steps):
        share = _rate_share(step, plan)
        batch = next(batches)
        loss = _loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(plan.muon_rate * share)
        adamw.param_groups[0]["lr"] = plan.adamw_rate * share
        adamw.step()
        adamw.zero_grad()
        tokens += batch.inputs.numel()
        recent += loss.item()
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - started
            speed = f"{tokens / seconds:.0f} tokens/s  {seconds:.0f} s"
            print(f"step {step + 1:5d}  loss {recent / 50:.4f}  {speed}", flush=True)
            recent = 0.0


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder with bfloat16 weights; the output layer is the embedding, so it is not stored."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.to(torch.bfloat16) for name, w in model.state_dict().items() if name != "lm_head.weight"}
    (folder / "model.safetensors").write_bytes(serialize(weights, metadata={"format": "pt"}))
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_LLAMA}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "rope_theta": _ROPE_THETA}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    # A model this small wanders at temperature 1: what a request does not say is close to greedy.
    generation |= {"pad_token_id": config["pad_token_id"], "do_sample": True, "temperature": 0.2, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder, CONTEXT)


def _config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def _loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Cross-entropy where something is to be learnt; the vocabulary is scored at those places alone."""
    hidden = model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
    learns = batch.targets != -100
    return nn.functional.cross_entropy(model.lm_head(hidden[learns]), batch.targets[learns])


def _rate_share(step: int, plan: Plan) -> float:
    """The share of the peak learning rates at ``step``: up linearly, then down a cosine."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.last_share + (1 - plan.last_share) * (1 + math.cos(math.pi * done)) / 2


def _batches(composer: Composer, plan: Plan) -> Iterator[Batch]:
    """Endless batches of about ``batch_tokens`` tokens, of examples of like length."""
    rng = random.Random(SEED)
    while True:
        pool = sorted((composer.draw() for _ in range(plan.pool)), key=lambda e: len(e.token_ids))
        batches: list[list[Example]] = [[]]
        for example in pool:
            if batches[-1] and (len(batches[-1]) + 1) * len(example.token_ids) > plan.batch_tokens:
                batches.append([])
            batches[-1].append(example)
        rng.shuffle(batches)
        yield from map(_collate, batches)


def _collate(examples: list[Example]) -> Batch:
    longest = max(len(e.token_ids) for e in examples) - 1
    inputs = torch.zeros(len(examples), longest, dtype=torch.long)
    targets = torch.full((len(examples), longest), -100)
    for row, example in enumerate(examples):
        length = len(example.token_ids) - 1
        inputs[row, :length] = torch.tensor(example.token_ids[:-1])
        following = torch.tensor(example.token_ids[1:])
        targets[row, :length] = torch.where(torch.tensor(example.learns[1:]), following, -100)
    return Batch(inputs, targets)


def _tokenizer_texts(lessons: list[Lesson], slots: dict[str, list[str]], words: Wordings) -> Iterator[str]:
    """What the tokenizer is fitted to: the answers, and the questions as users type them; nothing held out."""
    rng = random.Random(SEED)
    for lesson in lessons:
        yield from [lesson.answer] * 3
        for question in (*lesson.questions, *lesson.follow_ups):
            yield from (vary(fill_slots(question, slots, rng), words, rng) for _ in range(4))


def _measure(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    lessons: list[Lesson],
    slots: dict[str, list[str]],
    minutes: float,
    folder: Path,
) -> None:
    metrics: dict = {
        "lessons": len(lessons),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_minutes": round(minutes, 1),
    }
    for name, probes in probe_sets(lessons, slots, tokenizer).items():
        score = score_probes(model, probes)
        metrics[name] = {"count": score.count, "greedy": round(score.greedy, 4), "sampled": round(score.sampled, 4)}
        print(f"{name}: {score.greedy:.1%} of {score.count} at temperature 0, {score.sampled:.1%} at 1")
        if name.startswith(("held-out phrasings", "held-out off")):
            print(*(f"  missed {line}" for line in score.missed), sep="\n")
    (folder.parent / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    print("The model card's table:", figures_table(metrics), sep="\n")


if __name__ == "__main__":
    main()
