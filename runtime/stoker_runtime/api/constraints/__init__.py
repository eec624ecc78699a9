"""Which constraint a body asks for: response formats, structured outputs, structural tags."""
