"""The reward service: scores pictures and prompts, over HTTP."""
