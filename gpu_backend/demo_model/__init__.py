# A small Llama, trained in this repository, so that a fresh machine has a model to serve without a download. The
# checkpoint is committed beside the script, the questions and the answers it was trained on.

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"  # a Hugging Face folder: config, weights, tokenizer, chat template
