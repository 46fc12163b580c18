"""Texts and conversations to the token ids of prompts, with those of remembered replies."""
