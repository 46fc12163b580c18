"""What can be sent: synthetic prompts, recorded chats, recorded traces."""
