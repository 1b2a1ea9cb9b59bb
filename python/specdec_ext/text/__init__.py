"""Around the tokens of a request: tokenizer, stop strings, chat templates, outputs, metrics."""
