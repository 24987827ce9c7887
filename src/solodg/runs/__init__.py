"""One run, from a configuration to a trained, scored model in a folder."""
