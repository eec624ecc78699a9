"""Commands for a person at a terminal: `stoker chat`, `stoker info`.

A new command is a module with `main(argv)` here and a line in the table of `cli/stoker_cli/__init__.py`.
Must never know: how a server lives; `chat` speaks HTTP like any client.
"""
