"""Records, prompts, chats and run directories on disk."""
