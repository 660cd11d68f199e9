"""The inference workbench: an LLM inference engine small enough to read, with techniques that compose."""
