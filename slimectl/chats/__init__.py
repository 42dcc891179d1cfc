"""Chats: messages in one form, and the templates that render them."""
