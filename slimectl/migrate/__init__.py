"""Readers of what other stacks wrote: launch scripts, functions and dumps."""
