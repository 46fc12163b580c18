"""Data sets: synthetic prompts, recorded chats, recorded traces."""
