"""Commands for a person at a terminal: `stoker chat`, `stoker info`."""
