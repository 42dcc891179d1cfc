"""The embedded engine behind HTTP: SGLang's API for rollouts and weights, OpenAI's for agents and judges."""
