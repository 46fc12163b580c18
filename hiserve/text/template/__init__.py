"""Chat templates: a conversation to one text, in bounded time and memory."""
