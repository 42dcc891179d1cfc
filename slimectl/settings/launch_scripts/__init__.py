"""Reads launch scripts and configurations of other stacks, and writes settings; nothing of them is executed."""
