"""Leader and workers without processes, and the parts of the room one by one."""
