# What a step should cost on a card, kernel by kernel, before there is one: bytes over bandwidth or operations over the
# matrix rate, whichever takes longer, and so much for each launch. The workloads that have a goal are played through
# with that, so that on the card's day what is predicted stands beside what is measured. Predicted, not measured.
#
#   python -m benchmarks.predicted               prints the tables
#   python -m benchmarks.predicted --out FOLDER  writes predicted-h200.md there, too

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.driving import percentile
from benchmarks.engine_rows import MODEL, PUBLISHED, PUBLISHED_SECONDS, RATES, paced_workload
from benchmarks.roofline import DATASHEETS, LARGE, MIXTURES, SHAPES, Request, least_seconds, shared_workload
from gpu_backend.kernels.layout.paged import choose_splits
from gpu_backend.kernels.ops import SMALL_BATCH_ROWS
from gpu_backend.models.config.model import ModelConfig, parse_model_config

CARD = DATASHEETS["NVIDIA H200"]
MEMORY = 0.9 * 149e9  # bytes that the engine takes of it
GOALS = {"Qwen3-0.6B": 29_500.0, "Llama-3.1-8B": 10_800.0, "Qwen3-14B": 6_900.0}  # output tokens/s
AROUND = (
    14  # launches of a decode beside its layers: rows, embedding, two tables, last norm, head, draw, counts, copies
)
PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Reached:
    """What shares of the datasheet are taken to be reached, and what a launch costs beside its bytes."""

    weights: float  # of the bandwidth, in products of small batches
    keys: float  # of the bandwidth, in attention of decodes
    products: float  # of the matrix rate, in products of large ones
    prompts: float  # of the matrix rate, in attention of prompts
    launch: float  # seconds: its beginning and its end, in which the memory is not busy


BEST = Reached(1.0, 1.0, 1.0, 1.0, 0.0)
# A large copy reaches about nine tenths. vLLM's attention reads keys at 0.895 of an H100 (field measurements), Triton's
# is within 4 % of that; cuBLAS reaches 0.65 to 0.75 in bf16, plain Triton attention 0.41 to 0.49. A launch within a
# graph: about 1 µs between two kernels, and as much for the first bytes to come.
TAKEN = Reached(0.88, 0.82, 0.68, 0.42, 1.8e-6)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model at a precision: what a step of it reads, multiplies and launches."""

    model: ModelConfig
    fp8: bool = False
    reached: Reached = TAKEN

    def seconds(self, decodes: int, context: int, prompt: int = 0, pairs: int = 0) -> Counter[str]:
        """Return the seconds of a step by what takes them.

        It has so many decodes with so many tokens of ``context`` together, and so many tokens of prompts, whose queries
        look at ``pairs`` keys together.
        """
        model, reached, width = self.model, self.reached, 1 if self.fp8 else 2
        rate = (CARD.fp8_flops if self.fp8 else CARD.flops) * reached.products
        rows, head = decodes + prompt, model.vocab_size * model.hidden_size
        layers = model.products_per_token - head
        reading = width * model.weights_read(rows) / (CARD.bandwidth * reached.weights)
        multiplying = 2 * layers * rows / rate
        spent = Counter({"weights" if reading > multiplying else "products": max(reading, multiplying)})
        sampled = max(1, decodes)
        spent["head and draw"] = max(
            2 * head / (CARD.bandwidth * reached.weights), 2 * head * sampled / (CARD.flops * reached.products)
        )
        spent["head and draw"] += 6 * sampled * model.vocab_size / CARD.bandwidth  # written once, read twice
        spent["keys"] = width * model.kv_floats_per_token * context / (CARD.bandwidth * reached.keys)
        spent["prompts' attention"] = (
            4 * model.num_layers * model.num_heads * model.head_dim * pairs / (CARD.flops * reached.prompts)
        )
        inner = 3 * model.intermediate_size
        if model.experts is not None:  # inner rows and parts, for each of a token's experts
            inner = model.experts.per_token * (2 * model.experts.intermediate_size + 3 * model.hidden_size)
        between = 2 * rows * (8 * model.hidden_size + inner) * model.num_layers
        spent["between products"] = between / (CARD.bandwidth * reached.weights)
        spent["launches"] = reached.launch * self.launches(decodes, context, prompt)
        return spent

    def launches(self, decodes: int, context: int, prompt: int = 0) -> int:
        """Return how many kernels a step launches."""
        model, few = self.model, decodes + prompt <= SMALL_BATCH_ROWS
        longest = 2 * context // max(1, decodes)
        split = choose_splits(model.num_heads // model.num_kv_heads, decodes, model.num_kv_heads, longest, PROCESSORS)
        attention = (1 + (split > 1)) * (decodes > 0) + (prompt > 0)
        layer = 4 + 1 + attention + (0 if few else 3 + 4 * self.fp8)  # products, rope and store, …
        if model.experts is not None:  # router, choice, two to sort the pairs, the sum; a norm, but no SiLU
            layer += 6 if few else 4
        return layer * model.num_layers + AROUND


@dataclass(slots=True)
class Played:
    """What came of a workload that was played through."""

    seconds: float = 0.0
    made: int = 0
    spent: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)  # of each reply for its first token
    gaps: list[float] = field(default_factory=list)  # steps of decodes, once for each reply in them


def play(shape: Shape, requests: Sequence[Request], places: int, budget: int, arrivals: Sequence[float] = ()) -> Played:
    """Play requests through steps as the engine plans them: decodes first, then chunks of prompts, all in a row."""
    arrivals = arrivals or (0.0,) * len(requests)
    room = MEMORY - _weight_bytes(shape)
    most = int(room / ((1 if shape.fp8 else 2) * shape.model.kv_floats_per_token))
    played, waiting = Played(), 0
    prefills: list[list[int]] = []  # request, tokens of its prompt that are computed
    decodes: list[list[int]] = []  # request, tokens that it has made
    held = 0
    while waiting < len(requests) or prefills or decodes:
        while waiting < len(requests) and arrivals[waiting] <= played.seconds:
            whole = len(requests[waiting].prompt) + requests[waiting].output
            if len(prefills) + len(decodes) >= places or held + whole > most:
                break
            held += whole
            prefills.append([waiting, 0])
            waiting += 1
        if not prefills and not decodes:
            played.seconds = max(played.seconds, arrivals[waiting])
            continue
        context = sum(len(requests[number].prompt) + made for number, made in decodes)
        left, prompt, pairs, ended = budget - len(decodes), 0, 0, 0
        for row in prefills:
            count = min(left, len(requests[row[0]].prompt) - row[1])
            pairs += count * row[1] + count * count // 2
            row[1] += count
            prompt, left = prompt + count, left - count
            ended += row[1] == len(requests[row[0]].prompt)
            if not left:
                break
        spent = shape.seconds(len(decodes), context, prompt, pairs)
        step = sum(spent.values())
        played.spent += spent
        played.seconds += step
        played.made += len(decodes) + ended
        played.gaps += [step] * len(decodes)
        for row in decodes:
            row[1] += 1
        for row in prefills[:ended]:
            played.waits.append(played.seconds - arrivals[row[0]])
            decodes.append([row[0], 1])
        prefills = prefills[ended:]
        for row in [row for row in decodes if row[1] >= requests[row[0]].output]:
            held -= len(requests[row[0]].prompt) + requests[row[0]].output
        decodes = [row for row in decodes if row[1] < requests[row[0]].output]
    return played


def main() -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted")
    parser.add_argument("--out", type=Path, help="folder for predicted-h200.md")
    parser.add_argument("--tiny", action="store_true", help="only what takes no time to reckon")
    parser.add_argument("--seconds", type=float, help="it takes some, whatever is said")
    arguments = parser.parse_args()
    tables = [one_reply_rows, mixture_rows]
    if not arguments.tiny:
        tables = [shared_rows, *tables, paced_rows, published_rows]
    lines = [*_header(), *(line for table in tables for line in (*table(), ""))][:-1]
    print("\n".join(lines))
    if arguments.out:
        (arguments.out / "predicted-h200.md").write_text("\n".join(lines) + "\n")


def shared_rows() -> Iterator[str]:
    """The benchmark that several engines publish, at each shape with a goal."""
    yield "| 256 sequences, bf16 | goal, tokens/s | roofline | predicted | of the goal | where its time goes |"
    yield "| --- | --: | --: | --: | --: | --- |"
    workload = shared_workload()
    for name, goal in GOALS.items():
        least = least_seconds(SHAPES[name], [(len(r.prompt), r.output) for r in workload], CARD)
        played = play(Shape(parse_model_config(SHAPES[name])), workload, 256, 8192)
        rate, most = played.made / played.seconds, sum(r.output for r in workload) / least
        yield f"| {name} | {goal:,.0f} | {most:,.0f} | {rate:,.0f} | {rate / goal:.0%} | {_shares(played)} |"


def one_reply_rows() -> Iterator[str]:
    """One reply at the shape of 8B: what is left for launches where 85 % of the bandwidth are the goal."""
    yield (
        "| one reply, 560 tokens of context | bytes | at the datasheet, ms | at 85 % | launches | left for each, µs "
        "| predicted, ms | of the bandwidth |"
    )
    yield "| --- | --: | --: | --: | --: | --: | --: | --: |"
    for name in GOALS:
        for fp8 in (False, True):
            best, taken = (Shape(parse_model_config(SHAPES[name]), fp8, some) for some in (BEST, TAKEN))
            least = sum(best.seconds(1, 560).values())
            step, count = sum(taken.seconds(1, 560).values()), taken.launches(1, 560)
            yield (
                f"| {name}{', fp8' * fp8} | {least * CARD.bandwidth / 1e9:.2f} GB | {1e3 * least:.2f} "
                f"| {1e3 * least / 0.85:.2f} | {count} | {1e6 * (least / 0.85 - least) / count:.2f} | {1e3 * step:.2f} "
                f"| {least / step:.0%} |"
            )


def mixture_rows() -> Iterator[str]:
    """Decodes of mixtures of experts: the more there are, the more experts are read, until it is all."""
    yield "| decodes at 560 tokens, bf16 | of | weights read, GB | of all | predicted, ms | tokens/s |"
    yield "| --: | --- | --: | --: | --: | --: |"
    for name, config in MIXTURES.items():
        model = parse_model_config(config)
        for count in (1, 8, 64, 256):
            step, read = sum(Shape(model).seconds(count, 560 * count).values()), model.weights_read(count)
            share, rate = read / model.weights_read(), count / step
            yield f"| {count} | {name} | {2 * read / 1e9:.1f} | {share:.0%} | {1e3 * step:.2f} | {rate:,.0f} |"


def paced_rows() -> Iterator[str]:
    """Requests that arrive by chance at a rate, as `make gpu-rows PART=paced` has them."""
    yield f"| {MODEL}, bf16, requests/s | first token p50, ms | p99 | between tokens p50, ms | p99 | busy |"
    yield "| --: | --: | --: | --: | --: | --: |"
    for rate in RATES:
        requests, arrivals = paced_workload(rate, int(rate * 20))
        played = play(Shape(parse_model_config(SHAPES[MODEL])), requests, 256, 2048, arrivals)
        first, between = ([1e3 * percentile(some, p) for p in (0.5, 0.99)] for some in (played.waits, played.gaps))
        yield (
            f"| {rate:g} | {first[0]:,.0f} | {first[1]:,.0f} | {between[0]:.1f} | {between[1]:.1f} "
            f"| {sum(played.spent.values()) / played.seconds:.0%} |"
        )


def published_rows() -> Iterator[str]:
    """TensorRT-LLM's rows, fp8 and a cache of fp8, as `make gpu-rows PART=published` has them."""
    yield "| fp8, in and out | published, tokens/s | predicted | of published | where its time goes |"
    yield "| --- | --: | --: | --: | --- |"
    for name, rows in PUBLISHED.items():
        for given, asked, rate in rows:
            count = max(8, int(0.5 * PUBLISHED_SECONDS * rate / asked))
            shape = Shape(parse_model_config((SHAPES | LARGE)[name]), fp8=True)
            played = play(shape, [Request((0,) * given, asked)] * count, 1024, 8192)
            own = played.made / played.seconds
            yield f"| {name}, {given} in, {asked} out | {rate:,} | {own:,.0f} | {own / rate:.0%} | {_shares(played)} |"


def _shares(played: Played) -> str:
    return ", ".join(f"{name} {value / played.seconds:.0%}" for name, value in played.spent.most_common(4))


def _weight_bytes(shape: Shape) -> float:
    head = shape.model.vocab_size * shape.model.hidden_size
    layers = (1 if shape.fp8 else 2) * shape.model.weights_read()
    return layers + 2 * head * (1 if shape.model.tie_word_embeddings else 2)


def _header() -> list[str]:
    taken = TAKEN
    return [
        f"# Predicted, not measured: one H200, {datetime.now(UTC):%Y-%m-%d}",
        f"\n`python -m benchmarks.predicted`: a reckoning of bytes, operations and launches, {CARD.bandwidth / 1e12} "
        f"TB/s and {CARD.flops / 1e12:.0f} TFLOP/s by the datasheet. Taken to be reached of them: weights "
        f"{taken.weights:.0%}, keys {taken.keys:.0%}, products {taken.products:.0%}, prompts' attention "
        f"{taken.prompts:.0%}; a launch {1e6 * taken.launch:.1f} µs. None of these has been measured with this engine: "
        "they are what other engines publish. The host is taken to be never in the way.\n",
    ]


if __name__ == "__main__":
    main()
