"""hf:// sources, by way of huggingface_hub: it resolves, lists, streams (over HTTP, or Xet) and knows the user's cache.

`source.py` is what the rest of the fetch sees; `session.py` holds the library's requests to our limits and turns its
errors into ours; `cache.py` reads and fills the cache that all of the user's programs share. huggingface_hub takes a
third of a second to import: this folder alone imports it, and is itself imported when a name of the hub is met. A
hub with another protocol is another source beside this folder.
Must never know: where files are published, or who asked for them.
"""
