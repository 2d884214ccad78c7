# Declared system prompts as the tokens that conversations with them begin with.

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.serving import shared_prefixes
from tests.support.front import token_ids, write_small_files


def test_conversations_begin_with_the_declared_tokens(tmp_path: Path) -> None:
    """Each declared prompt becomes what is common to all conversations with it, up to where the user speaks."""
    checkpoint = load_checkpoint(write_small_files(tmp_path))
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(["You are helpful.", "Be brief."]))

    first, second = shared_prefixes(checkpoint, file)

    assert list(first) == token_ids("<system>You are helpful.<user>")
    assert list(second) == token_ids("<system>Be brief.<user>")


@pytest.mark.parametrize("content", ['"one"', "[1]", '[""]', '{"a": "b"}'])
def test_file_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    """Anything but a list of texts says what is needed."""
    checkpoint = load_checkpoint(write_small_files(tmp_path))
    (tmp_path / "prompts.json").write_text(content)

    with pytest.raises(ValueError, match="JSON list of system prompts"):
        shared_prefixes(checkpoint, tmp_path / "prompts.json")


def test_model_without_a_template_has_no_system_prompts(tmp_path: Path) -> None:
    """A declaration that cannot mean anything is an error, not silence."""
    checkpoint = load_checkpoint(write_small_files(tmp_path, chat_template=None))
    (tmp_path / "prompts.json").write_text('["one"]')

    with pytest.raises(ValueError, match="no chat template"):
        shared_prefixes(checkpoint, tmp_path / "prompts.json")
