"""The embedded engine over HTTP, with SGLang's API for rollouts and weights and OpenAI's for agents and judges."""
