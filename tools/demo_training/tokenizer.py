# The demo model's tokenizer: byte-level BPE, so that any UTF-8 text encodes and decodes to itself, and the chat
# template that turns messages into the marked turns the model was trained on.

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, PAD, SYSTEM, USER, ASSISTANT, END = "<|bos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (BOS, PAD, SYSTEM, USER, ASSISTANT, END)  # their ids are 0 to 5

# Each turn is <|role|>text<|end|>; content may be a string, null or OpenAI's list of parts. Roles other than system,
# developer and assistant speak to the model, so they are shown as the user.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}{{- '<|system|>' -}}
{%- elif message.role == 'assistant' -%}{{- '<|assistant|>' -}}
{%- else -%}{{- '<|user|>' -}}
{%- endif -%}
{%- if message.content is string -%}{{- message.content | trim -}}
{%- elif message.content -%}
{{- message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join | trim -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer fitted to ``texts``; all 256 bytes are in its vocabulary whatever the texts hold."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Plain text opens with <|bos|>; a rendered chat brings its own and is encoded with add_special_tokens=False.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
