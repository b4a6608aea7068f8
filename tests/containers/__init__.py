"""Docker, Compose and other systems."""
