"""Text processing around the model: tokenizer, chat template, grammars, tool calls. No torch."""
