"""What runs in SGLang's own Python: scripts and their modules, none of which imports slimectl."""
