# Trains the demo model from nothing on two CPU cores: python -m gpu_backend.demo_model.train [--steps N] [--out FOLDER]
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
from gpu_backend.demo_model.conversations import Composer, Example
from gpu_backend.demo_model.evaluate import probe_sets, score_probes
from gpu_backend.demo_model.lessons import Lesson, fill_slots, read_lessons, read_slots
from gpu_backend.demo_model.phrasing import vary
from gpu_backend.demo_model.tokenizer import BOS, END, PAD, save_tokenizer, train_tokenizer

CONTEXT = 1024
VOCABULARY = 3072
THREADS = 2
SEED = 20

_ROPE_THETA = 10000.0
_CONFIG_KEYS = frozenset(
    "attention_bias bos_token_id eos_token_id head_dim hidden_act hidden_size intermediate_size max_position_embeddings "
    "mlp_bias model_type num_attention_heads num_hidden_layers num_key_value_heads pad_token_id rms_norm_eps "
    "rope_parameters tie_word_embeddings use_cache vocab_size".split()
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to learn."""

    steps: int = 2400
    batch_tokens: int = 3072  # padding included
    pool: int = 1024  # examples sorted by length at a time, so that batches hold little padding
    peak_rate: float = 3e-3
    last_rate: float = 1e-4
    warmup: int = 100
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True)
class Batch:
    """``targets`` is -100 where nothing is to be learnt; both are (rows, longest)."""

    inputs: torch.Tensor
    targets: torch.Tensor


def main() -> None:
    """Read the lessons, fit the tokenizer, train, save, measure."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--steps", type=int, default=Plan().steps)
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    plan = Plan(steps=arguments.steps)
    lessons, slots = read_lessons(), read_slots()
    tokenizer = train_tokenizer(_tokenizer_texts(lessons, slots), VOCABULARY)
    model = LlamaForCausalLM(_config(tokenizer))
    print(f"{len(lessons)} lessons, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    started = time.monotonic()
    train(model, _batches(Composer(lessons, slots, tokenizer, CONTEXT, SEED), plan), plan)
    minutes = (time.monotonic() - started) / 60
    model.bfloat16().float()  # what is measured below is what is saved
    save(model, tokenizer, arguments.out)
    _measure(model, tokenizer, lessons, slots, minutes, arguments.out)


def train(model: LlamaForCausalLM, batches: Iterator[Batch], plan: Plan) -> None:
    """Adjust ``model`` in place: AdamW, a linear warm-up, then a cosine to the last rate."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.peak_rate, betas=(0.9, 0.98), fused=True)
    model.train()
    started, tokens, recent = time.monotonic(), 0, 0.0  # recent: the sum of the last losses
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, plan)
        batch = next(batches)
        loss = _loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += batch.inputs.numel()
        recent += loss.item()
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - started
            print(
                f"step {step + 1:5d}  loss {recent / 50:.4f}  {tokens / seconds:.0f} tokens/s  {seconds:.0f} s",
                flush=True,
            )
            recent = 0.0


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder with bfloat16 weights; the output layer is the embedding, so it is not stored."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.to(torch.bfloat16) for name, w in model.state_dict().items() if name != "lm_head.weight"}
    (folder / "model.safetensors").write_bytes(serialize(weights, metadata={"format": "pt"}))
    config = {name: value for name, value in model.config.to_dict().items() if name in _CONFIG_KEYS}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "rope_theta": _ROPE_THETA}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    generation["pad_token_id"] = config["pad_token_id"]
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder, CONTEXT)


def _config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_theta=_ROPE_THETA,
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


def _rate(step: int, plan: Plan) -> float:
    if step < plan.warmup:
        return plan.peak_rate * (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.last_rate + (plan.peak_rate - plan.last_rate) * (1 + math.cos(math.pi * done)) / 2


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


def _tokenizer_texts(lessons: list[Lesson], slots: dict[str, list[str]]) -> Iterator[str]:
    """What the tokenizer is fitted to: the answers, and the questions as people type them; nothing held out."""
    rng = random.Random(SEED)
    for lesson in lessons:
        yield from [lesson.answer] * 3
        for question in (*lesson.questions, *lesson.follow_ups):
            yield from (vary(fill_slots(question, slots, rng), rng) for _ in range(4))


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
        if name.startswith("held-out phrasings") or name.startswith("held-out off"):
            print(*(f"  missed {line}" for line in score.missed), sep="\n")
    (folder.parent / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
