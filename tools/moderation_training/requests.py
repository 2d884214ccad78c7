# Fits what finds attacks and requests for harm: by the words of a text, linear, and by the vector that the sentence
# encoder has for it, by small networks. Sources count alike but for a root; the operating points are of rows and
# families that a model has not seen. The moderation heads of the artefact (fit.py) stay; the encoder is added to "any".
#   python -m tools.moderation_training.requests --data DATA --out gateway/moderation/classifier/artifacts

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from scipy.sparse import csr_matrix, diags  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.neural_network import MLPClassifier

from gateway.moderation.classifier.classifier import (
    ANY,
    FORMAT,
    MANIFEST,
    NEAR,
    NEAR_BY_WORDS,
    WEIGHTS,
    Classifier,
    readings,
)
from gateway.moderation.classifier.features import WORDS_AT_LEAST
from gateway.moderation.classifier.plain import visible
from gateway.moderation.classifier.surprise import Surprise
from gateway.moderation.reading.encoder import DIMENSIONS, load_encoder
from router.complexity.artifact import Arrays, read_artifact, write_artifact
from tools.moderation_training.dataset import (
    EVERYDAY,
    IN_LANGUAGES,
    MORE_SOURCES,
    OURS,
    TO_MODERATE,
    WORK,
    Examples,
    Task,
    read_examples,
)
from tools.moderation_training.families import ALWAYS, ATTACKS, FOLDS, folds_of, passing
from tools.moderation_training.fit import MODERATION, OTHERS_COUNT, OURS_COUNT, SURGE, SURGE_COUNTS
from tools.moderation_training.suffixes import fitted_rows
from tools.moderation_training.windows import windows_of

SEED = 20269
MOST_WINDOWS = 4  # of one text, in the fit
EVEN = 0.5  # 0: each row counts alike; 1: each source does, however many rows it has
OURS_PASSES = 3.0  # times which the words of a prompt count that was written to pass: most sound like what does not
FIRMNESS = 2.0  # times which a head's sum is served: a text to moderate is seldom an attack or a request for harm


class Recipe(Struct, frozen=True):
    """How a head is fitted, and what of hard benign prompts, everyday ones and documents it may flag."""

    wanted: Task
    passes: tuple[Task, ...]  # of the rows that it is shown, those that are not to be found
    c: float  # of the words: scikit-learn's, the inverse of the penalty; 0: the words stay as the artefact has them
    alpha: float  # of the networks: the penalty of large weights
    rounds: int  # over all texts
    read: float  # what the networks count beside the words, each in standard deviations of everyday prompts
    may_flag: tuple[float, float, float]
    hidden: int = 48  # units of a network
    networks: int = 3  # whose mean is served


RECIPES = {
    "attack": Recipe("attack", ("benign", "everyday", "keeps"), 30.0, 5.0, 12, 0.7, (0.0165, 0.005, 0.006)),
    "harm": Recipe("harm", ("benign", "everyday", "keeps"), 300.0, 1.0, 25, 1.2, (0.028, 0.005, 0.002)),
    "any": Recipe("breaks", ("benign", "everyday", "keeps"), 0.0, 10.0, 10, 1.0, (0.002, 0.0005, 0.0005), 16, 1),
}

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Linear(Struct, frozen=True):
    """A linear head on words."""

    weights: Floats  # (buckets,)
    bias: float


class Net(Struct, frozen=True):
    """The mean of some networks with one hidden layer, on the encoder's vectors."""

    into: Floats  # (dimensions, hidden)
    bias: Floats  # (hidden,)
    out: Floats  # (hidden,)
    at: float

    def __call__(self, vectors: npt.NDArray) -> Floats:
        said: Floats = np.maximum(vectors @ self.into + self.bias, 0) @ self.out + self.at
        return said


class Read(Struct, frozen=True):
    """What the heads see of the windows of some texts."""

    owner: Ints  # (windows,)
    words: csr_matrix  # (windows, buckets), TF-IDF, shortened as serving does
    idf: Floats  # (buckets,)
    vectors: npt.NDArray[np.float32]  # (windows, dimensions)
    moderation: Floats  # (windows,): the logit of "any" by the artefact that is there


class Said(Struct, frozen=True):
    """What heads say of texts that their fits did not see, (texts,) by the head's name."""

    words: dict[str, Floats]
    read: dict[str, Floats]


def read_windows(examples: Examples, served: Classifier, kept: Path | None) -> Read:
    """Read the first windows of every text; ``kept``: a file for the encoder's vectors, from one run to another."""
    windows = windows_of(examples.texts).first(MOST_WINDOWS)
    tfidf = TfidfTransformer(sublinear_tf=True, norm=None)
    tfidf.fit(windows.words[~_is_more(examples, windows.owner)])
    words = shortened(tfidf.transform(windows.words)).astype(np.float32)
    said = [one for text in examples.texts for one in readings(text)[:MOST_WINDOWS]]
    vectors = _vectors_of(said, kept)
    moderation = np.array([served.logits(one)[ANY] for one in said], np.float64)
    return Read(windows.owner, words, tfidf.idf_, vectors, moderation)


def shortened(counted: csr_matrix) -> csr_matrix:
    """Divide each row by its length and ``WORDS_AT_LEAST``, as serving does."""
    squares = np.asarray(counted.multiply(counted).sum(axis=1)).ravel()
    return (diags(1 / np.sqrt(squares + WORDS_AT_LEAST**2)) @ counted).tocsr()


def _vectors_of(texts: list[str], kept: Path | None) -> npt.NDArray[np.float32]:
    """Return the encoder's vectors, those that are kept already from the file."""
    names = np.array([blake2b(text.encode("utf-8", "replace"), digest_size=8).digest() for text in texts]).view(
        np.uint64
    )
    known, vectors = np.zeros(0, np.uint64), np.zeros((0, DIMENSIONS), np.float32)
    if kept is not None and kept.exists():
        with np.load(kept) as arrays:
            known, vectors = arrays["names"], arrays["vectors"]
    fresh = np.flatnonzero(~np.isin(names, known))
    if len(fresh):
        vectors = np.vstack([vectors, load_encoder()([texts[row] for row in fresh])])
        known, first = np.unique(np.concatenate([known, names[fresh]]), return_index=True)
        vectors = vectors[first]
        if kept is not None:
            np.savez(kept, names=known, vectors=vectors)
    found: npt.NDArray[np.float32] = vectors[np.searchsorted(known, names)]
    return found


def fit_words(examples: Examples, read: Read, rows: Flags, name: str) -> Linear:
    """Fit a head on the words of these rows."""
    kept, wanted, weight = _shown(examples, read, rows & ~_is_more(examples), name)
    ours = np.isin(examples.source, OURS)[read.owner[kept]]
    weight[ours & ~wanted] *= OURS_PASSES
    model = LogisticRegression(C=RECIPES[name].c, max_iter=500, tol=1e-6)
    model.fit(read.words[kept], wanted, sample_weight=weight)
    return Linear(model.coef_[0].astype(np.float64), float(model.intercept_[0]))


def fit_net(examples: Examples, read: Read, rows: Flags, name: str) -> Net:
    """Fit a head's networks on the vectors of these rows."""
    kept, wanted, weight = _shown(examples, read, rows if name == "harm" else rows & ~_is_more(examples), name)
    usual = read.vectors[~_is_more(examples, read.owner)]
    recipe, middle, spread = RECIPES[name], usual.mean(axis=0), float(usual.std())
    seen, nets = (read.vectors[kept] - middle) / spread, []
    for seed in range(SEED, SEED + recipe.networks):
        net = MLPClassifier(
            (recipe.hidden,),
            alpha=recipe.alpha,
            max_iter=recipe.rounds,
            batch_size=256,
            learning_rate_init=0.002,
            random_state=seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it stops after its rounds
            nets.append(net.fit(seen, wanted, sample_weight=weight))
    into = np.hstack([net.coefs_[0] for net in nets]).astype(np.float64) / spread
    bias = np.concatenate([net.intercepts_[0] for net in nets]) - middle @ into
    out = np.concatenate([net.coefs_[1][:, 0] for net in nets]) / len(nets)
    return Net(into, bias, out, float(np.mean([net.intercepts_[1][0] for net in nets])))


def said_unseen(examples: Examples, read: Read) -> Said:
    """Return what each head says of each text by models that saw nothing of its family; NaN where every model did."""
    folds = folds_of(examples)
    said = Said(*({name: np.full(len(examples), np.nan) for name in RECIPES} for _ in range(2)))
    said.words["any"][:] = _highest(examples, read, np.arange(len(read.owner)), read.moderation)
    for fold in range(len(FOLDS)):
        rest, judged = folds != fold, np.flatnonzero((folds == fold)[read.owner])
        for name, recipe in RECIPES.items():
            if recipe.c:
                head = fit_words(examples, read, rest, name)
                found = _highest(examples, read, judged, read.words[judged] @ head.weights + head.bias)
                said.words[name][folds == fold] = found[folds == fold]
            found = _highest(examples, read, judged, fit_net(examples, read, rest, name)(read.vectors[judged]))
            said.read[name][folds == fold] = found[folds == fold]
    return said


class Points(Struct, frozen=True):
    """How a head's parts are weighed and from where on it counts, with the encoder and without."""

    lean: float
    read: float
    point: float  # of both together
    alone: float  # of the words


def points_of(examples: Examples, said: Said, name: str) -> Points:
    """Return a head's weights and operating points by rows that its models did not see."""
    recipe = RECIPES[name]
    words, read = said.words[name], said.read[name]
    hard, everyday, documents = passing(examples)
    like = np.isin(examples.source, (MODERATION, SURGE)) if name == "any" else everyday
    lean, by_read = 1 / float(np.nanstd(words[like])), recipe.read / float(np.nanstd(read[like]))

    def least(scores: Floats) -> float:
        kinds = zip((hard, everyday, documents), recipe.may_flag, strict=True)
        return max(float(np.nanquantile(scores[kind], 1 - share)) for kind, share in kinds)

    return Points(lean, by_read, least(lean * words + by_read * read), least(words))


def served_logits(said: Said, points: dict[str, Points], *, reads: bool) -> dict[str, Floats]:
    """Return what a gateway has for each text, above 0 a finding; ``reads``: with the encoder."""
    logits = {}
    for name, one in points.items():
        both = one.lean * said.words[name] + one.read * said.read[name] - one.point
        logits[name] = both if reads else one.lean * (said.words[name] - one.alone)
    return logits


def _shown(examples: Examples, read: Read, rows: Flags, name: str) -> tuple[Ints, Flags, Floats]:
    """Return the windows that a head is shown, which are to be found, and what each counts: its share of its text,
    sources evened by a root (of the two moderation sets as in fit.py), both answers alike."""
    recipe = RECIPES[name]
    wanted = examples.task == recipe.wanted
    shown = rows & examples.may_be_fitted & (wanted | np.isin(examples.task, recipe.passes))
    if name == "any":
        shown &= ~np.isin(examples.source, (WORK, *IN_LANGUAGES))
    kept = np.flatnonzero(shown[read.owner])
    owner = read.owner[kept]
    weight = 1 / np.bincount(read.owner, minlength=len(examples))[owner]
    if name == "any":
        is_other = ~np.isin(examples.task, ("breaks", "keeps"))
        counts = np.where(is_other, OTHERS_COUNT, np.where(examples.source == SURGE, SURGE_COUNTS, 1.0))
        weight *= np.where(examples.source == TO_MODERATE, OURS_COUNT, counts)[owner]
    else:
        _, kind = np.unique(np.char.add(examples.source, np.where(wanted, "+", "-"))[owner], return_inverse=True)
        weight *= np.bincount(kind, weight)[kind] ** -EVEN
    weight[wanted[owner]] *= weight[~wanted[owner]].sum() / weight[wanted[owner]].sum()
    return kept, wanted[owner], weight / weight.mean()


def _is_more(examples: Examples, owner: Ints | slice = slice(None)) -> Flags:
    """Which rows, or windows with these owners, are of the sources that only the networks of "harm" are shown."""
    found: Flags = np.isin(examples.source, MORE_SOURCES)[owner]
    return found


def _highest(examples: Examples, read: Read, windows: Ints, said: Floats) -> Floats:
    """Return (texts,): the highest of any of these windows of each text."""
    found = np.full(len(examples), -np.inf)
    np.maximum.at(found, read.owner[windows], said)
    return found


def report_lines(examples: Examples, said: Said, form: Floats, seen: Flags) -> Iterator[str]:
    """Yield the tables of what is flagged by models that never saw a family: by words alone, which is plain TF-IDF, and
    as it is served. ``form``: (texts,) what the form of each says, by a model that saw none of the attacks; what it
    adds to rows that must pass and that it has ``seen`` is taken to be what it adds to the others."""
    points = {name: points_of(examples, said, name) for name in RECIPES}
    columns = []
    for reads, by_form in ((False, False), (False, True), (True, True)):
        logits = served_logits(said, points, reads=reads)
        near = FIRMNESS * np.maximum(logits["attack"], logits["harm"]) > (-NEAR if reads else -NEAR_BY_WORDS)
        found = np.max([logits["attack"], logits["harm"], logits["any"]], axis=0) > 0
        columns.append((found, near & (form > 0) & ~found & by_form))
    yield "| flagged | rows | words alone | words and form | with the encoder |"
    yield "|---|---|---|---|---|"

    def shares_of(part: Flags) -> Floats:
        fresh = part & ~seen if (part & ~seen).any() else part
        return np.array([found[part].mean() + besides[fresh].mean() for found, besides in columns])

    def row(name: str, parts: list[Flags]) -> str:
        shares = np.mean([shares_of(part) for part in parts], axis=0)
        return f"| {name} | {sum(int(part.sum()) for part in parts)} | " + " | ".join(f"{x:.3f}" for x in shares) + " |"

    unseen = folds_of(examples) != ALWAYS
    attacks, harm = unseen & (examples.task == "attack"), unseen & (examples.task == "harm")
    families = {
        name: [attacks & (examples.source == source) for source in sources] for name, sources in ATTACKS.items()
    }
    means = np.mean([np.mean([*map(shares_of, parts)], axis=0) for parts in families.values()], axis=0)
    cells = " | ".join(f"{mean:.3f}" for mean in means)
    yield f"| **attacks, mean over families** | {attacks.sum()} | {cells} |"
    for name, parts in families.items():
        yield row(f"attacks: {name}", parts)
    by_source = {source: harm & (examples.source == source) for source in np.unique(examples.source[harm])}
    yield row("**harm, mean over sources**", list(by_source.values()))
    before = [part for source, part in by_source.items() if source not in MORE_SOURCES]
    yield row("harm, mean over the sources of the data files alone", before)
    for source, part in by_source.items():
        yield row(f"harm: {source}", [part])
    yield from (row(f"harm in CatQA: {script}", [part]) for script, part in _scripts(examples, by_source["catqa"]))
    for name, part in zip(("hard benign", "everyday", "documents"), passing(examples), strict=True):
        yield row(f"**{name}**", [part])
        for source in np.unique(examples.source[part]) if name != "everyday" else EVERYDAY:
            yield row(f"{name}: {source}", [part & (examples.source == source)])
    yield row("harmless beside safety_rbr", [(examples.source == "safety_rbr") & (examples.task == "benign")])
    for source in (MODERATION, SURGE):
        yield _auprc_row(examples, said, points, source)
        for task in ("breaks", "keeps"):
            yield row(f"{source}, {task} the policy", [(examples.source == source) & (examples.task == task)])


def _auprc_row(examples: Examples, said: Said, points: dict[str, Points], source: str) -> str:
    """Return how texts to moderate are ranked by their worst category and by "any" alone, whose part of the words has
    seen them."""
    rows, cells = examples.source == source, []
    for reads in (False, False, True):
        logits = served_logits(said, points, reads=reads)
        worst = np.max([FIRMNESS * logits["attack"], FIRMNESS * logits["harm"], logits["any"]], axis=0)
        ranked = [average_precision_score(examples.task[rows] == "breaks", by[rows]) for by in (worst, logits["any"])]
        cells.append(" / ".join(f"{one:.3f}" for one in ranked))
    return f"| {source}, AUPRC by the worst category / by any | {rows.sum()} | {' | '.join(cells)} |"


def _scripts(examples: Examples, rows: Flags) -> Iterator[tuple[str, Flags]]:
    """Yield the rows of a set of three languages by these."""
    chinese = np.array([any("\u4e00" <= sign <= "\u9fff" for sign in text) for text in examples.texts])
    ascii_only = np.array([text.isascii() for text in examples.texts])
    yield "Chinese", rows & chinese
    yield "Vietnamese", rows & ~chinese & ~ascii_only
    yield "English", rows & ascii_only


def with_heads(kept: Arrays, fitted: Arrays, names: list[str]) -> Arrays:
    """Return the arrays of the artefact with these heads as they are ``fitted`` anew, the others as they are kept."""
    merged = dict(fitted)
    ends = np.cumsum([recipe.hidden * recipe.networks for recipe in RECIPES.values()])
    for place, (name, recipe) in enumerate(RECIPES.items()):
        if name in names:
            continue
        last = int(ends[place])
        units = slice(last - recipe.hidden * recipe.networks, last)
        for array in ("bias", "read_bias"):
            merged[array] = merged[array].copy()
            merged[array][place] = kept[array][place]
        for array in ("read_hidden", "read_out"):
            merged[array] = merged[array].copy()
            merged[array][units] = kept[array][units]
        for array, column in (("read_in", units), ("words", slice(place, place + 1 if recipe.c else place))):
            merged[array] = merged[array].copy()
            merged[array][:, column] = kept[array][:, column]
    return merged


def weights_of(examples: Examples, read: Read, said: Said, kept: Arrays) -> Arrays:
    """Fit all heads on all rows, and return the arrays of the artefact with them; the others are ``kept``."""
    every, points = np.ones(len(examples), bool), {name: points_of(examples, said, name) for name in RECIPES}
    nets = {name: fit_net(examples, read, every, name) for name in RECIPES}
    words = {name: fit_words(examples, read, every, name) for name, recipe in RECIPES.items() if recipe.c}
    bias, read_bias, outs = kept["bias"].astype(np.float64), np.zeros(len(RECIPES)), []
    for place, (name, net) in enumerate(nets.items()):
        one = points[name]
        scale = FIRMNESS if name in words else 1 / one.lean  # of "any" what the words say stays as it was
        if name in words:
            bias[place] = scale * one.lean * (words[name].bias - one.alone)
        by_words = one.lean * (words[name].bias if name in words else float(kept["bias"][place]))
        read_bias[place] = scale * (by_words + one.read * net.at - one.point)
        out = np.zeros((len(net.out), len(RECIPES)))
        out[:, place] = scale * one.read * net.out
        outs.append(out)
    heads = [FIRMNESS * points[name].lean * head.weights for name, head in words.items()]
    return kept | {
        "idf": read.idf.astype(np.float16),
        "words": np.vstack(heads).T.astype(np.float16),
        "bias": bias.astype(np.float32),
        "read_in": np.hstack([net.into for net in nets.values()]).astype(np.float16),
        "read_hidden": np.concatenate([net.bias for net in nets.values()]).astype(np.float32),
        "read_out": np.vstack(outs).astype(np.float32),
        "read_bias": read_bias.astype(np.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit and judge what finds attacks and requests for harm.")
    parser.add_argument("--data", type=Path, required=True, help="folder with safety/ and routing/")
    parser.add_argument("--out", type=Path, required=True, help="folder of the artefact, whose other heads stay")
    parser.add_argument("--vectors", type=Path, help="file in which the encoder's vectors are kept between runs")
    parser.add_argument("--no-fit", action="store_true", help="only judge")
    parser.add_argument("--heads", nargs="+", choices=[*RECIPES], default=[*RECIPES], help="fit these, keep the others")
    arguments = parser.parse_args()
    weights, manifest = arguments.out / WEIGHTS, arguments.out / MANIFEST
    kept, stated = read_artifact(weights, manifest, FORMAT), json.loads(manifest.read_text())
    examples = read_examples(arguments.data, more=True)
    read = read_windows(examples, Classifier(kept), arguments.vectors)
    said = said_unseen(examples, read)
    surprise = Surprise(kept)
    form = np.array([surprise.logit(visible(text)) for text in examples.texts])
    print("\n".join(report_lines(examples, said, form, fitted_rows(examples))), flush=True)
    if not arguments.no_fit:
        fitted = with_heads(kept, weights_of(examples, read, said, kept), arguments.heads)
        rows = int(examples.may_be_fitted.sum())
        facts = {name: value for name, value in stated.items() if name not in ("format", "sha256")}
        write_artifact(weights, manifest, FORMAT, fitted, {**facts, "rows": rows, "requests_seed": SEED})
        print(f"fitted on {rows} rows; wrote {WEIGHTS} and {MANIFEST} to {arguments.out}")


if __name__ == "__main__":
    main()
