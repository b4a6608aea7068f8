"""One module at a time, mirroring pipeline/."""
