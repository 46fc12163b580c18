"""Text to tokens and back: request bodies, chat templates, prompts, tokenizers, and the reader of replies."""
