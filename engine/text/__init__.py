"""Text without torch: model artifacts, tokenizer, chat template, incremental detokenizer."""
