# What a checkpoint brings to the front: files, tokenizer, chat template, tool calls.
