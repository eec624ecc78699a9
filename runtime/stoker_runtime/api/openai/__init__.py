"""OpenAI's dialect: chat, completions, models, and the small routes beside them."""
