"""SGLang engines: real servers, and whatever else speaks their HTTP API."""
