"""Reads launch scripts and configurations of other stacks, and writes settings. Nothing in them is executed."""
