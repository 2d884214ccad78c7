# Fits the complexity model and exports its weights:
#   python -m router.training.fit OUTCOMES.csv.gz --out router/artifacts

from __future__ import annotations

import argparse
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, hstack  # type: ignore[import-untyped]
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler

from router.complexity import FORMAT, MANIFEST, WEIGHTS
from router.features import BUCKETS, FORM_LIMIT, LENGTH, bounded, read_text
from router.training.dataset import BROKEN_SUBJECT, Outcomes, read_outcomes

SEED = 20260
FOLDS = 5
REGULARISATION = 0.05  # scikit-learn's C; the strongest that cost nothing at home helped most on unseen subjects
GAIN_REGULARISATION = 80.0  # Ridge's alpha
FORM_SHARE = 0.5  # of a standard deviation: how much a form feature weighs beside the words, before regularisation
STRONG_MODEL = "gpt-4-1106-preview"  # of the pair whose outcomes are fitted; other pairs are for evaluation


class FittedComplexity:
    """The model as scikit-learn has it: three heads on words and form, and a joint step fitted out of fold."""

    def __init__(self) -> None:
        self.tfidf = TfidfTransformer(sublinear_tf=True)
        self.scaler = StandardScaler()
        self.strong = LogisticRegression(C=REGULARISATION, max_iter=2000)
        self.weak = LogisticRegression(C=REGULARISATION, max_iter=2000)
        self.gain = Ridge(alpha=GAIN_REGULARISATION)
        self.blend = StandardScaler()
        self.calibration = LogisticRegression()

    def fit(self, outcomes: Outcomes) -> FittedComplexity:
        """Fit the heads on all rows, and the joint step on what heads fitted on other rows say of each row."""
        counts, form = features_of(outcomes.prompts)
        self.tfidf.fit(counts)
        self.scaler.fit(form)
        features = self._features(counts, form)
        signals = np.zeros((len(outcomes), 3))
        for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(features, outcomes.suffices):
            self._fit_heads(features[train], outcomes.take(train))
            signals[test] = self._signals(features[test])
        self.blend.fit(signals)
        self.calibration.fit(self._blended(signals), outcomes.suffices)
        self._fit_heads(features, outcomes)
        return self

    def scores(self, prompts: list[str]) -> npt.NDArray[np.float64]:
        """Return the probability that a small model suffices, one per prompt."""
        counts, form = features_of(prompts)
        signals = self._signals(self._features(counts, form))
        return self.calibration.predict_proba(self._blended(signals))[:, 1]

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return what serving needs, named as ``router.complexity.Complexity`` reads it."""
        heads = np.vstack([self.strong.coef_, self.weak.coef_, self.gain.coef_]).T
        joint = self.calibration.coef_[0, 0] / self.blend.scale_
        intercept = self.calibration.intercept_[0] - joint @ self.blend.mean_
        arrays = {
            "idf": self.tfidf.idf_,
            "words": heads[:BUCKETS],
            "form": heads[BUCKETS:] * FORM_SHARE,
            "mean": self.scaler.mean_,
            "scale": self.scaler.scale_,
            "bias": np.array([self.strong.intercept_[0], self.weak.intercept_[0], self.gain.intercept_]),
            "joint": np.append(joint, intercept),
        }
        return {name: np.asarray(array, np.float32) for name, array in arrays.items()}

    def _fit_heads(self, features: csr_matrix, outcomes: Outcomes) -> None:
        self.strong.fit(features, outcomes.strong > 0.5)
        self.weak.fit(features, outcomes.weak > 0.5)
        self.gain.fit(features, outcomes.strong - outcomes.weak)

    def _signals(self, features: csr_matrix) -> npt.NDArray[np.float64]:
        """Return (rows, 3), each rising with difficulty: gap of the chances to be right, expected gain, length."""
        gap = self.strong.predict_proba(features)[:, 1] - self.weak.predict_proba(features)[:, 1]
        length = features[:, BUCKETS + LENGTH].toarray()[:, 0] / FORM_SHARE
        return np.column_stack([gap, self.gain.predict(features), length])

    def _blended(self, signals: npt.NDArray) -> npt.NDArray[np.float64]:
        # Each signal counts the same, in standard deviations: weights fitted at home served worse abroad.
        return self.blend.transform(signals).sum(axis=1, keepdims=True)

    def _features(self, counts: csr_matrix, form: npt.NDArray) -> csr_matrix:
        standard = np.clip(self.scaler.transform(form), -FORM_LIMIT, FORM_LIMIT) * FORM_SHARE
        return hstack([self.tfidf.transform(counts), standard], format="csr")


def fitted_rows(outcomes: Outcomes) -> Outcomes:
    """Return the rows that the model is fitted on: one pair of models, without the subject whose labels are broken."""
    return outcomes.take((outcomes.strong_model == STRONG_MODEL) & (outcomes.domain != BROKEN_SUBJECT))


def features_of(prompts: list[str]) -> tuple[csr_matrix, npt.NDArray[np.float64]]:
    """Return hashed word counts (rows, buckets) and form features (rows, form), as serving computes them."""
    readings = [read_text(bounded(prompt)) for prompt in prompts]
    starts = np.cumsum([0, *(len(reading.buckets) for reading in readings)])
    buckets = np.concatenate([reading.buckets for reading in readings])
    counts = np.concatenate([reading.counts for reading in readings]).astype(np.float64)
    shape = (len(prompts), BUCKETS)
    return csr_matrix((counts, buckets, starts), shape=shape), np.array([reading.form for reading in readings])


def export(model: FittedComplexity, folder: Path, facts: dict[str, object]) -> None:
    """Write weights and manifest into ``folder``; ``facts`` say where the model comes from."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **model.weights())  # type: ignore[arg-type]
    (folder / WEIGHTS).write_bytes(buffer.getvalue())
    manifest = {"format": FORMAT, "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(), **facts}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the complexity model and export its weights.")
    parser.add_argument("outcomes", type=Path, help="gzipped CSV of outcomes")
    parser.add_argument("--out", type=Path, required=True, help="folder for the artefact")
    arguments = parser.parse_args()
    outcomes = fitted_rows(read_outcomes(arguments.outcomes))
    model = FittedComplexity().fit(outcomes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    export(model, arguments.out, {"rows": len(outcomes), "strong_model": STRONG_MODEL, "seed": SEED})
    print(f"fitted on {len(outcomes)} rows; wrote {WEIGHTS} and {MANIFEST} to {arguments.out}")


if __name__ == "__main__":
    main()
