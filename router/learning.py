# What a team's own compared calls teach beyond the shipped score: a level that follows drift, a slope, and what form
# says of which requests a small model suffices for. Logistic regression, held to the shipped score by its prior. Pure.

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from protocol.inference import Request
from router.complexity.features import read_text, text_of
from router.recalibration import LEAST_COMPARISONS, Comparison

WAVES = 64  # random Fourier features (Rahimi and Recht 2007): requests alike in form are alike in outcome
SEED = 20260  # of their directions, the same for every team
# Standard deviations, in logits, of what is believed before anything is compared; a slope is 1 before.
LEVEL, SLOPE, LINEAR, SMOOTH = 1.0, 0.5, 0.35, 0.6
DRIFT = 1.0  # of that part of the level that comes and goes
LASTING = 400.0  # comparisons after which 1/e of that part is left
BLOCK = 25  # comparisons that have one level
HALF = 300.0  # comparisons after which one counts half
NEWEST = 1_000  # comparisons that are looked at: older ones would count a tenth
FARTHEST = 4.0  # standard deviations of a number of form that count
NEWTON_STEPS = 25
EDGE = 1e-6  # scores are kept this far from 0 and 1

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Learned(Struct, frozen=True):
    """A team's own scores on a route: ready to judge a request by its shipped score and its form."""

    comparisons: int  # that it rests on
    gain: float  # nats a comparison, each foretold by the others: by how much a level alone does worse
    centre: Floats  # (numbers of form,), of what was compared
    scale: Floats  # likewise
    mean: Floats  # (features,), the most probable weights
    root: Floats  # (features, features): root @ root.T is their covariance

    def chances(self, scores: Floats, form: Floats) -> tuple[Floats, Floats]:
        """Return the chances that a small model suffices, and the standard deviations of their logits, (rows,) each.

        ``scores`` are the shipped ones, (rows,), ``form`` their text statistics, (rows, numbers). Each chance is the
        mean of the logistic function over what is believed of its logit, nearly (MacKay 1992).
        """
        logits = _logits(scores)
        features = _features(logits, form, self.centre, self.scale)
        variance = np.square(features @ self.root).sum(1)
        return _sigmoid((logits + features @ self.mean) / np.sqrt(1 + math.pi * variance / 8)), np.sqrt(variance)


def own_scores(comparisons: Sequence[Comparison], version: str) -> bytes | None:
    """Return what a team's comparisons teach, the newest of them first, as ``packed`` has it for this version.

    None where they are too few, or where what form says does not foretell them better than a level alone: then the
    shipped score serves on.
    """
    learned = learned_from(comparisons)
    return None if learned is None or learned.gain <= 0 else packed(learned, version)


def learned_from(comparisons: Sequence[Comparison]) -> Learned | None:
    """Return what comparisons that have a form teach, the newest of them first; None where they are too few."""
    known = [(one.score, one.form, one.suffices) for one in comparisons[:NEWEST] if one.form is not None][::-1]
    if len(known) < LEAST_COMPARISONS:
        return None
    scores, forms, suffices = zip(*known, strict=True)
    form = np.array([np.frombuffer(one, np.float16) for one in forms], np.float64)
    return learn(np.array(scores), form, np.array(suffices))


def packed_form(request: Request) -> bytes | None:
    """Return the text statistics of a request as a comparison keeps them: no word of it. None without a text."""
    text = text_of(request)
    return read_text(text).stats.astype(np.float16).tobytes() if text.strip() else None


def learn(scores: Floats, form: Floats, suffices: Bools) -> Learned:
    """Return what comparisons teach: shipped scores, (rows,), forms, (rows, numbers), and what was found.

    The oldest come first. The most probable weights and their covariance there (Laplace's approximation). The level is
    in part a process that forgets (Ornstein and Uhlenbeck 1930), so that other work than before is soon judged by
    itself.
    """
    scores, form, suffices = scores[-NEWEST:], form[-NEWEST:], suffices[-NEWEST:]
    centre, scale = form.mean(0), form.std(0)
    scale = np.where(scale < 1e-9, 1.0, scale)
    logits = _logits(scores)
    features = _features(logits, form, centre, scale)
    weights, covariance, losses = _fitted(features, logits, suffices)
    counted = _counted(len(scores))
    gain = np.average(_fitted(features[:, :1], logits, suffices)[2] - losses, weights=counted)
    # What serves has the newest level: it adds to the one that stays.
    count = features.shape[1]
    pick = np.eye(count, len(weights))
    pick[0, count] = 1 / LEVEL
    root = np.asarray(np.linalg.cholesky(pick @ covariance @ pick.T + 1e-12 * np.eye(count)), np.float64)
    return Learned(len(scores), float(gain), centre, scale, pick @ weights, root)


def _fitted(features: Floats, offset: Floats, suffices: Bools) -> tuple[Floats, Floats, Floats]:
    """Return the most probable weights of features and levels, their covariance, and how each comparison surprises
    who knows the others, in nats."""
    rows = np.hstack([features, np.eye(-(-len(offset) // BLOCK))[np.arange(len(offset))[::-1] // BLOCK]])
    blocks = np.arange(rows.shape[1] - features.shape[1])
    precision = np.eye(rows.shape[1])
    drift = DRIFT**2 * np.exp(-np.abs(np.subtract.outer(blocks, blocks)) * BLOCK / LASTING)
    precision[-len(blocks) :, -len(blocks) :] = np.linalg.inv(drift)
    weights, counted = np.zeros(rows.shape[1]), _counted(len(offset))
    for _ in range(NEWTON_STEPS):
        chances = _sigmoid(offset + rows @ weights)
        curvature = counted * chances * (1 - chances)
        hessian = (rows.T * curvature) @ rows + precision
        step = np.linalg.solve(hessian, rows.T @ (counted * (suffices - chances)) - precision @ weights)
        weights = weights + step * min(1.0, 4.0 / max(EDGE, float(np.abs(rows @ step).max())))
        if float(np.abs(step).max()) < 1e-5:
            break
    covariance = np.asarray(np.linalg.inv(hessian), np.float64)
    variance = ((rows @ covariance) * rows).sum(1)
    # Each logit without its own comparison (Vehtari and others 2016, section 3.3).
    without = 1 / np.maximum(1 / variance - curvature, EDGE)
    left_out = offset + rows @ weights - without * counted * (suffices - chances)
    said = _sigmoid(left_out / np.sqrt(1 + math.pi * without / 8))
    losses: Floats = -np.log(np.where(suffices, said, 1 - said))
    return weights, covariance, losses


def _features(logits: Floats, form: Floats, centre: Floats, scale: Floats) -> Floats:
    """Return what is weighed, each as large as is believed of its weight: (rows, 2 + numbers + waves)."""
    numbers = np.clip((form - centre) / scale, -FARTHEST, FARTHEST)
    count = numbers.shape[1]
    directions, phases = _waves(count)
    features = np.empty((len(logits), 2 + count + WAVES))
    features[:, 0] = LEVEL
    features[:, 1] = SLOPE * (logits - 1)  # a score is 0.73 there, about the mean of all
    features[:, 2 : 2 + count] = LINEAR / math.sqrt(count) * numbers
    features[:, 2 + count :] = SMOOTH * math.sqrt(2 / WAVES) * np.cos(numbers @ directions + phases)
    return features


@lru_cache(maxsize=1)
def _waves(numbers: int) -> tuple[Floats, Floats]:
    dice = np.random.default_rng(SEED)
    return dice.normal(size=(numbers, WAVES)) / math.sqrt(numbers), dice.uniform(0, 2 * math.pi, WAVES)


def _counted(comparisons: int) -> Floats:
    counted: Floats = 0.5 ** (np.arange(comparisons)[::-1] / HALF)
    return counted


def _logits(scores: Floats) -> Floats:
    kept = np.clip(scores, EDGE, 1 - EDGE)
    logits: Floats = np.log(kept / (1 - kept))
    return logits


def _sigmoid(logits: Floats) -> Floats:
    chances: Floats = 0.5 + np.tanh(logits / 2) / 2
    return chances


class _Packed(Struct, array_like=True):
    version: str  # of the complexity model whose scores were compared
    comparisons: int
    gain: float
    vectors: bytes  # centre, scale and mean, float32
    root: bytes  # what is not above its diagonal, float16


def packed(learned: Learned, version: str) -> bytes:
    """Return what was learned of the scores of one ``version``, in some 17 kB."""
    vectors = np.concatenate([learned.centre, learned.scale, learned.mean]).astype(np.float32)
    root = learned.root[np.tril_indices(len(learned.mean))].astype(np.float16)
    of = learned.comparisons, learned.gain, vectors.tobytes(), root.tobytes()
    return msgspec.msgpack.encode(_Packed(version, *of))


def unpacked(data: bytes, version: str) -> Learned | None:
    """Return what ``packed`` holds; None where it was learned of scores of another version."""
    found = msgspec.msgpack.decode(data, type=_Packed)
    if found.version != version:
        return None
    vectors = np.frombuffer(found.vectors, np.float32).astype(np.float64)
    numbers = (len(vectors) - 2 - WAVES) // 3
    centre, scale, mean = np.split(vectors, [numbers, 2 * numbers])
    root = np.zeros((len(mean), len(mean)))
    root[np.tril_indices(len(mean))] = np.frombuffer(found.root, np.float16)
    return Learned(found.comparisons, found.gain, centre, scale, mean, root)
