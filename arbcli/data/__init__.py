"""Text: files, conversion, tokens and chats, to seeded batches."""
