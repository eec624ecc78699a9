"""Stoker's runtime: the inference engine and its OpenAI API server. Never imports kopf or kubernetes."""
