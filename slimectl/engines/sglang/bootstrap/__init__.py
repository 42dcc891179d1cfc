"""Scripts and modules that run in SGLang's Python; none of them imports slimectl."""
