"""From a checked body to sequences in the engine and their text: what every generating route shares."""
