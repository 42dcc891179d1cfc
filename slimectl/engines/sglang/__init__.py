"""SGLang engines: SGLang servers, and other servers with the same HTTP API."""
