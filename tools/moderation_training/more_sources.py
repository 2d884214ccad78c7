# Gathers requests for harm, and what only sounds so, from public repositories into a third file beside the two that are
# fitted. A clone of each stands in a folder of its owner; near copies of what only judges are left out.
#   python -m tools.moderation_training.more_sources --clones CLONES --data DATA --judging FILES --out SAFETY_MORE

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sklearn.feature_extraction.text import TfidfVectorizer

from tools.moderation_training.dataset import read_examples

AART = "google-research-datasets/aart-ai-safety-dataset"  # fcdb2a8
SAFEBENCH = "ThuCCSLab/FigStep"  # 0861b17
RULES = "openai/safety-rbr-code-and-data"  # 7f489fa
INTERPRETER = "meta-llama/PurpleLlama"  # 4be64c3
ADVICE = ("Legal Opinion", "Financial Advice", "Health Consultation")  # of SafeBench: asked for every day
LIKE = 0.6  # the cosine of words and pairs from which a text counts as a copy
SHORTEST = 8  # characters

Found = tuple[str, str, str, str]  # text, task, source, licence


def gathered(clones: Path) -> Iterator[Found]:
    """Yield every text of the repositories."""
    for row in _csv(clones / AART / "aart-v1-20231117.csv"):
        yield row["prompt"], "harm", "aart", "CC-BY-4.0"
    for row in _csv(clones / SAFEBENCH / "data/question/safebench.csv"):
        if row["category_name"] not in ADVICE:
            yield row["question"], "harm", "safebench", "MIT"
            yield row["instruction"], "harm", "safebench", "MIT"
    for path in sorted((clones / RULES / "data/rbr_gold_data").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            one = json.loads(line)
            task = "benign" if one["response_type"] == "Comply" else "harm"
            yield one["prompt"][-1]["content"], task, "safety_rbr", "MIT"
    benchmark = clones / INTERPRETER / "CybersecurityBenchmarks/datasets/interpreter/interpreter.json"
    for one in json.loads(benchmark.read_text()):
        yield one["mutated_prompt"], "harm", "purplellama_interpreter", "MIT"


def _csv(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def without_copies(found: Sequence[Found], known: Sequence[str], judging: Sequence[str]) -> list[Found]:
    """Return each text once, those left out that are ``known`` already or near a text that judges."""
    vectors = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2)).fit([*(one[0] for one in found), *judging])
    likeness = vectors.transform([one[0] for one in found]) @ vectors.transform(judging).T
    nearest = likeness.max(axis=1).toarray().ravel()
    seen, kept = {_bare(text) for text in (*known, *judging)}, []
    for one, near in zip(found, nearest, strict=True):
        bare = _bare(one[0])
        if near < LIKE and bare not in seen and len(bare) >= SHORTEST:
            seen.add(bare)
            kept.append((one[0].strip(), *one[1:]))
    return kept


def _bare(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.lower()).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Gather more requests for harm.")
    parser.add_argument("--clones", type=Path, required=True, help="folder of OWNER/NAME, a clone each")
    parser.add_argument("--data", type=Path, required=True, help="folder with safety/ and routing/")
    parser.add_argument("--judging", type=Path, nargs="+", required=True, help="texts that only judge, one a line")
    parser.add_argument("--out", type=Path, required=True, help="the gzipped CSV file, for safety/ of the data folder")
    arguments = parser.parse_args()
    judging = [line for path in arguments.judging for line in path.read_text().splitlines() if line.strip()]
    kept = without_copies(list(gathered(arguments.clones)), read_examples(arguments.data).texts, judging)
    with gzip.open(arguments.out, "wt", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("text", "task", "source", "licence"))
        table.writerows(kept)
    print(f"wrote {len(kept)} texts to {arguments.out}")


if __name__ == "__main__":
    main()
