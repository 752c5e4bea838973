"""Between text and tokens: tokenizer, chat template, grammars, tool calls. No torch."""
